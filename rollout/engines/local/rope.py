"""Rotary position embeddings (arXiv:2104.09864): a model's frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from marsrl.rollout.model_shape import ModelShape


def rotary_frequencies(shape: ModelShape, device: torch.device) -> Tensor:
    """[D/2] float32, radians a position: theta^(-2i/D) for i = 0 .. D/2 - 1.

    Rope type llama3, by wavelength w = 2 pi / frequency with o = original_positions: w below o / high_freq_factor stays, w above
    o / low_freq_factor is multiplied by `factor`, and between the two the frequency is interpolated linearly in o / w. Equal to
    transformers' modeling_rope_utils._compute_llama3_parameters, to the bit.
    """
    half = torch.arange(0, shape.head_size, 2, dtype=torch.float32, device=device) / shape.head_size
    plain = 1.0 / shape.rope_theta**half
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    old, low, high = scaling.original_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    share = (old / wavelength - low) / (high - low)
    between = (1 - share) * plain / scaling.factor + share * plain
    stretched = torch.where(wavelength > old / low, plain / scaling.factor, between)
    return torch.where(wavelength < old / high, plain, stretched)
