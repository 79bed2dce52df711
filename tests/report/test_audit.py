"""Audit of made-up runs: it accepts everything that a correct run may do, and finds missing tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_run import make_group, make_sample

from marsrl.commands.audit import audit
from marsrl.trainer.report.fates import SampleFate
from marsrl.trainer.report.metrics import MetricsLog
from marsrl.trainer.report.publishes import Publish, append_publish, forget_publishes
from marsrl.trainer.report.samples_log import write_samples
from marsrl.trainer.runs.directory import RunDirectory

FIRST = Publish(0, "main", 0, "a", 1, None, None, 8, 0.1)


def run_of(folder: Path, counted: dict[str, float], publishes: Sequence[Publish] = (FIRST,)) -> RunDirectory:
    """Write a run of one step with a sample of policy `main` and one of a frozen policy, 4 tokens each. counted: its metrics."""
    run = RunDirectory.create(folder, "made-up", "test")
    for publish in publishes:
        append_publish(run.publishes, publish)
    samples = make_sample("s"), make_sample("j", "judge")
    fates = {"s": SampleFate("zero advantage", 4), "j": SampleFate("not trained", 4)}
    write_samples(run, 1, map(make_group, samples), {}, fates, {"solver": "main", "judge": "served"})
    with MetricsLog(run) as metrics:
        metrics.log(1, {"rollout/samples": 2, **counted})
    return run


@pytest.mark.parametrize(
    ("carried", "counted", "passes"),
    [
        (0, {}, True),
        (3, {}, True),
        (0, {"policy_cost/served/output_tokens": 9}, True),  # a server also counts thoughts that it does not show
        (-1, {}, False),
        (1, {"rollout/carried_tokens/main": 0}, False),
        (1, {"rollout/carried_tokens/main": 0, "rollout/replayed_sessions": 1}, True),
    ],
)
def test_decoded_tokens_are_in_samples_or_in_progress(
    carried: int, counted: dict[str, float], passes: bool, tmp_path: Path
) -> None:
    counted = {"policy_cost/main/output_tokens": 4 + carried, "rollout/carried_tokens/main": max(0, carried)} | counted
    check = audit(run_of(tmp_path, counted)).checks[2]
    assert (check.name, check.passed) == ("tokens", passes), check.text


@pytest.mark.parametrize(("shards", "passes"), [(1, False), (2, True)])
def test_engines_of_other_shards_have_other_checksums(shards: int, passes: bool, tmp_path: Path) -> None:
    again = replace(FIRST, digest="b", shards=shards)  # a run that resumes with another rollout.vllm.tensor_parallel
    check = audit(run_of(tmp_path, {}, [FIRST, again])).checks[0]
    assert (check.name, check.passed) == ("versions", passes), check.text


def test_a_damaged_line_of_publishes_says_what_to_do(tmp_path: Path) -> None:
    run = run_of(tmp_path, {})
    run.publishes.write_bytes(bytes(40) + b"\n" + run.publishes.read_bytes())
    with pytest.raises(ValueError, match="line 1.*remove it or restore the file"):
        forget_publishes(run.publishes, 0)
