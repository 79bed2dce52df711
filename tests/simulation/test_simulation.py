"""Stages on the virtual clock: nothing is lost, nothing is trained twice, more is never faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation import study, tables
from simulation.cost_model import MEASURED_ITL, Constants, CostModel
from simulation.lengths import Lengths
from simulation.play import MAX_TOKENS, Setting, play
from simulation.simulated_pool import TOKEN_GRAIN

CONSTANTS, LENGTHS = Constants(), Lengths(sigma=1.2)


@pytest.mark.parametrize(("num_seqs", "itl_s"), MEASURED_ITL)
def test_the_cost_model_gives_back_the_measured_decode_steps(num_seqs: int, itl_s: float) -> None:
    context = round(num_seqs * CONSTANTS.itl_context)
    assert CostModel(CONSTANTS).decode_s(num_seqs, context, 1) == pytest.approx(itl_s, rel=1e-6)


def test_one_problem_by_hand() -> None:
    """One engine, one agent, one group: prompt once, eight decode together, the update, the weights."""
    setting = Setting(engines=1, problems=1, is_solver_only=True, steps=1, warmup=0)
    outcome = play(setting, CONSTANTS, LENGTHS)
    cost = CostModel(CONSTANTS)
    whole = MAX_TOKENS // TOKEN_GRAIN
    grains = [min(whole, -(-LENGTHS.tokens(f"000001/solver:{i}") // TOKEN_GRAIN)) for i in range(8)]
    prompt = int(CONSTANTS.solver_prompt)
    seconds, left = cost.prefill_s(0, prompt), sorted(n * TOKEN_GRAIN for n in grains)
    context, done = 8 * prompt, 0
    while left:
        steps = left[0] - done
        seconds += cost.decode_s(len(left), context, steps)
        context += len(left) * steps
        done = left[0]
        while left and left[0] == done:
            left.pop(0)
            context -= prompt + done
    train = cost.train_s([prompt + n * TOKEN_GRAIN for n in grains], num_gpus=2)
    assert outcome.rollout_s == pytest.approx(seconds)
    assert outcome.train_s == pytest.approx(train)
    assert outcome.step_s == pytest.approx(seconds + train + cost.sync_s)
    assert outcome.idle_share == pytest.approx(1 - seconds / outcome.step_s)
    assert outcome.staleness == {0: 1.0}
    assert outcome.samples_per_step == 8


def test_the_whole_study_is_told() -> None:
    grid = study.Grid(
        engines=2, problems=2, segments=(1, 4), overlap_at=(1, 1), engine_axis=(1, 2), problem_axis=(1, 2),
    )  # fmt: skip
    fitted = study.Fit(1.2, *3 * [{1: 1240.0, 2: 700.0, 4: 700.0}])
    found = study.Study(CONSTANTS, fitted)
    for setting in study.settings(grid):
        found.rows[setting] = play(
            replace(setting, warmup=min(setting.warmup_steps, 8), steps=1), CONSTANTS, Lengths(0.3)
        )
    parts = (tables.pipelines_text, tables.axes_text, tables.adds_text)
    text = "\n".join([tables.fit_text(fitted), *(part(found, grid) for part in parts)])
    assert tables.overlap_text(found, (1, 1)).count("%") > 2
    assert "+16% MISS" in text and "-10% within 15%" in text
    assert text.count(f"{found.ratio(2, 2):.2f}") >= 2
    assert tables.record(found)["fit"]["sigma"] == 1.2
