"""Whole runs as a user starts them: torchrun or python, real vLLM in a Ray actor, Megatron; settings as small as can be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import Runner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def first_run(runner: Runner) -> Path:
    """Four steps from a fresh warm start, whatever other tests have left in the cache."""
    shutil.rmtree(runner.cache, ignore_errors=True)
    return runner.run("first", "run.steps=4", ranks=1)


@pytest.fixture
def left_behind(runner: Runner) -> Callable[[], list[str]]:
    """Commands of the processes that still run and that a run of this test session started, directly or not."""
    mark = f"MARSRL_CACHE={runner.cache}\0".encode()  # children inherit it, whatever becomes of their parents

    def find() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    if mark in (entry / "environ").read_bytes():
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
                except OSError:
                    continue  # it ended while we looked
        return found

    return find
