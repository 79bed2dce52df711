"""The runs of examples/, as they are written, but for the model and the number of steps."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from commands import run_by
from desk import Desk, boxing_model
from small_run import SEED

from marsrl.trainer import cli
from marsrl.trainer.main import main
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import read_samples


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", run_by("test_an_example_trains"))
def test_an_example_trains(command: str, desk: Desk) -> None:
    """With a model that says 7 or 8 by a coin, until its first agent's samples are trained."""
    model = boxing_model(desk.folder / "model")
    first, steps = ("first", 3) if "own_team" in command else ("solver", 1)
    own = [f"policies.main.model={model}", f"run.steps={steps}", "run.evaluate=false", *SEED]
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main([*desk.words(command, Path)[2:], *own]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    (run,) = (desk.folder / "runs").iterdir()
    row = next(row for row in read_metrics(run / "metrics.jsonl") if f"reward/{first}/mean" in row.values)
    assert row.values[f"reward/{first}/missing"] == 0 and 0 <= (row.values[f"reward/{first}/mean"] or 0) <= 1
    assert first in {sample.agent for path in run.glob("samples/*") for sample in read_samples(path)}


@pytest.mark.parametrize("command", run_by("test_an_example_is_tried"))
def test_an_example_is_tried(command: str, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(desk.words(command, Path)[1:]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "advantage" in shown and ("checker" in shown) == ("own_team" in command)


def test_the_problems_are_in_gsm8k_s_format() -> None:
    from documents import ROOT

    rows = [json.loads(line) for line in (ROOT / "examples/gsm8k/problems.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == 12 and all(row["answer"].split("#### ")[1].isdigit() for row in rows)
