"""Activation between the two projections of an MLP or an expert, in one pass over memory in forward and in backward."""

import torch
from torch import Tensor

from marsrl.kernels.checks import FLOATS, check, why_not_double
from marsrl.kernels.differentiable import Gradient
from marsrl.kernels.dispatch import Op
from marsrl.kernels.library import why_no_cpu_library, why_not_float_or_bfloat16
from marsrl.kernels.swiglu.cpu import CpuSwiglu
from marsrl.kernels.swiglu.reference import swiglu_reference
from marsrl.kernels.traced_op import register
from marsrl.kernels.triton_machine import why_not_triton_float32


def swiglu(products: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up, times a router's weight if there is one; differentiable.

    This is equation 6 of Shazeer, arXiv:2002.05202. The arithmetic is float32, rounded once at the end. Only `products` and
    `weights` are saved for the backward.

    Args:
        products: [..., 2 F] float: each row has the gate [F], then up [F].
        weights: [...] float, the router's weight of each row, in any float dtype; None: 1.

    Returns:
        [..., F] in the dtype of products.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("swiglu", "products", products, (*products.shape[:-1], None), FLOATS)
    if products.shape[-1] % 2:
        raise ValueError(f"swiglu: products has {products.shape[-1]} columns, expected an even number (gate and up)")
    if weights is not None:
        check("swiglu", "weights", weights, tuple(products.shape[:-1]), FLOATS, products.device)
    rows = products.reshape(products.shape[:-1].numel(), products.shape[-1])
    args = _dense(rows, None if weights is None else weights.reshape(-1))
    out: Tensor = torch.ops.marsrl.swiglu(*args) if torch.compiler.is_compiling() else _OP(*args)
    return out.view(*products.shape[:-1], products.shape[-1] // 2)


def _dense(products: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return products.contiguous(), weights


def _results(products: Tensor, weights: Tensor | None) -> tuple[Tensor]:
    return (products.new_empty(products.shape[0], products.shape[1] // 2),)


def _why_not_cpu(products: Tensor, weights: Tensor | None) -> str | None:
    return why_not_float_or_bfloat16("products", products) or why_not_double("weights", weights)


def _why_not_triton(products: Tensor, weights: Tensor | None) -> str | None:
    return why_not_triton_float32("products", products) or why_not_double("weights", weights)


_GRADIENT = Gradient("swiglu", num_tensors=2)
_OP = Op(
    "swiglu",
    (
        _GRADIENT.triton("swiglu.triton_impl", "TritonSwiglu", _why_not_triton),
        _GRADIENT.implementation("cpu", CpuSwiglu, _why_not_cpu, why_no_cpu_library),
        _GRADIENT.reference(swiglu_reference),
    ),
)
register(_OP, _GRADIENT, "Tensor products, Tensor? weights", _results, 1, _dense)
