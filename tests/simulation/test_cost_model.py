"""Units and laws of the cost model, and one engine's time by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from simulation.cost_model import MEASURED_ITL, Constants, CostModel, constants_table
from simulation.engine_timeline import EngineTimeline, Job

COST = CostModel(Constants())


def test_every_constant_has_a_source() -> None:
    assert all(source for _, _, _, source in constants_table(Constants()))


@pytest.mark.parametrize(("num_seqs", "itl_s"), MEASURED_ITL)
def test_the_model_gives_back_the_measured_decode_steps(num_seqs: int, itl_s: float) -> None:
    context = round(num_seqs * Constants().itl_context)
    assert COST.decode_s(num_seqs, context, 1) == pytest.approx(itl_s, rel=1e-6)


def test_one_engine_by_hand() -> None:
    """Two sequences together, then the longer one alone; the shorter one's first token comes after both prefills."""
    engine = EngineTimeline(COST)
    engine.add(Job("long", 1000, 0, 300), at_s=5.0)
    engine.add(Job("short", 1000, 1000, 100), at_s=5.0)
    prefill = COST.prefill_s(0, 1000)
    together = 100 * COST.floor_s(2) + COST.kv_s_per_token * sum(2000 + 2 * k for k in range(100))
    alone = 200 * COST.floor_s(1) + COST.kv_s_per_token * sum(1100 + k for k in range(200))
    assert engine.run() == ["short", "long"]
    assert engine.now_s == pytest.approx(5 + prefill + together + alone)
    assert engine.busy_s == pytest.approx(prefill + together + alone)
    first = 5 + prefill + COST.floor_s(2) + COST.kv_s_per_token * 2000
    assert engine.first_token_s == {"long": pytest.approx(first), "short": pytest.approx(first)}


def test_a_full_cache_puts_the_latest_back_and_loses_no_token() -> None:
    cost = CostModel(
        replace(Constants(), kv_bytes_per_token=400 * Constants.kv_bytes_per_token)
    )  # room for 2109 tokens
    engine = EngineTimeline(cost)
    for name in "abc":
        engine.add(Job(name, 500, 0, 500), at_s=0.0)
    assert cost.kv_capacity == 2109
    assert engine.run() == ["a", "b", "c"]
    assert engine.num_preempted == 1
    with pytest.raises(ValueError, match="KV cache"):
        engine.add(Job("d", 2000, 0, 200), at_s=0.0)


def test_an_aborted_engine_says_how_far_everything_got() -> None:
    engine = EngineTimeline(COST)
    for i in range(200):
        engine.add(Job(f"{i}", 100, 0, 10_000), at_s=0.0)
    engine.run(20.0)
    cut = dict(engine.abort())
    assert len(cut) == 200 and not engine.is_busy
    decoded = Counter(cut.values())
    assert decoded[0] == 72 and sorted(decoded.values()) == [72, 128]  # 72 wait, 128 decode side by side
