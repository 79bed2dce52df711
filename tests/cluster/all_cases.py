"""Further cluster tests: `make cluster`, as root.

There are three hosts (box.py) with one shared disk. Two of them train; engines run on every host that joins by `ray start`.
Most tests cause a fault in the same run, `faults`, which the next test resumes. Each checks at its end that no problem was lost
or trained twice (tests/integration/books.py).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import cluster
import pytest
from box import Box
from documented_commands import run_by

from marsrl.trainer.report.metrics import MetricsRow

CUT_S = 20.0
BY_HAND, JOIN = run_by("test_two_hosts_train_as_one_and_name_a_lost_host")
LAYOUT = ("policies.main.layout.tensor=2", "rollout.engines=2")


@pytest.fixture(autouse=True)
def _new_hosts(box: Box) -> None:
    for number in (1, 2, 3):
        box.replace(number)


@pytest.fixture
def run(box: Box, tmp_path: Path) -> Iterator[cluster.Training]:
    """A run with ranks on host1 and host2, and engines on host1 and host3."""
    for host in (box.hosts[0], box.hosts[2]):
        cluster.lend(host, JOIN, tmp_path)
    words = (*LAYOUT, *cluster.BY_WIRE, "run.steps=1000", "run.resume=auto")
    run = cluster.train(box, BY_HAND, "faults", tmp_path, *words, ranks=1)
    run.until(run.step() + 2)
    yield run
    for host in box.hosts:
        host.power_off()
    run.check()


def metric(run: cluster.Training, name: str) -> list[float]:
    """Return the metric's value at each step; 0 where it is missing."""
    return [row.values.get(name) or 0 for row in run.rows()]


def test_slurm_trains_on_two_hosts_of_two_ranks_as_on_one(
    box: Box, alone: Sequence[MetricsRow], tmp_path: Path
) -> None:
    """Runs docs/slurm.sh with 2 x 2 ranks (TP2 x DP2), engines on host1 and host3, and weights sent through files."""
    cluster.lend(box.hosts[0], JOIN, tmp_path)
    run = cluster.submit(box, "files", tmp_path, *LAYOUT, *cluster.BY_FILES, "run.steps=3", trainers=2, ranks=2)
    assert run.ended(3 * cluster.STEP_S) == {"host1": 0}, run.output("host1")
    cluster.check_same(alone, run.rows())


def test_sessions_of_a_lost_worker_are_replayed_by_the_next(box: Box, tmp_path: Path) -> None:
    """Workers join from other hosts with `--url --key`."""
    words = (f"torchrun --nproc-per-node 8 {cluster.ALONE}", "program", tmp_path, *cluster.PROGRAM)
    run = cluster.train(box, *words, ranks=1, **cluster.WORKERS_KEY)
    cluster.play(box.hosts[1], tmp_path)
    step = run.into_a_stage()
    box.hosts[1].cut_off()
    cluster.play(box.hosts[2], tmp_path)
    run.until(step + 3, 2 * cluster.STEP_S)
    assert sum(metric(run, "rollout/replayed_sessions"))
    box.hosts[1].reconnect()
    run.until(run.step() + 2)
    for host in box.hosts:
        host.power_off()
    run.check()
    assert not any(metric(run, "rollout/failed_episodes"))


def test_a_killed_trainer_host_ends_the_run_with_its_name(box: Box, run: cluster.Training) -> None:
    run.into_a_stage()
    box.hosts[1].power_off()
    run.ended(60.0, "host1")  # docs/clusters.md promises run.silence_s + 10 s = 50 s
    gone = r"silent for run\.silence_s = 40 s: rank 1 \(host2, process \d+\)"
    assert re.search(f"{gone}; {cluster.goes_on('faults')}", run.said("host1")), run.said("host1")


def test_a_full_shared_disk_ends_the_run(box: Box, run: cluster.Training) -> None:
    run.into_a_stage()
    ballast = box.shared / "ballast"
    for size in (1 << 20, 1 << 12):
        with open(ballast, "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\1" * size)
    run.ended(cluster.STEP_S)
    ballast.unlink()
    full = "(No space left|no space left on the disk)"
    assert re.search(f"{full}.*{cluster.goes_on('faults')}", run.said("host1")), run.said("host1")


def test_engines_survive_a_temporary_loss_of_their_network(box: Box, run: cluster.Training) -> None:
    step = run.into_a_stage()
    box.hosts[2].cut_off()
    time.sleep(CUT_S)
    box.hosts[2].reconnect()
    run.until(step + 3, 2 * cluster.STEP_S)
    assert not any(metric(run, "rollout/engine_restarts"))


def test_training_survives_a_killed_host_until_another_joins(box: Box, run: cluster.Training, tmp_path: Path) -> None:
    before, step = metric(run, "rollout/resubmitted"), run.into_a_stage()
    box.hosts[2].power_off()
    run.until(step + 3, 2 * cluster.STEP_S)
    struck = [i for i, number in enumerate(metric(run, "rollout/resubmitted"), 1) if number and i > len(before)]
    assert struck in ([], [step + 1], [step + 2])  # no step if the engine had just answered all of its requests
    assert metric(run, "rollout/engines/main")[-1] == 1
    cluster.lend(box.hosts[1], JOIN, tmp_path)
    end = time.monotonic() + 2 * cluster.STEP_S
    while metric(run, "rollout/engines/main")[-1] != 2:
        assert time.monotonic() < end, "host2 has joined, but no engine started there"
        run.until(run.step() + 1)
