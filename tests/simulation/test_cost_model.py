"""Units and laws of the cost model, and one engine's time by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from simulation.calibrate import find_root
from simulation.cost_model import MEASURED_ITL, Constants, CostModel, constants_table
from simulation.engine_timeline import EngineTimeline, Job
from simulation.lengths import MEDIAN_TOKENS, Lengths, Outcomes

COST = CostModel(Constants())


def test_every_constant_has_a_source() -> None:
    assert all(source for _, _, _, source in constants_table(Constants()))


@pytest.mark.parametrize(("num_seqs", "itl_s"), MEASURED_ITL)
def test_the_model_gives_back_the_measured_decode_steps(num_seqs: int, itl_s: float) -> None:
    context = round(num_seqs * Constants().itl_context)
    assert COST.decode_s(num_seqs, context, 1) == pytest.approx(itl_s, rel=1e-6)


def test_a_decode_step_reads_the_cache_at_the_bandwidth_of_the_data_sheet() -> None:
    more = COST.decode_s(8, 1_000_000, 1) - COST.decode_s(8, 0, 1)
    assert more == pytest.approx(1e6 * 2 * 48 * 4 * 128 * 2 / (2 * 3.35e12))  # tokens x bytes a token / (B/s)


def test_training_costs_six_flop_a_parameter_and_token() -> None:
    seconds = COST.train_s([1000] * 1000, num_gpus=16)
    linear = 6 * 3.3e9 * 1e6 / (16 * 121e12)
    assert linear < seconds < 1.05 * linear  # a thousand tokens have little attention
    assert COST.train_s([1000] * 1000, num_gpus=32) == pytest.approx(seconds / 2)


def test_the_cache_holds_what_the_weights_leave() -> None:
    assert COST.kv_capacity == int((2 * 80e9 * 0.9 - 61_064_216_576) / 98_304)
    with pytest.raises(ValueError, match="gpus_per_engine"):
        CostModel(replace(Constants(), gpus_per_engine=0.8))


@pytest.mark.parametrize("num_seqs", [1, 7, 8, 100, 128])
def test_decoding_is_monotone_and_additive(num_seqs: int) -> None:
    assert COST.decode_s(num_seqs, 5000, 10) < COST.decode_s(num_seqs, 5000, 11)
    assert COST.decode_s(num_seqs, 5000, 10) < COST.decode_s(num_seqs, 5001, 10)
    assert num_seqs == 1 or COST.decode_s(num_seqs - 1, 5000, 10) < COST.decode_s(num_seqs, 5000, 10)
    parts = COST.decode_s(num_seqs, 5000, 4) + COST.decode_s(num_seqs, 5000 + 4 * num_seqs, 6)
    assert COST.decode_s(num_seqs, 5000, 10) == pytest.approx(parts)


def test_steps_within_is_the_inverse_of_decode_s() -> None:
    for steps in (0, 1, 17, 4000):
        seconds = COST.decode_s(5, 30_000, steps)
        assert COST.steps_within(5, 30_000, seconds * (1 + 1e-9) + 1e-12) == steps


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


def test_work_in_pieces_of_time_is_the_same_work() -> None:
    jobs = [Job(f"{i}", 500 + 100 * i, 0, 700 * (i + 1)) for i in range(20)]
    whole, pieces = EngineTimeline(COST), EngineTimeline(COST)
    for job in jobs:
        whole.add(job, 0.0)
        pieces.add(job, 0.0)
    ended, now = [], 0.0
    while pieces.is_busy:
        now += 0.37
        ended += pieces.run(now)
    assert ended == whole.run()
    assert pieces.busy_s == pytest.approx(whole.busy_s)


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


def test_lengths_are_lognormal_and_depend_on_the_uid_alone() -> None:
    lengths = Lengths(sigma=1.2)
    drawn = sorted(lengths.tokens(f"{i}/solver:0") for i in range(4001))
    assert drawn[2000] == pytest.approx(MEDIAN_TOKENS, rel=0.05)
    assert math.log(drawn[3366] / drawn[2000]) == pytest.approx(1.2, rel=0.08)  # 84.1%: one sigma
    assert Lengths(sigma=1.2).tokens("x") == lengths.tokens("x")
    assert Lengths(sigma=0.6).tokens("x") != lengths.tokens("x")


def test_a_verdict_agrees_with_the_truth_as_often_as_is_said() -> None:
    outcomes = Outcomes(solver_accuracy=0.6, verifier_agreement=0.7)
    uids = [f"{i}/solver:0/verifier1:1" for i in range(3000)]
    agrees = sum(outcomes.says_correct(uid) == outcomes.is_right(uid.rpartition("/")[0]) for uid in uids)
    assert agrees / 3000 == pytest.approx(0.7, abs=0.03)
    assert sum(outcomes.is_right(uid.rpartition("/")[0]) for uid in uids) / 3000 == pytest.approx(0.6, abs=0.03)


def test_the_root_is_found_or_there_is_none() -> None:
    x = find_root(lambda x: x**3 - 5, 0.0, 4.0, tolerance=1e-6)
    assert x == pytest.approx(5 ** (1 / 3), abs=1e-5)
    assert find_root(lambda x: x + 1, 0.0, 4.0, tolerance=1e-6) is None
    assert find_root(lambda x: -1.0 if x < 2 else 1.0, 0.0, 4.0, tolerance=1e-6) == pytest.approx(2.0, abs=1e-3)
