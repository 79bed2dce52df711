"""Helpers of this folder are importable by name; the process groups of one test do not reach into the next."""

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
