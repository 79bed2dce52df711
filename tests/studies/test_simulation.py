"""Simulated stages (benchmarks/studies/simulation): time passes on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

from simulation.cost_model import Constants
from simulation.lengths import Lengths
from simulation.play import Setting, play


def test_more_engines_roll_out_sooner_and_idle_longer() -> None:
    """However many engines there are, the longest completion takes the same time."""
    one = Setting(engines=1, problems=4, is_solver_only=True, steps=2, warmup=0)
    found = [play(replace(one, engines=engines), Constants(), Lengths(sigma=1.2)) for engines in (1, 2, 4)]
    assert found[0].rollout_s > found[1].rollout_s > found[2].rollout_s > found[0].rollout_s / 4
    assert found[0].idle_share < found[1].idle_share < found[2].idle_share
