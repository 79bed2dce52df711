"""Check the outputs and gradients of an op against its definition in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.testing import assert_accurate, off_by_an_ulp

Function = Callable[..., Any]  # its arguments are the leaves; it returns one tensor or several


def run(
    function: Function, leaves: Sequence[Tensor], upstream: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ([*outputs, *gradients of the leaves], upstream).

    upstream: gradients of the outputs, in any dtype; None: random ones in the first leaf's dtype.
    """
    leaves = [each.detach().requires_grad_() for each in leaves]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    if upstream is None:
        upstream = [torch.randn(out.shape, device=out.device).to(leaves[0].dtype) for out in outputs]
    gradients = torch.autograd.grad(outputs, leaves, [up.to(out.dtype) for up, out in zip(upstream, outputs)])
    return [*(each.detach() for each in outputs), *gradients], list(upstream)


def judge(
    names: Sequence[str],
    ours: Function,
    definition: Function,
    leaves: Sequence[Tensor],
    upstream: Sequence[Tensor] | None = None,
    *,
    plain: Function | None = None,
    terms: Sequence[int] | None = None,
    scales: Sequence[float] | None = None,
    apart: Sequence[Tensor | None] | None = None,
    repeats: bool = True,
) -> list[Tensor]:
    """Check outputs and gradients of `ours` by assert_accurate, and return them.

    names: names of the outputs, then of the leaves' gradients. terms, scales, apart: arguments of assert_accurate, in the order
    of names; terms is needed if a library computes matrix products. plain: the function without a kernel; None: the definition
    at the leaves' dtypes. repeats: also check that a second run gives the same bits.
    """
    num = len(names)
    results, upstream = run(ours, leaves, upstream)
    exact, _ = run(definition, [each.double() for each in leaves], upstream)
    beside, _ = run(plain or definition, leaves, upstream)
    moved = run(definition, [off_by_an_ulp(each) for each in leaves], upstream)[0] if terms else exact
    options = zip(scales or [0.0] * num, moved, terms or [1] * num, apart or [None] * num, strict=True)
    for name, one, truth, other, each in zip(names, results, exact, beside, options, strict=True):
        assert_accurate(name, one, truth, other, *each)
    if repeats:
        for name, one, other in zip(names, results, run(ours, leaves, upstream)[0], strict=True):
            assert torch.equal(one, other), f"{name} differs between two runs"
    return results
