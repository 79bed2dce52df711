"""A short run of tests/chaos.py: four faults in one run of a program, with our own engine in a Ray actor."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from documented_commands import run_by
from documents import ROOT
from small_run import Runner

pytestmark = pytest.mark.slow
KINDS = ("kill-worker", "kill-both", "stop-rank", "kill-torchrun")
SEED = "9"  # with this seed the run has two ranks and is struck while it trains


def test_four_faults_cost_nothing(runner: Runner) -> None:
    """The faults: a killed worker; a rank killed together with a worker; a silent rank, which the run names when it ends; and a
    killed torchrun, whose ranks end by themselves. The run continues after each fault and reaches its end. No session is played
    or trained twice.
    """
    (command,) = run_by("test_four_faults_cost_nothing")
    words = [*shlex.split(command)[1:], "--external", "--faults", "4", "--seed", SEED, "--kinds", *KINDS]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=runner.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert re.search(r"stop-rank after step \d+: .* silent for run\.silence_s = 12 s: rank \d", done.stdout)
    counts = "1 kill-both, 1 kill-torchrun, 1 kill-worker, 1 stop-rank"
    assert f"4 faults in 1 runs, seed {SEED}: {counts}; 0 with a loss" in done.stdout
