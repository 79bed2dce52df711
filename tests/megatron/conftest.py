"""Helpers of this folder are importable by name; the process groups of one test do not reach into the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _own_groups() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    from marsrl.trainer.learner.megatron import parallel

    parallel.stop()
