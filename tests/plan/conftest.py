"""Helpers of this folder and the tiny models of tests/megatron are importable by name; groups do not outlive a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "megatron")]


@pytest.fixture(autouse=True)
def _own_groups() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    from marsrl.trainer.learner.megatron import parallel

    parallel.stop()
