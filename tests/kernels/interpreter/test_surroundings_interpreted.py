"""What test_surroundings.py asks of the other implementations."""

import pytest
from every_op import (
    CALLS,
    EMPTY,
    HEADS,
    check_an_empty_batch_has_gradients_of_zero,
    check_autocast_changes_nothing,
    force,
)

TIERS = [(name, "triton") for name in CALLS]
TIERS += [(name, "triton_gemm") for name in HEADS if "bfloat16" in name]


@pytest.mark.parametrize("name, tier", TIERS)
def test_autocast_changes_nothing(name, tier, monkeypatch):
    force(monkeypatch, name, tier)
    check_autocast_changes_nothing(name)


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_has_gradients_of_zero(name):
    check_an_empty_batch_has_gradients_of_zero(name)
