"""Whole runs as a user starts them: torchrun or python, real vLLM in a Ray actor, Megatron, with the smallest settings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_run import Runner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def first_run(runner: Runner) -> Path:
    """Four steps from a new warm start, independent of other tests' cache."""
    shutil.rmtree(runner.cache, ignore_errors=True)
    return runner.run("first", "run.steps=4", ranks=1)
