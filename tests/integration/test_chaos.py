"""The shortest form of tests/chaos.py: two faults on one run, with our own engine in a Ray actor (about a minute)."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from commands import run_by
from documents import ROOT
from runner import Runner

pytestmark = pytest.mark.slow


def test_two_faults_cost_nothing(runner: Runner) -> None:
    """A killed engine, which the run survives, and Ray's head, from which it is resumed; then it comes to its end."""
    (command,) = run_by("test_two_faults_cost_nothing")
    short = ["--faults", "2", "--seed", "13", "--kinds", "kill-engine", "kill-gcs", "--engine", "local"]
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], *short],
        cwd=ROOT,
        env=runner.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "kill-engine after step " in done.stdout and "trains on, 1 engine(s) replaced" in done.stdout
    assert re.search(r"Ray is gone: its gcs_server .* run.resume=auto", done.stdout)
    assert "2 faults in 1 runs, seed 13: 1 kill-engine, 1 kill-gcs; 0 with a loss" in done.stdout
