"""Two trainer hosts and an engine host train what one host trains; then rank 0's host loses power.

Further cluster tests: `make cluster` (all_cases.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from box import Box
from cluster import BY_WIRE, check_same, goes_on, lend, train
from documented_commands import run_by

from marsrl.trainer.report.metrics import MetricsRow


@pytest.mark.slow
def test_two_hosts_train_as_one_and_name_a_lost_host(box: Box, alone: Sequence[MetricsRow], tmp_path: Path) -> None:
    by_hand, join = run_by("test_two_hosts_train_as_one_and_name_a_lost_host")
    lend(box.hosts[2], join, tmp_path)
    words = ("policies.main.layout.tensor=2", "run.steps=100", "run.silence_s=20", *BY_WIRE)
    run = train(box, by_hand, "first", tmp_path, *words, ranks=1)
    run.until(3, 1200)
    check_same(alone, run.rows()[:3])
    box.hosts[0].power_off()
    assert run.ended(300, "host2") == {"host2": 1}
    assert re.fullmatch(
        r"marsrl: rank 1 stops: rank 0 \(host1, process \d+\) or its machine is gone: its store has not answered for "
        rf"run\.silence_s = 20 s; {goes_on('first')} to the same command",
        run.said("host2"),
    ), run.output("host2")
    run.check()
