"""kill -9 at random points: 20 times without and 20 times with overlap (8 s)."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from crash_worker import EPOCHS, NUM_PROBLEMS, Saved

from marsrl.rollout.state import decode


def trained(folder: Path, kills: int, overlap: int) -> Counter[tuple[str, str]]:
    """Number of times that each group of the first epochs was trained."""
    worker = Path(__file__).with_name("crash_worker.py")
    command = [sys.executable, str(worker), str(folder), str(kills), str(overlap)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
    assert done.stdout.split() == [str(kills)]
    groups = decode(Saved, (folder / "checkpoint").read_bytes()).trained
    return Counter((group, problem) for group, problem in groups if int(group[:6]) <= NUM_PROBLEMS * EPOCHS)


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_run_killed_twenty_times_trains_what_an_unbroken_run_trains(tmp_path: Path, overlap: int) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "unbroken").mkdir()
    killed, unbroken = (trained(tmp_path / name, kills, overlap) for name, kills in (("killed", 20), ("unbroken", 0)))
    assert killed == unbroken
    assert set(killed.values()) == {1}  # no group twice
    solved = Counter(problem for group, problem in killed if group.endswith("/solver"))
    assert solved == {f"p{i}": EPOCHS for i in range(NUM_PROBLEMS)}
