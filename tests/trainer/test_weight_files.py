"""Weight files in shared memory: those of a killed process are found and removed, those of a live one are not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marsrl.rollout.weights.files import PrivateFolder


def in_a_child(work: Callable[..., object], *words: Any) -> Any:
    child = multiprocessing.get_context("fork").Process(target=work, args=words)
    child.start()
    return child


def test_folders_of_killed_processes_are_removed_later(tmp_path: Path) -> None:
    """A process is killed at its n-th file system call, for n = 1, 2, ... until it ends before making n calls."""

    def make(last: int) -> None:
        steps = 0

        def count(event: str, _: object) -> None:
            nonlocal steps
            steps += event.startswith(("os.", "open", "fcntl.", "tempfile.", "shutil."))
            if steps == last:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        PrivateFolder(tmp_path).close()
        os._exit(0)

    num_left, last, is_killed = [], 1, True
    while is_killed:
        child = in_a_child(make, last)
        child.join()
        num_left.append(len(list(tmp_path.iterdir())))
        PrivateFolder(tmp_path).close()
        assert list(tmp_path.iterdir()) == []
        last, is_killed = last + 1, child.exitcode != 0
    assert set(num_left) == {0, 1} and len(num_left) > 5


def test_a_folder_seen_before_it_is_locked_is_made_again(tmp_path: Path) -> None:
    """Another process looks for folders without a lock just before the lock is taken."""

    def make() -> None:
        others: list[Any] = []

        def look(event: str, _: object) -> None:
            if event == "fcntl.flock" and not others:
                others.append(None)
                others.append(PrivateFolder(tmp_path))

        sys.addaudithook(look)
        mine = PrivateFolder(tmp_path)
        (mine.path / "version_0").mkdir()
        third = PrivateFolder(tmp_path)
        os._exit(sorted(tmp_path.iterdir()) != sorted(each.path for each in (mine, others[1], third)))

    child = in_a_child(make)
    child.join()
    assert child.exitcode == 0
