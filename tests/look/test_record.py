"""Recording a run: what is recorded, and what never is."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from made_up_run import make_run

from marsrl.commands.look import record
from marsrl.trainer.report.parquet import write_rows
from marsrl.trainer.report.samples_log import SampleRecord, read_samples
from marsrl.trainer.runs.directory import RunDirectory, step_files


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def recorded(run: RunDirectory, out: Path) -> RunDirectory:
    assert record.record(run, out) == sum(map(len, contents(out).values()))
    return RunDirectory(out)


def test_a_recording_keeps_what_the_viewer_shows_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, text="/home/alice/secret/train.jsonl")
    run.checkpoint(6).mkdir(parents=True)
    (run.checkpoint(6) / "weights.safetensors").write_bytes(bytes(10))
    found = recorded(run, tmp_path / "out")
    assert not found.checkpoints.exists() and not found.tensorboard.exists() and not found.report.exists()
    assert step_files(found.samples).keys() == step_files(run.samples).keys()
    assert found.config.read_text() == run.config.read_text().replace("/home/alice/secret/", "")
    assert found.metrics.read_bytes() == run.metrics.read_bytes()


def test_a_large_recording_keeps_the_first_and_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, num_steps=6)
    whole = contents(recorded(run, tmp_path / "whole").path)
    sizes = [len(content) for name, content in whole.items() if name.startswith("samples/")]
    monkeypatch.setattr(record, "MOST_BYTES", sum(map(len, whole.values())) - min(sizes))
    kept = step_files(recorded(run, tmp_path / "less").samples)
    assert {*list(step_files(run.samples))[:1], *list(step_files(run.samples))[-1:]} <= kept.keys()
    assert 2 <= len(kept) < len(sizes)


def test_a_sample_that_names_the_home_folder_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    step, path = list(step_files(run.samples).items())[-1]
    rows = read_samples(path)
    object.__setattr__(rows[0], "text", f"see {Path.home()}/notes")
    write_rows(path, SampleRecord, rows)
    with pytest.raises(ValueError, match=rf"step_{step}.parquet has a text with {Path.home()}/; expected none"):
        record.record(run, tmp_path / "out")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no config.yaml; name a run's directory"):
        record.record(RunDirectory(tmp_path), tmp_path / "out")
    with pytest.raises(ValueError, match="exists; name a new folder"):
        record.record(make_run(tmp_path), tmp_path)


def test_paths_and_the_host_s_name_are_cut() -> None:
    text = (
        f"/home/alice/runs/one on {socket.gethostname()}: 3/4 of 'http://127.0.0.1:8000/v1/chat' in \"/data/x.jsonl\""
    )
    assert record.without_host(text) == "one on host: 3/4 of 'http://127.0.0.1:8000/v1/chat' in \"x.jsonl\""
