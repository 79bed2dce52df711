"""Weights in shared memory outlive nobody: what a killed process leaves is found and removed, what a live one holds is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from marsrl.rollout.weights.files import PrivateFolder, left_behind

CODE = """
import sys, time
from marsrl.rollout.weights.files import PrivateFolder
folder = PrivateFolder(sys.argv[1])
(folder.path / "version_0").mkdir()
print(folder.path, flush=True)
sys.stdin.read()
"""


def make_old(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_weights_of_a_killed_process_are_removed_by_the_next_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    mine = PrivateFolder(tmp_path)
    other = subprocess.Popen(
        [sys.executable, "-c", CODE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    assert theirs.parent == tmp_path and f"-{other.pid}-" in theirs.name
    for folder in (mine.path, theirs):
        make_old(folder)
    assert left_behind(tmp_path) == []
    other.kill()
    other.wait()
    assert left_behind(tmp_path) == [theirs]
    next_one = PrivateFolder(tmp_path)
    assert not theirs.exists() and mine.path.exists() and next_one.path.exists()
    for folder in (mine, next_one):
        folder.close()
        folder.close()
    assert list(tmp_path.iterdir()) == []
