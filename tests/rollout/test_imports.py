"""Imports at the start of a process go without the garbage collector, which is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from marsrl.rollout.imports import imports_for_good


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    gc.unfreeze()
    if was_enabled:
        gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_meanwhile_and_what_came_is_not_passed_over_again(was_enabled: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    made: list[object] = []
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), imports_for_good():
        assert not gc.isenabled()
        made += ([] for _ in range(100_000))
        raise ImportError
    assert gc.isenabled() == was_enabled
    assert gc.get_freeze_count() >= before + len(made)
