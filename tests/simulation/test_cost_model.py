"""Units and laws of the cost model, and one engine's time by hand."""

from __future__ import annotations

import pytest
from simulation.cost_model import MEASURED_ITL, Constants, CostModel, constants_table

COST = CostModel(Constants())


def test_every_constant_has_a_source() -> None:
    assert all(source for _, _, _, source in constants_table(Constants()))


@pytest.mark.parametrize(("num_seqs", "itl_s"), MEASURED_ITL)
def test_the_model_gives_back_the_measured_decode_steps(num_seqs: int, itl_s: float) -> None:
    context = round(num_seqs * Constants().itl_context)
    assert COST.decode_s(num_seqs, context, 1) == pytest.approx(itl_s, rel=1e-6)
