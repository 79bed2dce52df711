"""marsrl.train, sft and evaluate in this process, with classes defined as in a notebook cell, scripted engines and the real
learner.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import python_blocks
from scripted_pool import engines_are, half_right, on_sevens, saying

import marsrl
import marsrl.runs
from marsrl.rollout.types import Problem
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.origin import ConfigOrigin
from marsrl.trainer.config.read import read_config
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.lock import why_held

CALLS = list[str]()
"""Answers judged by Sevens since the last reset. Unless INTERRUPTS is empty, the tenth answer interrupts the run."""
INTERRUPTS = list[bool]()


class Pair(marsrl.Orchestration):
    agents = (marsrl.AgentSpec("solver"), marsrl.AgentSpec("verifier", marsrl.Role.VERIFIER))

    def follow(self, episode: Any) -> list[Any]:
        asks = [episode.ask("solver")]
        solution = episode.said(asks[0])
        return asks if solution is None else [*asks, episode.ask("verifier", solution)]


class Broken(Pair):
    def reward(self, *given: Any) -> float:
        raise LookupError("no reward")


class Sevens(marsrl.OwnTask):
    def problems(self) -> list[tuple[str, str]]:
        return [(f"What is 7, asked for the {i}th time?", "7") for i in range(40)]

    def reward(self, problem: Problem, answer: str) -> float:
        CALLS.append(answer)
        if INTERRUPTS and len(CALLS) == 10:  # each step asks for eight answers
            os.kill(os.getpid(), signal.SIGINT)
        return float(answer == problem.answer)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tiny model. Every run of the test uses it, writes to tmp_path, and has small defaults that a test can override."""
    monkeypatch.chdir(tmp_path)
    made = init_model("tiny", "bytes", tmp_path / "model")
    small = [*on_sevens(tmp_path, made), "run.steps=2", "rollout.pipeline=trajectory", "agents.verifier.prompt=chain"]

    def read(config: Any, words: Sequence[str], **how: Any) -> tuple[RunConfig, ConfigOrigin]:
        is_run = isinstance(config, str) and config.endswith("config.yaml")
        own = small if any("Pair" in word or "Broken" in word or "Checked" in word for word in words) else small[:-1]
        return read_config(config, [*([] if is_run else own), *words], **how)

    monkeypatch.setattr(marsrl.runs, "read_config", read)
    with engines_are(saying(made, half_right)):
        yield made


def write_demonstrations(folder: Path) -> None:
    chat = [{"role": "user", "content": "What is 7?"}, {"role": "assistant", "content": r"\boxed{7}"}]
    (folder / "demos.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 8)


def test_notebook_classes_train_evaluate_and_train_again(model: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run = marsrl.train(team=Pair, task=Sevens, **{"run.name": "one", "trainer.threads": 1})
    assert run.path == tmp_path / "runs" / "one" and run.settings["orchestration"] == "memory:Pair"
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert all(0 < (row["reward/solver/mean"] or 0) < 1 for row in run.metrics)
    assert {sample.agent for sample in run.samples()} == {"solver", "verifier"}
    assert {sample.step for sample in run.samples()} == {2} and {sample.step for sample in run.samples(1)} == {1}
    assert run.samples(3) == []
    assert run.summary is not None and run.summary.steps == 2
    assert "<html" in run.report().path.read_text() and "srcdoc" in run.report()._repr_html_()
    found = run.evaluate(team=Pair, task=Sevens, out="found")
    assert found.num_problems == 3 and json.loads(Path("found/evaluation.json").read_text())["num_problems"] == 3

    again = marsrl.train(team=Pair, task=Sevens, **{"run.name": "two", "trainer.threads": 1})
    rewards = [[row["reward/solver/mean"] for row in each.metrics] for each in (run, again)]
    assert rewards[0] == rewards[1]  # the first run leaves nothing behind
    assert [why_held(RunDirectory(each.path)) for each in (run, again)] == ["", ""]
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert marsrl.load_run("runs/one") == run
    for _ in range(2):  # a refusal releases the directory, although the exception is still referenced
        with pytest.raises(marsrl.Error, match="cannot resume with a changed task") as kept:
            marsrl.train(team=Pair, **{"run.name": "one", "run.resume": "auto", "trainer.threads": 1})
        assert kept.value.__cause__ is not None


def test_an_interrupted_run_is_saved_and_goes_on(model: Path) -> None:
    CALLS.clear()
    INTERRUPTS.append(True)
    settings = {"run.name": "stopped", "run.steps": 3, "run.evaluate": False}
    try:
        whole = r"interrupted; checkpoint .* \(step [12]\) is intact: resume by .*run.resume=auto"
        with pytest.raises(KeyboardInterrupt, match=whole) as stopped:
            marsrl.train(team=Pair, task=Sevens, **settings)
    finally:
        INTERRUPTS.clear()
    # The last checkpoint is of step 1, or of step 2 if step 2 had just ended.
    (last,) = re.findall(r"\(step (\d)\)", str(stopped.value))
    assert [row["step"] for row in marsrl.load_run("runs/stopped").metrics] == [1, 2][: int(last)]
    run = marsrl.train(team=Pair, task=Sevens, **settings, **{"run.resume": "auto"})
    assert [row["step"] for row in run.metrics] == [1, 2, 3]


def test_a_failed_run_raises_the_cli_error_and_is_unlocked(model: Path) -> None:
    with pytest.raises(marsrl.Error, match=r"\Athe run failed: RuntimeError: step 1: .*no reward.*run.name=failed"):
        marsrl.train(team=Broken, task=Sevens, **{"run.name": "failed", "run.evaluate": False})
    assert why_held(RunDirectory(Path("runs/failed"))) == ""


def test_a_team_is_taught_from_demonstrations(model: Path, tmp_path: Path) -> None:
    write_demonstrations(tmp_path)
    run = marsrl.sft(data={"demonstrations": "demos.jsonl"}, sft={"epochs": 1, "batch": 4}, **{"run.name": "taught"})
    losses = [row["sft/loss"] for row in run.metrics if "sft/loss" in row]
    assert len(losses) == 2 and (run.path / "hf" / "config.json").is_file() and run.samples() == []


EXAMPLES = [block for block in python_blocks() if block.text.startswith("import marsrl\n")]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.where)
def test_an_example_of_the_documents_trains(
    example: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_readme = (block.text for block in python_blocks() if block.where.startswith("README.md"))
    (tmp_path / "team.py").write_text(next(text for text in of_readme if "class " in text))
    write_demonstrations(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "team", raising=False)
    module = types.ModuleType("example")  # its classes belong to this module, as a notebook's belong to __main__
    monkeypatch.setitem(sys.modules, "example", module)
    text = re.sub(r"/path/to/[\w.-]+", str(model), example.text)
    exec(compile(text, example.where, "exec"), module.__dict__)
    assert "# settings: " in capsys.readouterr().out


def test_the_documents_have_examples_of_each_call() -> None:
    assert len(EXAMPLES) == 4
    called = {name for each in EXAMPLES for name in re.findall(r"marsrl\.([a-z_]+)\(", each.text)}
    assert called == {name for name in marsrl.__all__ if name.islower()}
