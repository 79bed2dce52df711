"""Fixtures: the Box, and the reference run on one host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
from box import Box
from cluster import ALONE, fill, train

from marsrl.trainer.report.metrics import MetricsRow


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    try:
        made = Box(3)
    except (RuntimeError, FileNotFoundError) as error:
        # .ci/run sets this: in CI a machine without namespaces is an error.
        if os.environ.get("MARSRL_BUILD") == "require":
            raise
        pytest.skip(f"no cluster in a box: {error}")
    with made as box:
        fill(box)
        yield box


@pytest.fixture(scope="session")
def alone(box: Box, tmp_path_factory: pytest.TempPathFactory) -> Sequence[MetricsRow]:
    """Metrics of three steps that one rank trained, with its engine in the same process."""
    logs = tmp_path_factory.mktemp("alone")
    run = train(box, f"torchrun --nproc-per-node 8 {ALONE}", "alone", logs, "run.steps=3", ranks=1)
    assert run.ended(1200) == {"host1": 0}, run.output("host1")
    return run.rows()
