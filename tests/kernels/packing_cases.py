"""What every implementation of pack, unpack, compact and uncompact must do; the test files choose who does it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from marsrl.kernels import compact, pack, uncompact, unpack
from marsrl.kernels.packing import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
# () one element a row; 3: rows that no wide word divides; 0: rows without content
TRAILING = ((), (1,), (3,), (2, 4), (37,), (0,))

layouts = st.tuples(
    st.lists(st.integers(0, 5), max_size=6),  # lengths
    st.integers(0, 2),  # L beyond the longest
    st.sampled_from(TRAILING),
    st.sampled_from(DTYPES),
)
masks = st.tuples(st.lists(st.booleans(), max_size=12), st.sampled_from(TRAILING), st.sampled_from(DTYPES))


def values_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.randint(-100, 100, shape)
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


def poison(values: Tensor) -> Tensor:
    return values.fill_(math.nan) if values.is_floating_point() else values


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def check_pack_and_unpack(layout: tuple[Any, ...]) -> None:
    lengths, spare, trailing, dtype = layout
    length = max(lengths, default=0) + spare
    padded = values_of((len(lengths), length, *trailing), dtype)
    for s, n in enumerate(lengths):
        poison(padded[s, n:])
    rows = [padded[s, :n] for s, n in enumerate(lengths)]
    packed = pack(padded, torch.tensor(lengths, dtype=torch.int64))
    assert_same(packed.values, torch.cat(rows) if rows else padded.flatten(0, 1))
    assert packed.cu_seqlens.tolist() == [sum(lengths[:s]) for s in range(len(lengths) + 1)]
    for fill in (0, 1):
        expected = torch.full_like(padded, fill)
        for s, n in enumerate(lengths):
            expected[s, :n] = rows[s]
        assert_same(unpack(packed.values, packed.cu_seqlens, max_length=length, fill=fill), expected)
    assert unpack(packed.values, packed.cu_seqlens).shape[1] == max(lengths, default=0)


def check_compact_and_uncompact(case: tuple[Any, ...]) -> None:
    mask, trailing, dtype = torch.tensor(case[0], dtype=torch.bool), *case[1:]
    values = values_of((mask.numel(), *trailing), dtype)
    values[~mask] = poison(values[~mask])
    kept = compact(values, mask)
    assert_same(kept.ids, mask.nonzero()[:, 0])
    assert_same(kept.values, values[mask])
    expected = torch.ones_like(values)
    expected[mask] = values[mask]
    assert_same(uncompact(kept.values, kept.ids, mask.numel(), fill=1), expected)


def check_gradients() -> None:
    lengths, mask = torch.tensor([2, 0, 3]), torch.tensor([True, False, True, True, False])
    padded = torch.randn(3, 4, 2, requires_grad=True)
    weights = torch.randn(5, 2)
    packed = pack(padded, lengths)
    (packed.values * weights).sum().backward()
    is_token = torch.arange(4) < lengths[:, None]
    assert_same(padded.grad[is_token], weights)
    assert not padded.grad[~is_token].any()

    rows, weights = torch.randn(5, 2, requires_grad=True), torch.randn(3, 4, 2)
    (unpack(rows, packed.cu_seqlens, max_length=4, fill=3) * weights).sum().backward()
    assert_same(rows.grad, weights[is_token])

    rows, weights = torch.randn(5, 2, requires_grad=True), torch.randn(5, 2)
    kept = compact(rows, mask)
    (uncompact(kept.values, kept.ids, 5, fill=3) * weights).sum().backward()
    assert_same(rows.grad, torch.where(mask[:, None], weights, 0.0))


def check_compiled_callers() -> None:
    def step(padded: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
        packed = pack(2 * padded, lengths)
        kept = compact(packed.values, mask)
        return unpack(uncompact(kept.values, kept.ids, 5), packed.cu_seqlens, max_length=4).square().sum()

    padded, lengths = torch.randn(3, 4, 2, requires_grad=True), torch.tensor([2, 0, 3])
    mask = torch.tensor([True, False, True, True, False])
    (expected,) = torch.autograd.grad(step(padded, lengths, mask), padded)
    (found,) = torch.autograd.grad(torch.compile(step, backend="eager")(padded, lengths, mask), padded)
    assert_same(found, expected)


def check_views() -> None:
    """Inputs that are not contiguous, or begin in the middle of a word."""
    lengths = torch.tensor([3, 1])
    base = torch.arange(2 * 4 * 6).reshape(2, 6, 4).transpose(1, 2)
    assert_same(pack(base, lengths).values, torch.cat((base[0, :3], base[1, :1])))
    bytes_ = torch.arange(100, dtype=torch.uint8)[3:51].reshape(2, 4, 6)
    packed = pack(bytes_, lengths)
    assert_same(packed.values, torch.cat((bytes_[0, :3], bytes_[1, :1])))
    mask = torch.tensor([1, 0, 1, 0, 0, 1, 1, 0], dtype=torch.bool)[::2]
    rows = torch.arange(100, dtype=torch.int16)[1:21].reshape(4, 5)
    assert_same(compact(rows, mask).values, rows[mask])


def check_long_masks() -> None:
    for size in (1023, 1024, 1025, 2500):  # around one block of a device's ranking, and several
        mask = torch.rand(size) < 0.3
        assert_same(compact(mask, mask).ids, mask.nonzero()[:, 0])


def check_counts_that_are_wrong(implementation: Any) -> None:
    """What a device does where nobody can tell the host: rows without source are filled, nothing is out of bounds."""
    cu_seqlens, padded = torch.tensor([0, 2, 2, 5]), torch.randn(3, 4, 3)
    packed, mask = torch.randn(5, 3), torch.tensor([True, False, True, True])
    for num_tokens in (3, 5, 8):
        found = implementation.pack_rows(padded, cu_seqlens, num_tokens)
        assert_same(found, reference.pack_rows(padded, cu_seqlens, num_tokens))
    for length in (0, 2, 6):
        found = implementation.unpack_rows(packed, cu_seqlens, length, 7.0)
        assert_same(found, reference.unpack_rows(packed, cu_seqlens, length, 7.0))
    for capacity in (0, 2, 3, 6):
        assert_same(implementation.kept_ids(mask, capacity), reference.kept_ids(mask, capacity))
    ids = torch.tensor([4, -1, 0])
    assert_same(implementation.gather_rows(packed, ids), reference.gather_rows(packed, ids))
    found = implementation.scatter_rows(packed[:3], torch.tensor([1, -1, 9]), 4, 7.0)
    assert_same(found, reference.scatter_rows(packed[:3], torch.tensor([1, -1, 9]), 4, 7.0))


def check_errors() -> None:
    padded, lengths = torch.zeros(2, 3), torch.tensor([1, 3])
    cu_seqlens, rows = torch.tensor([0, 1, 4]), torch.zeros(4, 2)
    mask, ids = torch.tensor([True, False, True, False]), torch.tensor([0, 2])
    cases = (
        (lambda: pack(torch.zeros(2), lengths), r"pack: padded has shape \[2\], expected \[S, L, \.\.\.\]"),
        (lambda: pack([1], lengths), "pack: padded is a list, expected a tensor"),
        (lambda: pack(padded, torch.tensor([1, 4])), r"pack: lengths holds 1\.\.4, expected 0\.\.3"),
        (lambda: pack(padded, torch.zeros(2)), "pack: lengths has dtype float32, expected int64 or int32"),
        (lambda: pack(padded, lengths, num_tokens=5), "pack: num_tokens is 5, expected 4, the sum of lengths"),
        (lambda: unpack(rows, torch.tensor([0, 1, 5])), "unpack: cu_seqlens is .* expected to rise from 0 to 4 tokens"),
        (lambda: unpack(rows, cu_seqlens, max_length=2), "max_length is 2, expected at least the longest sequence, 3"),
        (lambda: compact(rows, mask[:3]), r"compact: mask has shape \[3\], expected \[4\]"),
        (lambda: compact(rows, mask.long()), "compact: mask has dtype int64, expected bool"),
        (lambda: compact(rows, mask, num_kept=3), "compact: num_kept is 3, expected 2, the number of set elements"),
        (lambda: uncompact(rows[:2], ids, 2), r"uncompact: ids holds 0\.\.2, expected 0\.\.1"),
        (lambda: uncompact(rows[:2], ids * 0, 2), "uncompact: ids holds 0 more than once"),
        (lambda: uncompact(rows[:2], ids.int(), 4), "uncompact: ids has dtype int32, expected int64"),
    )
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
