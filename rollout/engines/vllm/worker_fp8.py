"""FP8 weights of vLLM's layers (quantization "fp8_per_block"): rounding like vLLM's, comparison, and updates in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from marsrl.rollout.weights.checksum import block_sum, checksum, checksum_of_sum
from marsrl.rollout.weights.layout import FP8_BLOCK, whole_box

_PARTS = {"w13_weight": 2, "w2_weight": 1}  # matrices in an expert's rows (gate, up; down), padded separately
_AT_ONCE = 1 << 24  # numbers rounded at once; each float32 copy takes 64 MiB


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [..., N, K] to FP8 as vLLM rounds new weights.

    Returns (numbers [..., N, K] float8_e4m3fn, scales [..., N / 128, K / 128] float32, with N and K rounded up to blocks).

        scale = max(|block|, 1e-4) / 448            float32; 448 is the largest number of float8_e4m3fn
        held  = float8_e4m3fn(block * (1 / scale))  to nearest, ties to even

    This is the scheme of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) and of vLLM's "fp8_per_block". Blocks of 128 x 128 begin
    at the first row and column of a fused tensor of an engine's shard; the last blocks may be smaller. Biases, norms, routers,
    the embedding and the head are not rounded.
    """
    *stack, rows, cols = weight.shape
    strip = max(1, _AT_ONCE // (FP8_BLOCK * cols)) * FP8_BLOCK
    if stack and rows % FP8_BLOCK:
        strip = rows  # split between matrices, because a block must not continue in the next matrix
    numbers, scales = zip(*map(_rounded, weight.reshape(-1, cols).split(strip)), strict=True)
    return torch.cat(numbers).view(weight.shape), torch.cat(scales).view(*stack, -(-rows // FP8_BLOCK), -1)


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = matrix.shape
    padded = pad(matrix, (0, -cols % FP8_BLOCK, 0, -rows % FP8_BLOCK)).float()
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(1e-4) / torch.finfo(torch.float8_e4m3fn).max
    numbers = (blocks * (1 / scales)).to(torch.float8_e4m3fn)
    return numbers.flatten(2).flatten(0, 1)[:rows, :cols].contiguous(), scales[:, 0, :, 0]


def is_fp8(module: Any, attribute: str) -> bool:
    """Return True if the layer's weight has a scale for each block."""
    return hasattr(module, f"{attribute}_scale_inv")


def holds(module: Any, attribute: str, received: Tensor) -> bool:
    """Return True if the layer holds, byte for byte, the received weight as rounded and converted for its kernel."""
    held = _of_layer(module, attribute)
    whole = _padded(received, _held_shape(received.shape, attribute), attribute)
    return all(map(_same_bytes, _laid_out(module, *quantised(whole)), held))


class Fp8Weight:
    """A layer's FP8 weight as the target of a transfer (direct.Converted).

    The weight is written in place, because captured CUDA graphs read its memory.
    """

    def __init__(self, module: Any, attribute: str, name: str, shape: tuple[int, ...]) -> None:
        """Accept weights of this shape for the fused tensor `name`.

        Raises ValueError: the layer's weight has another shape.
        """
        self.shape, self._attribute = shape, attribute
        found = [tensor.data for tensor in _of_layer(module, attribute)]
        expected = _held_shape(shape, attribute)
        if (held := tuple(found[0].shape)) != expected:
            raise ValueError(f"weight sync: {name} has shape {held} in FP8 in the engine; expected {expected}")
        self._held = [tensor.view(-1, *tensor.shape[-2:]) for tensor in found]  # [matrices, rows, columns]
        self._dtype, self._sent = torch.bfloat16, 0  # _sent: sum of block_sum over all weights sent
        self._written: dict[int, tuple[int, list[int]]] = {}  # by first matrix: (end, checksums of numbers and scales)

    def write(self, first: int, weight: Tensor) -> None:
        """Round whole matrices [matrices, rows, columns] of the weight, and write them from matrix `first` on."""
        end = first + len(weight)
        self._dtype = weight.dtype
        self._sent += block_sum(weight, whole_box(self.shape).cut(0, first, end), self.shape)
        shape = (len(weight), *self._held[0].shape[1:])
        rounded = quantised(_padded(weight, shape, self._attribute))
        for held, ours in zip(self._held, rounded, strict=True):
            held[first:end].copy_(ours)
        self._written[first] = end, [checksum(ours) for ours in rounded]

    def checksum(self) -> int:
        """Return the checksum of the weights that were sent, or its complement if the layer's bytes differ from those written."""
        sent = checksum_of_sum(self._sent, self._dtype, self.shape)
        same = all(
            sums == [checksum(held[first:end]) for held in self._held] for first, (end, sums) in self._written.items()
        )
        return sent if same else ~sent


def why_not_written(model: nn.Module) -> str:
    """Explain which layer kernel makes it impossible to write new FP8 weights in place; return "" if none does.

    A kernel that packs, transposes or shuffles its weight needs vLLM's loader.
    """
    tried = set()
    for module in model.modules():
        for found, attributes in (("fp8_linear", ("weight",)), ("fp8_backend", tuple(_PARTS))):
            kernel = getattr(getattr(module, "quant_method", None), found, None)
            for attribute in attributes if kernel is not None else ():
                label = getattr(kernel, "name", type(kernel).__name__)  # a backend of experts is an Enum
                shape = tuple(getattr(module, attribute).shape)
                if (label, attribute, shape) not in tried and not _is_plain(module, attribute):
                    return (
                        f"vLLM's FP8 kernel {label} holds weights in a form of its own, which cannot be written in place; use "
                        "GPUs with FP8 tensor cores (H100, H200), or set rollout.vllm.quantization=null"
                    )
                tried.add((label, attribute, shape))
    return ""


def _is_plain(module: Any, attribute: str) -> bool:
    """Return True if the layer holds its weight as `quantised` returns it: its kernel's conversion changes no byte."""
    numbers, scales = getattr(module, attribute), getattr(module, f"{attribute}_scale_inv", None)
    if scales is None or numbers.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
        return False
    blocks = [-(-size // FP8_BLOCK) for size in numbers.shape[-2:]]
    if (
        tuple(scales.shape) != (*numbers.shape[:-2], *blocks)
        or not numbers.is_contiguous()
        or not scales.is_contiguous()
    ):
        return False
    rows, cols = (
        torch.arange(size, device=numbers.device).mul(step).remainder(251).to(torch.uint8)
        for size, step in zip(numbers.shape[-2:], (1, 7), strict=True)
    )
    tried = (rows[:, None] + cols).view(torch.float8_e4m3fn), torch.rand(blocks, device=numbers.device)
    if numbers.dim() > 2:  # experts
        tried = tried[0][None], tried[1][None]
    return all(map(_same_bytes, _laid_out(module, *(each.clone() for each in tried)), tried))


def _of_layer(module: Any, attribute: str) -> tuple[Tensor, Tensor]:
    return getattr(module, attribute), getattr(module, f"{attribute}_scale_inv")


def _held_shape(shape: Sequence[int], attribute: str) -> tuple[int, ...]:
    """Return the shape in which vLLM holds a weight: experts padded to whole blocks, gate and up (w13) separately."""
    if attribute not in _PARTS:
        return tuple(shape)
    matrices, rows, cols = shape
    width, padded_cols = (-(-size // FP8_BLOCK) * FP8_BLOCK for size in (rows // _PARTS[attribute], cols))
    return matrices, _PARTS[attribute] * width, padded_cols


def _padded(weight: Tensor, shape: Sequence[int], attribute: str) -> Tensor:
    """Pad experts' matrices with zeros to this shape; return other weights as they are."""
    if attribute not in _PARTS:
        return weight
    matrices, rows, cols = shape
    parts = _PARTS[attribute]
    found = weight.new_zeros(matrices, parts, rows // parts, cols)
    found[:, :, : weight.shape[1] // parts, : weight.shape[2]] = weight.unflatten(1, (parts, -1))
    return found.flatten(1, 2)


def _laid_out(module: Any, numbers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a layer's FP8 numbers and scales to the form that its vLLM kernel reads (packed, transposed ...)."""
    if numbers.dim() > 2:
        from vllm.model_executor.layers.fused_moe.oracle.fp8 import convert_to_fp8_moe_kernel_format

        # w13 and w2 are converted separately, in the same way.
        both = (numbers, numbers, scales, scales, None, None)
        found = convert_to_fp8_moe_kernel_format(module.quant_method.fp8_backend, module, *both)
        return found[0], found[2]
    layer: Any = nn.Module()
    layer.weight_block_size = module.weight_block_size
    layer.register_parameter("weight", nn.Parameter(numbers, requires_grad=False))
    layer.register_parameter("weight_scale_inv", nn.Parameter(scales, requires_grad=False))
    module.quant_method.fp8_linear.process_weights_after_loading(layer)
    return layer.weight, layer.weight_scale_inv


def _same_bytes(ours: Tensor, held: Tensor) -> bool:
    return ours.shape == held.shape and torch.equal(
        ours.contiguous().view(torch.uint8), held.contiguous().view(torch.uint8)
    )
