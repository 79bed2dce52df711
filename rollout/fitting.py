"""Packing of sizes into bins of equal capacity, and truncation of lengths to a total."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack sizes into bins and return the indices in each, largest first, ties in input order. O(n log n) for n sizes.

    Puts the largest remaining size into the first bin with room: at most 11/9 of the optimum plus 6/9 bins (Dosa, 2007).
    No size may exceed the capacity.
    """
    num_leaves = 1 << max(0, len(sizes) - 1).bit_length()
    # Binary tree over all bins, opened or not: each node has the largest room among the bins below it.
    room = [capacity] * (2 * num_leaves)
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size, node = sizes[index], 1
        while node < num_leaves:
            node *= 2
            node += room[node] < size  # go to the leftmost bin with enough room
        if node - num_leaves == len(bins):
            bins.append([])
        bins[node - num_leaves].append(index)
        room[node] -= size
        while node > 1:
            most = max(room[node], room[node ^ 1])
            node //= 2
            if room[node] == most:
                break
            room[node] = most
    return bins


def even_shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return how much of each length is kept, at most `room` in total: the longest are cut first, to a common length."""
    kept = [0] * len(lengths)
    for place, index in enumerate(sorted(range(len(lengths)), key=lambda index: lengths[index])):
        kept[index] = min(lengths[index], room // (len(lengths) - place))
        room -= kept[index]
    return kept
