"""Results spoiled in a way that kernels go wrong, and that a test refuses each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.testing import assert_accurate

TILE = 16
Call = tuple[tuple[Any, ...], dict[str, Any]]


def block_of_zeros(values: Tensor) -> None:
    values[TILE : 2 * TILE, :TILE] = 0


def last_tile_dropped(values: Tensor) -> None:
    values[-TILE:] = 0


def two_rows_swapped(values: Tensor) -> None:
    size = values.double().sum(dim=1)
    pair = torch.stack((size.argmin(), size.argmax()))
    values[pair] = values[pair.flip(0)]


def scaled_by_a_hundredth(values: Tensor) -> None:
    values.copy_(values * 1.01)


SPOILS = (block_of_zeros, last_tile_dropped, two_rows_swapped, scaled_by_a_hundredth)
OF_FLAGS = SPOILS[:2]


def spoiled(values: Tensor, spoil: Callable[[Tensor], None]) -> Tensor:
    """A copy, spoiled as a matrix: rows are all dimensions but the last, and of a vector its entries."""
    copy = values.detach().clone(memory_format=torch.contiguous_format)
    spoil(copy.view(-1, 1) if copy.dim() < 2 else copy.flatten(0, -2))
    return copy


def refuse_every_spoil(
    module: Any, compare: Callable[[torch.dtype], None], dtype: torch.dtype, patch: pytest.MonkeyPatch
) -> None:
    """Every large result that `compare` hands to the judge of its module is right, and refused as soon as it is spoiled."""
    calls: list[Call] = []
    patch.setattr(module, "assert_accurate", lambda *values, **words: calls.append((values, words)))
    compare(dtype)
    large = [call for call in calls if call[0][1].dim() and call[0][1].numel() >= 4 * TILE]
    assert large
    for (name, found, *rest), words in large:
        assert_accurate(name, found, *rest, **words)
        for spoil in SPOILS:
            with pytest.raises(AssertionError, match=name):
                assert_accurate(name, spoiled(found, spoil), *rest, **words)
                pytest.fail(f"{name} passes as {spoil.__name__}")


def without_last_tile(head: Head) -> Head:
    return replace(head, num_columns=max(0, head.num_columns - TILE))
