"""Matrices in FP8 with a scale for each block of 128 x 128: the definition of what vLLM makes of new weights.

    scale = max(|block|, 1e-4) / 448            float32; 448 is the largest number of float8_e4m3fn
    held  = float8_e4m3fn(block * (1 / scale))  to nearest, ties to even

The scheme of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) and of vLLM's "fp8_per_block". Blocks begin at the first row and
column of a fused tensor of an engine's shard; the last ones may be smaller. Biases, norms, routers, the embedding and the head
stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from marsrl.rollout.weights.layout import FP8_BLOCK as BLOCK

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers [..., N, K] float8_e4m3fn, scales [..., N / 128, K / 128] float32, rounded up) of a [..., N, K] weight."""
    if weight.dim() > 2:  # experts, one after the other: the float32 copies of one are small
        numbers, scales = zip(*map(quantised, weight), strict=True)
        return torch.stack(numbers), torch.stack(scales)
    rows, cols = weight.shape
    blocks = (
        pad(weight, (0, -cols % BLOCK, 0, -rows % BLOCK)).float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    )
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(1e-4) / _LARGEST
    numbers = (blocks * (1 / scales)).to(torch.float8_e4m3fn)
    return numbers.flatten(2).flatten(0, 1)[:rows, :cols].contiguous(), scales[:, 0, :, 0]
