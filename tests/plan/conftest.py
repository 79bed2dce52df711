"""Helpers of this folder and the tiny models of tests/megatron are importable by name; groups do not outlive a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _own_groups() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    from marsrl.trainer.learner.megatron import parallel

    parallel.stop()
