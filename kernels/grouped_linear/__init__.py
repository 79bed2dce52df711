"""grouped_linear: each expert's linear layer on its own rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.checks import FLOATS, INTEGERS, check
from marsrl.kernels.dispatch import Implementation, Op, why_not_host
from marsrl.kernels.grouped_linear.counts import Counts
from marsrl.kernels.grouped_linear.cpu import grouped_linear_cpu
from marsrl.kernels.grouped_linear.reference import grouped_linear_reference
from marsrl.kernels.grouped_linear.torch_impl import grouped_linear_torch, machine_lacks_grouped_mm, why_not_grouped_mm
from marsrl.kernels.triton_machine import machine_lacks_triton, why_not_triton


def grouped_linear(x: Tensor, weights: Tensor, tokens_per_expert: Tensor | Sequence[int]) -> Tensor:
    """Rows of x, sorted by expert, times the transposed weight of their expert; differentiable.

    Args:
        x: [T, K] float.
        weights: [E, N, K], same dtype.
        tokens_per_expert: [E] int tensor, or a list: how many rows each expert has; they add up to T. A tensor on the
            GPU is not read by the host: its values are not checked, and rows behind their sum are undefined.

    Returns:
        [T, N] in the dtype of x.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("grouped_linear", "x", x, (None, None), FLOATS)
    check("grouped_linear", "weights", weights, (None, None, x.shape[1]), (x.dtype,), x.device)
    return _OP(x, weights, _counts(tokens_per_expert, weights.shape[0], x))


def _counts(tokens_per_expert: Tensor | Sequence[int], num_experts: int, x: Tensor) -> Counts:
    if isinstance(tokens_per_expert, Tensor):
        on_gpu = None if tokens_per_expert.device.type == "cpu" else x.device
        check("grouped_linear", "tokens_per_expert", tokens_per_expert, (num_experts,), INTEGERS, on_gpu)
        if on_gpu is not None:
            return Counts(None, tokens_per_expert)
        counts = tokens_per_expert.tolist()
    else:
        counts = list(tokens_per_expert)
    if len(counts) != num_experts or sum(counts) != x.shape[0] or any(count < 0 for count in counts):
        raise ValueError(
            f"grouped_linear: tokens_per_expert is {counts}, "
            f"expected {num_experts} counts that add up to {x.shape[0]} rows"
        )
    return Counts(counts, None)


def _why_not_cpu(x: Tensor, *_: object) -> str | None:
    return why_not_host("x", x)


def _why_not_triton(x: Tensor, *_: object) -> str | None:
    return "float64 input, the kernels add in float32" if x.dtype == torch.float64 else why_not_triton("x", x)


def _triton(*args: Any) -> Tensor:
    from marsrl.kernels.grouped_linear.triton_impl import grouped_linear_triton

    return grouped_linear_triton(*args)


_OP = Op(
    "grouped_linear",
    (
        Implementation("torch", grouped_linear_torch, why_not_grouped_mm, machine_lacks_grouped_mm),
        Implementation("triton", _triton, _why_not_triton, machine_lacks_triton),
        Implementation("cpu", grouped_linear_cpu, _why_not_cpu),
        Implementation("reference", grouped_linear_reference),
    ),
)
