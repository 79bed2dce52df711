"""Stages on the virtual clock."""

from __future__ import annotations

import pytest
from simulation.cost_model import Constants, CostModel
from simulation.lengths import Lengths
from simulation.play import MAX_TOKENS, Setting, play
from simulation.simulated_pool import TOKEN_GRAIN

CONSTANTS, LENGTHS = Constants(), Lengths(sigma=1.2)


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
