"""swiglu: the activation between the two projections of an MLP or of an expert, in one walk over memory each way."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from marsrl.kernels.checks import FLOATS, check
from marsrl.kernels.dispatch import Implementation, Op
from marsrl.kernels.first_derivative import first_derivative_only
from marsrl.kernels.library import why_no_cpu_library, why_not_float_or_bfloat16
from marsrl.kernels.swiglu.cpu import CpuSwiglu
from marsrl.kernels.swiglu.reference import swiglu_reference
from marsrl.kernels.triton_machine import machine_lacks_triton, why_not_triton


def swiglu(products: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(gate) * up * weight, differentiable; Shazeer, arXiv:2002.05202, equation 6, with an expert's share of a token.

    The arithmetic is float32, rounded once at the end, and the backward keeps `products` and `weights` alone.

    Args:
        products: [..., 2 F] float: of each row the gate [F], then what it lets through [F].
        weights: [...] float, one a row: the router's, which may have another dtype; None: 1.

    Returns:
        [..., F] in the dtype of products.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("swiglu", "products", products, (*products.shape[:-1], None), FLOATS)
    if products.shape[-1] % 2:
        raise ValueError(f"swiglu: products has {products.shape[-1]} columns, expected a gate and as many behind it")
    if weights is not None:
        check("swiglu", "weights", weights, tuple(products.shape[:-1]), FLOATS, products.device)
    rows = products.reshape(products.shape[:-1].numel(), products.shape[-1])
    out: Tensor = _OP(rows, None if weights is None else weights.reshape(-1))
    return out.view(*products.shape[:-1], products.shape[-1] // 2)


class RowsOfSwiglu(Protocol):
    """What an implementation does to contiguous rows [R, 2 F] and weights [R] float32 (None: 1)."""

    def forward(self, products: Tensor, weights: Tensor | None) -> Tensor:
        """[R, F] in the dtype of products."""

    def gradients(self, products: Tensor, weights: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of products [R, 2 F] and weights [R] float32 (None where there are none), from grad [R, F]."""


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Tensor, weights: Tensor | None, kernels: RowsOfSwiglu) -> Tensor:
        rows = products.contiguous()
        ctx.kernels, ctx.dtype = kernels, None if weights is None else weights.dtype
        ctx.save_for_backward(rows, weights)
        return kernels.forward(rows, _as_read(weights))

    @staticmethod
    @first_derivative_only("swiglu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        products, weights = ctx.saved_tensors
        of_products, of_weights = ctx.kernels.gradients(products, _as_read(weights), grad.contiguous())
        return of_products, None if of_weights is None else of_weights.to(ctx.dtype), None


def _as_read(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.float().contiguous()


def _on(load: Callable[[], RowsOfSwiglu]) -> Callable[[Tensor, Tensor | None], Tensor]:
    def run(products: Tensor, weights: Tensor | None) -> Tensor:
        out: Tensor = _Swiglu.apply(products, weights, load())
        return out

    return run


def _triton() -> RowsOfSwiglu:
    from marsrl.kernels.swiglu.triton_impl import TritonSwiglu  # Triton is imported when it first runs

    return TritonSwiglu()


def _why_not_cpu(products: Tensor, weights: Tensor | None) -> str | None:
    return why_not_float_or_bfloat16("products", products) or _why_not_wide(weights)


def _why_not_triton(products: Tensor, weights: Tensor | None) -> str | None:
    if products.dtype == torch.float64:
        return "products is float64, the kernels compute in float32"
    return why_not_triton("products", products) or _why_not_wide(weights)


def _why_not_wide(weights: Tensor | None) -> str | None:
    is_wide = weights is not None and weights.dtype == torch.float64
    return "weights is float64, the kernels compute in float32" if is_wide else None


_OP = Op(
    "swiglu",
    (
        Implementation("triton", _on(_triton), _why_not_triton, machine_lacks_triton),
        Implementation("cpu", _on(CpuSwiglu), _why_not_cpu, why_no_cpu_library),
        Implementation("reference", swiglu_reference),
    ),
)
