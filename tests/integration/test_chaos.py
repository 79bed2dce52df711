"""The shortest form of tests/chaos.py: three faults on one run, with our own engine in a Ray actor."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from commands import run_by
from documents import ROOT
from small_run import Runner

pytestmark = pytest.mark.slow
KINDS = ("stop-rank", "kill-torchrun", "kill-trainer")
SEED = "9"  # of which the run has two ranks, and is struck while it trains


def chaos(runner: Runner, *words: str) -> str:
    """What it prints."""
    command = [sys.executable, "tests/chaos.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=runner.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_three_faults_cost_nothing(runner: Runner) -> None:
    """A killed rank, a silent one, which ends the run by name, and a killed torchrun, whose ranks end by themselves; the run goes
    on after each, and then comes to its end."""
    (command,) = run_by("test_three_faults_cost_nothing")
    said = chaos(
        runner, *shlex.split(command)[2:], "--faults", "3", "--seed", SEED, "--engine", "local", "--kinds", *KINDS
    )
    assert re.search(r"stop-rank after step \d+: .* silent for run\.silence_s = 12 s: rank \d", said)
    assert f"3 faults in 1 runs, seed {SEED}: 1 kill-torchrun, 1 kill-trainer, 1 stop-rank; 0 with a loss" in said


def test_a_program_s_run_loses_nothing_to_killed_workers_and_ranks(runner: Runner) -> None:
    """No session that was over is played again, and none is trained twice."""
    said = chaos(runner, "--faults", "2", "--external", "--seed", "4", "--kinds", "kill-worker", "kill-both")
    assert "2 faults in 1 runs, seed 4: 1 kill-both, 1 kill-worker; 0 with a loss" in said
