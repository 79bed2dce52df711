"""Two trainer hosts and an engine host in a box: what one host trains, by wire; then the power of rank 0's host goes off.

The rest of what a cluster does and suffers: `make cluster` (all_cases.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from box import SHARED, Box, why_not
from cluster import ALONE, BY_WIRE, fill, lend, same_metrics, train
from commands import run_by

if os.environ.get("MARSRL_BUILD") != "require":  # as .ci/run says it: there a machine without namespaces is an error
    pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no cluster in a box: {why_not()}")


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with Box(3) as box:
        yield box


@pytest.mark.slow
def test_two_hosts_train_what_one_trains_and_name_the_host_that_is_gone(box: Box, tmp_path: Path) -> None:
    by_hand, join = run_by("test_two_hosts_train_what_one_trains_and_name_the_host_that_is_gone")
    fill(box)
    alone = train(box, f"torchrun --nproc-per-node 8 {ALONE}", "alone", tmp_path, "run.steps=3", ranks=1)
    assert alone.ended(1200) == {"host1": 0}, alone.output("host1")
    lend(box.hosts[2], join, tmp_path)
    words = ("policies.main.layout.tensor=2", "run.steps=100", "run.silence_s=20", *BY_WIRE)
    run = train(box, by_hand, "first", tmp_path, *words, ranks=1)
    run.until(3, 1200)
    assert "within" in same_metrics(alone.rows(), run.rows()[:3])
    box.hosts[0].power_off()
    assert run.ended(300, "host2") == {"host2": 1}
    assert re.fullmatch(
        r"marsrl: rank 1 stops: rank 0 \(host1, process \d+\) or its machine is gone: its store has not answered for "
        rf"run\.silence_s = 20 s; checkpoint {SHARED}/runs/first/checkpoints/step_\d+ \(step \d+\) is whole: go on with "
        r"run\.name=first run\.resume=auto, added to the same command",
        run.said("host2").replace(str(box.shared), str(SHARED)),
    ), run.output("host2")
    run.check()
