"""What every implementation of pack and kept_rows must do; the test files choose who does it."""

import math

import pytest
import torch
from hypothesis import strategies as st

from marsrl.kernels import Packed, kept_rows, pack

# (of each sequence whether its tokens are sampled, positions of padding); a sequence may be empty, padding needs one
flags = st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6)
layouts = st.tuples(flags, st.integers(0, 3))


def check_layout(layout: tuple[list[list[bool]], int]) -> None:
    """Position by position what a loop finds; NaN where nothing may be read."""
    flags, padding = layout
    sampled = [flag for each in flags for flag in each]
    token_ids = torch.randint(1, 1000, (len(sampled),), dtype=torch.int32)
    values = torch.rand(2, len(sampled)).masked_fill(~torch.tensor(sampled, dtype=torch.bool), math.nan)
    bounds = torch.tensor([0, *map(len, flags)]).cumsum(0)
    bounds[-1] += padding
    total = int(bounds[-1])
    found = pack(
        token_ids, torch.tensor(sampled, dtype=torch.bool), bounds.int(), total, logprobs=values[0], weights=values[1]
    )
    ids, numbers = token_ids.tolist(), values.tolist()
    expected: dict[str, list[float]] = {name: [] for name in vars(found)}
    start = 0
    for own in flags:
        for place in range(len(own)):
            following = start + place + 1
            has_next = place + 1 < len(own)
            is_trained = has_next and own[place + 1]
            row = (ids[following - 1], place, ids[following] if has_next else 0, is_trained)
            row += tuple(number[following] if is_trained else 0.0 for number in numbers)
            for name, value in zip(expected, row, strict=True):
                expected[name].append(value)
        start += len(own)
    last = len(flags[-1])
    for place in range(padding):
        for name, value in zip(expected, (0, last + place, 0, False, 0.0, 0.0), strict=True):
            expected[name].append(value)
    assert {name: each.tolist() for name, each in vars(found).items()} == expected
    dtypes = [torch.int64, torch.int64, torch.int64, torch.bool, torch.float32, torch.float32]
    assert [each.dtype for each in vars(found).values()] == dtypes


def check_what_is_not_given_is_not_made() -> None:
    found = pack(torch.tensor([3, 4]), torch.tensor([False, True]), torch.tensor([0, 2]), 2)
    assert found.logprobs is None and found.weights is None
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = pack(nothing, nothing.bool(), torch.tensor([0]), 0)
    assert [each.shape for each in vars(empty).values() if each is not None] == [(0,)] * 4


def check_views() -> None:
    """Inputs that are not contiguous."""
    token_ids, sampled = torch.arange(12)[1::2], torch.tensor([False, True] * 6)[1::2]
    logprobs = torch.arange(12.0)[1::2]
    bounds = torch.tensor([0, 9, 2, 9, 6, 9])[::2]
    found = pack(token_ids, sampled, bounds, 6, logprobs=logprobs)
    expected = pack(token_ids.clone(), sampled.clone(), bounds.clone(), 6, logprobs=logprobs.clone())
    assert_same(found, expected)
    assert found.targets.tolist() == [3, 0, 7, 9, 11, 0] and found.logprobs.tolist() == [3, 0, 7, 9, 11, 0]
    mask = torch.tensor([1, 0, 1, 0, 0, 1, 1, 0], dtype=torch.bool)[::2]
    assert kept_rows(mask).tolist() == [0, 1, 3]


def check_long_ones() -> None:
    for size in (1023, 1024, 1025, 2500):  # around one block of a device, and several
        mask = torch.rand(size) < 0.3
        assert torch.equal(kept_rows(mask), mask.nonzero()[:, 0])
        cuts = torch.randint(0, size, (40,)).sort().values
        bounds = torch.cat((torch.tensor([0]), cuts, torch.tensor([size])))
        found = pack(torch.arange(size), mask, bounds, size)
        assert (found.position_ids == 0).sum() == len(set(bounds.tolist())) - 1
        is_last = torch.zeros(size, dtype=torch.bool)
        is_last[bounds[1:][bounds[1:] > 0] - 1] = True
        assert torch.equal(found.targets, torch.where(is_last, 0, torch.arange(size) + 1))
        assert torch.equal(found.mask, mask.roll(-1) & ~is_last)


def assert_same(found: Packed, expected: Packed) -> None:
    for name, value in vars(expected).items():
        assert value is None or torch.equal(getattr(found, name), value), name


def check_errors() -> None:
    ids, sampled, bounds = torch.arange(4), torch.ones(4, dtype=torch.bool), torch.tensor([0, 4])
    cases = (
        (lambda: pack(ids.float(), sampled, bounds, 4), "pack: token_ids has dtype float32, expected int64 or int32"),
        (lambda: pack(ids, sampled[:3], bounds, 4), r"pack: is_sampled has shape \[3\], expected \[4\]"),
        (lambda: pack(ids, sampled, bounds, 3), "pack: num_tokens is 3, expected at least the 4 of token_ids"),
        (lambda: pack(ids, sampled, bounds, 5), r"pack: cu_seqlens is \[0, 4\], expected to rise from 0 to 5 tokens"),
        (lambda: pack(ids, sampled, bounds, 4, logprobs=ids), "pack: logprobs has dtype int64, expected float32"),
        (lambda: kept_rows(ids), "kept_rows: mask has dtype int64, expected bool"),
        (lambda: kept_rows(sampled, num_kept=3), "kept_rows: num_kept is 3, expected 4, the number of set elements"),
    )
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
