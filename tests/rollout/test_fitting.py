"""Sizes into bins: nothing is lost, no bin is over-full, and there are few of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marsrl.rollout.fitting import even_shares, first_fit_decreasing


def one_by_one(sizes: list[int], capacity: int) -> list[list[int]]:
    """First-fit-decreasing as its name says it."""
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        free = [each for each in bins if sum(sizes[i] for i in each) + sizes[index] <= capacity]
        if not free:
            bins.append([])
        (free or bins[-1:])[0].append(index)
    return bins


@pytest.mark.parametrize("seed", range(200))
def test_the_largest_that_is_left_goes_to_the_first_bin_with_room(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.randrange(1, 60)
    sizes = [rng.randrange(capacity + 1) for _ in range(rng.randrange(50))]
    assert first_fit_decreasing(sizes, capacity) == one_by_one(sizes, capacity)


@pytest.mark.parametrize("seed", range(50))
def test_bins_are_at_most_eleven_ninths_of_the_fewest_and_one_more(seed: int) -> None:
    """Full bins, cut into pieces: as many are needed as there were."""
    rng, capacity = random.Random(seed), 1000
    fewest = rng.randrange(1, 40)
    sizes: list[int] = []
    for _ in range(fewest):
        cuts = sorted(rng.sample(range(1, capacity), rng.randrange(5)))
        sizes += [end - start for start, end in zip([0, *cuts], [*cuts, capacity], strict=True)]
    rng.shuffle(sizes)
    bins = first_fit_decreasing(sizes, capacity)
    assert sorted(i for each in bins for i in each) == list(range(len(sizes)))
    assert all(each and sum(sizes[i] for i in each) <= capacity for each in bins)
    assert fewest <= len(bins) <= 11 / 9 * fewest + 1


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes from 3 to 11, expected 0 to the capacity, 10"):
        first_fit_decreasing([3, 11], 10)
    with pytest.raises(ValueError, match=r"from -1 to 3"):
        first_fit_decreasing([3, -1], 10)
    assert first_fit_decreasing([], 10) == [] and first_fit_decreasing([10, 0, 0], 10) == [[0, 1, 2]]


@given(st.lists(st.integers(0, 60), max_size=8), st.integers(0, 200))
def test_what_is_kept_of_lengths_fills_the_room_and_only_the_longest_are_cut(lengths: list[int], room: int) -> None:
    kept = even_shares(lengths, room)
    assert sum(kept) == min(room, sum(lengths)) and all(0 <= k <= n for k, n in zip(kept, lengths, strict=True))
    cut = [k for k, n in zip(kept, lengths, strict=True) if k < n]
    assert not cut or max(kept) <= min(cut) + 1
