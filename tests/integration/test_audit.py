"""`marsrl audit` accepts short runs with a real engine, and reports each fault that is put into them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_pool import train_here

import marsrl.trainer
from marsrl.commands.audit import Audit, audit
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.trainer.report.parquet import write_rows
from marsrl.trainer.report.samples_log import SampleRecord, read_samples
from marsrl.trainer.runs.directory import RunDirectory, step_files

pytestmark = pytest.mark.slow

READY = Path(marsrl.trainer.__path__[0]) / "supervised/ready"
WORDS = [
    "task=arithmetic", "orchestration=solver", f"policies.main={{model: {READY}, dtype: float32}}",
    "policies.solver={base: main, adapter: {rank: 4, targets: [attention]}, optimizer: {lr: 0.02}}",
    "agents.solver.policy=solver", "rollout.engine=local", "rollout.placement=local", "rollout.prompts_per_step=4",
    "rollout.group_size=8", "rollout.max_response_tokens=56", "run.steps=3", "run.evaluate=false",
    "trainer.max_tokens_per_micro_batch=4096",
]  # fmt: skip


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train_here(tmp_path_factory.mktemp("clean"), WORDS)


def failing(result: Audit) -> list[str]:
    return [check.name for check in result.checks if not check.passed]


def test_a_clean_run_passes_every_check(clean: RunDirectory) -> None:
    found = audit(clean)
    assert failing(found) == []
    assert {(policy, agent) for policy, agent in found.fates} == {("solver", "solver")}
    counts = found.fates["solver", "solver"]
    assert sum(number for number, _ in counts.values()) == 3 * 4 * 8 and counts["trained"][0] > 0
    assert {*counts} <= {"trained", "zero advantage"}
    assert failing(audit(clean, 2)) == []


@pytest.mark.parametrize("stale", ["base", "older version"])
def test_decoding_with_unverified_weights_fails_the_audit(
    stale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, prefill = LocalEngine._load_adapter, LocalEngine._prefill_last
    loaded: list[dict[str, Any]] = []

    def load_and_remember(engine: LocalEngine, name: str, path: str) -> Any:
        loaded.append(dict(engine._adapters))
        return load(engine, name, path)

    def decode_with_stale(engine: LocalEngine, *args: Any, **options: Any) -> Any:
        engine._adapters = {} if stale == "base" else loaded[-1]  # after the publish was verified
        return prefill(engine, *args, **options)

    monkeypatch.setattr(LocalEngine, "_load_adapter", load_and_remember)
    monkeypatch.setattr(LocalEngine, "_prefill_last", decode_with_stale)
    found = audit(train_here(tmp_path, WORDS))
    assert failing(found) == ["log-probs"]
    assert "other weights than the trainer's" in found.checks[1].text


Rows = list[SampleRecord]


def doubled(steps: dict[int, Rows]) -> None:
    trained = next(row for row in steps[1] if row.num_trained)
    steps[2].append(replace(trained, step=2, line=len(steps[2]) + 1))


def dropped(steps: dict[int, Rows]) -> None:
    steps[2] = [row for row in steps[2] if row.rollout_id != steps[2][0].rollout_id]


def demoted(steps: dict[int, Rows]) -> None:
    steps[1] = [replace(row, fate="not trained", num_trained=0, update=0, gap=None) for row in steps[1]]


def from_nowhere(steps: dict[int, Rows]) -> None:
    first = steps[2][0]
    steps[2][0] = replace(first, segments=tuple(replace(segment, version=7) for segment in first.segments))


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (doubled, ["tokens", "once"]),
        (dropped, ["tokens", "once"]),
        (demoted, ["once"]),
        (from_nowhere, ["versions", "staleness"]),
    ],
)
def test_altered_samples_fail_the_audit(
    spoil: Callable[[dict[int, Rows]], None], names: list[str], clean: RunDirectory, tmp_path: Path
) -> None:
    run = RunDirectory(shutil.copytree(clean.path, tmp_path / "run"))
    files = step_files(run.samples)
    steps = {step: read_samples(path) for step, path in files.items()}
    spoil(steps)
    for step, path in files.items():
        write_rows(path, SampleRecord, steps[step])
    assert failing(audit(run)) == names


def test_two_digests_of_one_version_fail_the_audit(clean: RunDirectory, tmp_path: Path) -> None:
    run = RunDirectory(shutil.copytree(clean.path, tmp_path / "run"))
    first, line, *others = run.publishes.read_text().splitlines()
    digest = line.partition('"digest":"')[2][:16]
    again = line.replace(digest, "0" * 16)  # the same version again with another digest
    run.publishes.write_text("\n".join([first, line, again, *others, ""]))
    assert failing(audit(run)) == ["versions"]


def test_runs_that_recorded_no_fates_are_rejected(clean: RunDirectory, tmp_path: Path) -> None:
    run = RunDirectory(shutil.copytree(clean.path, tmp_path / "run"))
    run.publishes.unlink()
    with pytest.raises(ValueError, match="an earlier version wrote it"):
        audit(run)
    with pytest.raises(ValueError, match="has no step 9; it has 1, 2, 3"):
        audit(clean, 9)
