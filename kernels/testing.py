"""Accuracy that tests and benchmarks require of a kernel's result.

A kernel passes if its error against float64 is at most twice the error of plain PyTorch at the kernel's dtype:

    exact = definition(*(tensor.double() for tensor in inputs))
    assert_accurate("output", kernel(*inputs), exact, plain=definition(*inputs))

Matrix products need a wider bound, because a library chooses the order of their sums by processor and shape. Plain PyTorch's
error at one shape therefore says little about another. For products, also compute the definition for inputs that are changed by
one rounding error:

    moved = definition(*(off_by_an_ulp(tensor) for tensor in inputs))
    assert_accurate("product", a @ b, exact, plain, moved=moved, terms=a.shape[-1])
"""

import torch
from torch import Tensor

# Rounding error that a block may have, relative to the block's norm. In 16 bits, each operand and each result is rounded by at
# most half an eps. In float32, p = e^(log p) inherits the rounding error of log p, and -log p is up to 16 nats.
_ROUNDING = {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}
_ROUNDING |= {torch.float32: 16 * torch.finfo(torch.float32).eps, torch.float64: 4 * torch.finfo(torch.float64).eps}


def off_by_an_ulp(values: Tensor) -> Tensor:
    """Move each value up or down by one ulp of float32.

    The signs depend only on the shape; they are the same on every machine.

    Returns float64. On a GPU, 16-bit values are also made smaller, because tensor cores truncate sums to float32, whereas other
    units round them (doi:10.7717/peerj-cs.330). Truncation loses half an ulp on average for every 16 products, which is n / 32
    ulp for n products. So each of the two operands is made sqrt(n) / 64 ulp smaller; assert_accurate multiplies the difference by
    sqrt(n).
    """
    eps = torch.finfo(torch.float32).eps
    signs = torch.randint(0, 2, values.shape, generator=torch.Generator().manual_seed(0)).to(values.device) * 2 - 1
    truncated = eps * values.shape[-1] ** 0.5 / 64 if values.is_cuda and values.dtype.itemsize == 2 else 0.0
    return values.double() * (1 + eps * signs) * (1 - truncated)


def assert_accurate(
    name: str,
    result: Tensor,
    exact: Tensor,
    plain: Tensor,
    scale: float = 0.0,
    moved: Tensor | None = None,
    terms: int = 1,
    apart: Tensor | None = None,
) -> None:
    """Fail unless `result` is about as accurate as plain PyTorch.

    Accuracy is checked for all entries together, and in each block of about 32 by 32 entries. The largest error of all entries
    may be twice plain PyTorch's, or 4 ulp of the largest value. The norm of a block's errors may be twice plain PyTorch's, or
    _ROUNDING times the block's norm. Blocks show errors that a few large entries elsewhere would hide. NaN fails.

    Args:
        name: Name of the result in the message.
        result: [...] The kernel's result, in its own dtype.
        exact: [...] float64, the definition's result in float64.
        plain: [...] The definition's result in PyTorch at the kernel's dtype.
        scale: Magnitude of the summed terms, if they cancel and the result is therefore smaller.
        moved: [...] float64, the definition's result for inputs changed by off_by_an_ulp. Errors up to sqrt(terms) *
            |moved - exact| are then allowed too, because random rounding errors in a sum of n terms grow like 2 sqrt(n) u
            (doi:10.1137/18M1226312 with lambda = 2).
        terms: Number of terms of the longest sum.
        apart: [N] bool over the first dimension: rows that get blocks of their own, because they are hundreds of times smaller
            than the others. Examples are the rows of a head's weight gradient for tokens that are never targets.

    Raises:
        AssertionError: The message has the error, the allowed error and plain PyTorch's error.
    """
    assert result.shape == exact.shape, f"{name}: shape {list(result.shape)}, expected {list(exact.shape)}"
    if result.numel() == 0:
        return
    assert exact.dtype == torch.float64, f"{name}: exact is {exact.dtype}, expected float64"
    errors, plain_errors = result.double() - exact, plain.double() - exact
    rounding = None if moved is None else terms**0.5 * (moved - exact)  # error of a sum in another order
    finfo = torch.finfo(result.dtype)

    error, plain_error = errors.abs().max().item(), plain_errors.abs().max().item()
    four_ulp = 4 * finfo.eps * max(exact.abs().max().item(), scale)
    allowed = max(2 * plain_error, four_ulp, finfo.tiny)  # numbers below `tiny` are denormal
    if rounding is not None:
        allowed = max(allowed, rounding.abs().max().item())
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e} (plain PyTorch: {plain_error:.3e})"

    # Blocks this small relative to the others may be 0, because float32 has no exponentials below e^-87.
    negligible = max(finfo.tiny, 1e-30 * exact.abs().max().item())
    for part, rows in _parts(apart):
        off, base, size, ones = (
            _block_norms(_matrix(values, rows)) for values in (errors, plain_errors, exact, torch.ones_like(exact))
        )
        limit = torch.maximum(2 * base, _ROUNDING[result.dtype] * torch.maximum(size, scale * ones))
        limit = torch.maximum(limit, negligible * ones)
        if rounding is not None:
            limit = torch.maximum(limit, _block_norms(_matrix(rounding, rows)))
        if (is_off := ~(off <= limit)).any():
            at = tuple(is_off.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {int(is_off.sum())} of {off.numel()} blocks{part} are off, {at} by {off[at]:.3e}, allowed "
                f"{limit[at]:.3e} (plain PyTorch: {base[at]:.3e}, size {size[at]:.3e})"
            )


def _parts(apart: Tensor | None) -> list[tuple[str, Tensor | None]]:
    """Split the rows into the parts that get separate blocks.

    Returns (words for the message, rows) for each part; rows is [N] bool, or None for all rows.
    """
    if apart is None:
        return [("", None)]
    return [(words, rows) for words, rows in ((" apart", apart), (" of the others", ~apart)) if rows.any()]


def _matrix(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return the chosen rows as a matrix [N, M].

    All dimensions but the last are flattened; a vector has M = 1.
    """
    if rows is not None:
        values = values[rows]
    return values.reshape(-1, 1) if values.dim() < 2 else values.flatten(0, -2)


def _block_norms(values: Tensor) -> Tensor:
    """Return the root of the sum of squares of each block of a matrix [N, M], as [I, J].

    Blocks are 32 by 32, or larger so that at most 64 fit a dimension. The last block includes the remainder, because a single
    entry can be much more accurate, or much smaller, than the others.
    """
    squares = values.square()
    for dim in (1, 0):
        length = values.shape[dim]
        block = max(32, -(-length // 64))
        shape = list(squares.shape)
        shape[dim] = max(1, length // block)
        block_of_index = (torch.arange(length, device=values.device) // block).clamp_(max=shape[dim] - 1)
        squares = squares.new_zeros(shape).index_add_(dim, block_of_index, squares)
    return squares.sqrt()
