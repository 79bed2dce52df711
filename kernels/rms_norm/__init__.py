"""RMSNorm with an optional rotary embedding, in one pass over memory in forward and in backward."""

from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.checks import FLOATS, check, rows_dense, why_not_double
from marsrl.kernels.differentiable import Gradient
from marsrl.kernels.dispatch import Op
from marsrl.kernels.library import why_no_cpu_library, why_not_float_or_bfloat16
from marsrl.kernels.rms_norm.cpu import CpuRmsNorm
from marsrl.kernels.rms_norm.reference import rms_norm_reference
from marsrl.kernels.traced_op import register
from marsrl.kernels.triton_machine import why_not_triton_float32

WIDEST = 16384  # columns of a row that a program of triton_impl.py holds at once


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, is_zero_centred: bool = False, rotation: Tensor | None = None
) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight; differentiable.

    This is equation 4 of Zhang and Sennrich, arXiv:1910.07467. With `rotation`, a rotary embedding follows the norm, as for
    queries and keys (Su et al., arXiv:2104.09864, section 3.2.2): columns i and N/2 + i, a pair in Qwen and Llama, are rotated by
    angle i of the row's token.

    The arithmetic is float32, rounded once at the end. x, weight and one float32 number per row are saved for the backward. The
    gradient of the weight is summed in float32 or float64. Evenly strided rows, such as the key heads in a fused projection, are
    read in place.

    On a GPU the backward reads x and the incoming gradient once. PyTorch's fused norm reads them twice, once per computed
    gradient, and first copies strided rows. Not timed on a GPU.

    Args:
        x: [..., N] float.
        weight: [N] float, which may have another dtype.
        eps: added to the mean square, which keeps rows of zeros finite.
        is_zero_centred: multiply rows by 1 + weight instead of weight, like Megatron's layernorm_zero_centered_gamma.
        rotation: [T, N] float32 for x [T, ..., N]: the cosines of each token's N/2 angles, then the sines. It gets no gradient.
            None: rows are not rotated.

    Returns:
        [..., N] in the dtype of x.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("rms_norm", "x", x, (*x.shape[:-1], None), FLOATS)
    check("rms_norm", "weight", weight, (x.shape[-1],), FLOATS, x.device)
    if rotation is not None:
        check("rms_norm", "rotation", rotation, (x.shape[0], x.shape[-1]), (torch.float32,), x.device)
        if x.shape[-1] % 2:
            raise ValueError(f"rms_norm: x has {x.shape[-1]} columns, expected an even number for a rotation")
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    args = _dense(rows, weight, rotation, eps, float(is_zero_centred))
    out: Tensor = torch.ops.marsrl.rms_norm(*args)[0] if torch.compiler.is_compiling() else _OP(*args)
    return out.view(x.shape)


def _dense(
    rows: Tensor, weight: Tensor, rotation: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor | None, float, float]:
    return rows_dense(rows), weight, rotation, eps, offset


def _results(rows: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocate the output [R, N] and 1 / sqrt(mean(x^2) + eps) [R] float32, for the backward."""
    return rows.new_empty(rows.shape), rows.new_empty(rows.shape[0], dtype=torch.float32)


def _why_not_cpu(rows: Tensor, weight: Tensor, *_: Any) -> str | None:
    return why_not_float_or_bfloat16("x", rows) or why_not_double("weight", weight)


def _why_not_triton(rows: Tensor, weight: Tensor, *_: Any) -> str | None:
    if rows.shape[1] > WIDEST:
        return f"x has {rows.shape[1]} columns, the kernels support up to {WIDEST}"
    return why_not_triton_float32("x", rows) or why_not_double("weight", weight)


_GRADIENT = Gradient("rms_norm", num_tensors=3)
_OP = Op(
    "rms_norm",
    (
        _GRADIENT.triton("rms_norm.triton_impl", "TritonRmsNorm", _why_not_triton),
        _GRADIENT.implementation("cpu", CpuRmsNorm, _why_not_cpu, why_no_cpu_library),
        _GRADIENT.reference(rms_norm_reference),
    ),
)
register(_OP, _GRADIENT, "Tensor rows, Tensor weight, Tensor? rotation, float eps, float offset", _results, 2, _dense)
