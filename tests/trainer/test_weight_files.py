"""Weights in shared memory outlive nobody: what a killed process leaves is found and removed, what a live one holds is not."""

from __future__ import annotations

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


def test_weights_of_a_killed_process_are_removed_by_the_next_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    mine = PrivateFolder(tmp_path)
    other = subprocess.Popen(
        [sys.executable, "-c", CODE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    assert theirs.parent == tmp_path and f"-{other.pid}-" in theirs.name
    assert list(left_behind(tmp_path)) == []
    other.kill()
    other.wait()
    assert list(left_behind(tmp_path)) == [theirs]
    next_one = PrivateFolder(tmp_path)
    assert not theirs.exists() and mine.path.exists() and next_one.path.exists()
    for folder in (mine, next_one):
        folder.close()
        folder.close()
    assert list(tmp_path.iterdir()) == []


# Killed at its first step with the file system, the second, ..., until there are no more; prints what the next process found
# and what it left.
KILLED = """
import os, signal, sys
from pathlib import Path
from marsrl.rollout.weights.files import PrivateFolder

parent = Path(sys.argv[1])

def make(last):
    steps = 0
    def count(event, args):
        nonlocal steps
        if event.startswith(("os.", "open", "fcntl.", "tempfile.", "shutil.")):
            steps += 1
            if steps == last:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    folder = PrivateFolder(parent)
    folder.close()
    os._exit(0)

last = status = 1
while status:
    if (child := os.fork()) == 0:
        make(last)
    status = os.waitpid(child, 0)[1]
    found = len(list(parent.iterdir()))
    PrivateFolder(parent).close()
    print(found, len(list(parent.iterdir())))
    last += 1
"""

# Another process looks at the folder just before its lock is taken.
SEEN_EARLY = """
import sys
from pathlib import Path
from marsrl.rollout.weights.files import PrivateFolder

parent, others = Path(sys.argv[1]), []

def look(event, args):
    if event == "fcntl.flock" and not others:
        others.append(None)
        others.append(PrivateFolder(parent))

sys.addaudithook(look)
mine = PrivateFolder(parent)
(mine.path / "version_0").mkdir()
third = PrivateFolder(parent)
print(sorted(parent.iterdir()) == sorted(each.path for each in (mine, others[1], third)))
"""


def said(code: str, folder: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_process_that_is_killed_at_any_moment_leaves_nothing_to_those_after_the_next(tmp_path: Path) -> None:
    lines = [line.split() for line in said(KILLED, tmp_path)]
    assert {found for found, _ in lines} == {"0", "1"} and len(lines) > 5
    assert {left for _, left in lines} == {"0"}


def test_a_folder_that_another_process_sees_before_its_lock_is_made_anew(tmp_path: Path) -> None:
    assert said(SEEN_EARLY, tmp_path) == ["True"]
