"""Accuracy checks of a kernel's result, for tests and benchmarks."""

import torch
from torch import Tensor


def off_by_an_ulp(values: Tensor) -> Tensor:
    """The values in float64, each an ulp of float32 up or down: the same ones for the same shape, on every machine.

    Operands of tensor cores, which are 16 bits on a GPU, are smaller besides: these cut what a sum of float32 cannot hold
    instead of rounding it (doi:10.7717/peerj-cs.330), half an ulp in the mean for each 16 products, so that a sum of n products
    over the last dimension is short by n / 32 ulp. assert_accurate multiplies by sqrt(n), and a product has two operands.
    """
    eps = torch.finfo(torch.float32).eps
    signs = torch.randint(0, 2, values.shape, generator=torch.Generator().manual_seed(0)).to(values.device) * 2 - 1
    cut = eps * values.shape[-1] ** 0.5 / 64 if values.is_cuda and values.dtype.itemsize == 2 else 0.0
    return values.double() * (1 + eps * signs) * (1 - cut)


def assert_accurate(
    name: str,
    found: Tensor,
    exact: Tensor,
    plain: Tensor,
    scale: float = 0.0,
    moved: Tensor | None = None,
    terms: int = 1,
    apart: Tensor | None = None,
) -> None:
    """Fail unless `found` is at most twice as far off as plain PyTorch, as a whole and in every block of its entries.

    exact: float64; plain: PyTorch's result at the dtype of the input. As a whole the largest error counts, and 4 ulp at
    the largest exact value are allowed, or at `scale` if that is larger: a sum whose terms cancel passes the size of its
    terms. Of a block the root of the sum of squares counts, and _ROUNDING of its size is allowed: blocks show what a few
    large entries hide. A NaN fails.

    moved, terms: where a library forms the products, in an order that it chooses by the processor and by the shape, so
    that neither its error nor plain PyTorch's is known. moved: the exact result for inputs that are off_by_an_ulp; a sum
    of n products of such numbers is off by what n roundings to float32 make of it where they strike its terms at random,
    and adding one after the other strikes sums of up to n terms. So sqrt(terms), the number of the longest sum, times
    |moved - exact| is allowed too: 2 sqrt(n) u for a sum, as in doi:10.1137/18M1226312 with lambda = 2.

    apart: [N] bool over the first dimension: rows that share no block with the others, such as those of a weight's
    gradient that belong to no target, hundreds of times smaller.
    """
    assert found.shape == exact.shape, f"{name}: shape {list(found.shape)}, expected {list(exact.shape)}"
    if found.numel() == 0:
        return
    assert exact.dtype == torch.float64, f"{name}: the judge is {exact.dtype}"
    errors, of_plain = found.double() - exact, plain.double() - exact
    of_moved = None if moved is None else moved - exact
    error, baseline = errors.abs().max().item(), of_plain.abs().max().item()
    ulps = 4 * torch.finfo(found.dtype).eps * max(exact.abs().max().item(), scale)
    allowed = max(2 * baseline, ulps, torch.finfo(found.dtype).tiny)  # below `tiny` numbers are denormal
    if of_moved is not None:
        allowed = max(allowed, terms**0.5 * of_moved.abs().max().item())
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e} (plain PyTorch: {baseline:.3e})"

    # An exponential this small beside the others may be 0, as one below e^-87 is in float32.
    nothing = max(torch.finfo(found.dtype).tiny, 1e-30 * exact.abs().max().item())
    for part, kept in _parts(apart):
        off, base, value, whole = (
            _of_blocks(_rows(each, kept)) for each in (errors, of_plain, exact, torch.ones_like(exact))
        )
        limit = torch.maximum(2 * base, _ROUNDING[found.dtype] * torch.maximum(value, scale * whole))
        limit = torch.maximum(limit, nothing * whole)
        if of_moved is not None:
            limit = torch.maximum(limit, terms**0.5 * _of_blocks(_rows(of_moved, kept)))
        if (is_off := ~(off <= limit)).any():
            at = tuple(is_off.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {int(is_off.sum())} of {off.numel()} blocks{part} are off, {at} by {off[at]:.3e}, allowed "
                f"{limit[at]:.3e} (plain PyTorch: {base[at]:.3e}, size {value[at]:.3e})"
            )


# Allowed rounding error of a block, relative to its size. 16 bits: a product's operand and its result are each rounded once,
# by at most half an eps. float32: p = e^(log p) inherits the rounding of log p, which is up to 16 nats in size.
_ROUNDING = {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}
_ROUNDING |= {torch.float32: 16 * torch.finfo(torch.float32).eps, torch.float64: 4 * torch.finfo(torch.float64).eps}


def _parts(apart: Tensor | None) -> list[tuple[str, Tensor | None]]:
    """(what a message adds, the rows [N] bool) of the parts that share no block."""
    if apart is None:
        return [("", None)]
    return [(what, kept) for what, kept in ((" apart", apart), (" of the others", ~apart)) if kept.any()]


def _rows(values: Tensor, kept: Tensor | None) -> Tensor:
    """[N, M]: all dimensions but the last laid end to end; of a vector M is 1. kept: of the first dimension."""
    if kept is not None:
        values = values[kept]
    return values.reshape(-1, 1) if values.dim() < 2 else values.flatten(0, -2)


def _of_blocks(values: Tensor) -> Tensor:
    """[I, J] the root of the sum of squares of each block of [N, M]: 32 by 32 entries, more where there were over 64; the last
    takes the rest with it, as a single entry can be much more exact than others, or much smaller."""
    squares = values.square()
    for dim in (1, 0):
        length = values.shape[dim]
        block = max(32, -(-length // 64))
        shape = list(squares.shape)
        shape[dim] = max(1, length // block)
        place = (torch.arange(length, device=values.device) // block).clamp_(max=shape[dim] - 1)
        squares = squares.new_zeros(shape).index_add_(dim, place, squares)
    return squares.sqrt()
