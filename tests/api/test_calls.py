"""The Python API: calls that it refuses, and the names by which it finds classes. Nothing is trained."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import marsrl
from marsrl.rollout import own_classes
from marsrl.rollout.own_classes import name_of, own_class
from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.types import Problem
from marsrl.trainer.main import main


class Pair(marsrl.Orchestration):
    agents = (marsrl.AgentSpec("solver"), marsrl.AgentSpec("judge", marsrl.Role.VERIFIER))

    def follow(self, episode: Any) -> list[Any]:
        asks = [episode.ask("solver")]
        solution = episode.said(asks[0])
        return asks if solution is None else [*asks, episode.ask("judge", solution)]


class Doubles(marsrl.OwnTask):
    def problems(self) -> list[tuple[str, str]]:
        return [(f"What is {n} + {n}?", str(2 * n)) for n in range(20)]

    def reward(self, problem: Problem, answer: str) -> float:
        if answer == "hang":
            threading.Event().wait(60)
        if answer == "exit":
            sys.exit(3)
        return float(answer == problem.answer)


def test_the_api_has_its_public_names_and_no_others() -> None:
    assert [name for name in marsrl.__all__ if getattr(marsrl, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="no attribute 'fit'; it has AgentSpec, .*try_team"):
        marsrl.fit  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout": {"groupsize": 2}}, ["rollout.groupsize=2"]),
        ({"run.steps": "many"}, ["run.steps=many"]),
        ({"task": "chess"}, ["task=chess"]),
        ({"run": {"name": "a/b"}}, ["run.name=a/b"]),
        ({"config": "nowhere.yaml"}, ["--config", "nowhere.yaml"]),
        ({"orchestration": "teams.py:None"}, ["orchestration=teams.py:None"]),
        ({"task": "math", "data.train": "gone.jsonl"}, ["task=math", "data.train=gone.jsonl"]),
    ],
)
def test_an_error_has_the_text_of_the_command_line(
    settings: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    printed = capsys.readouterr().err.removeprefix("marsrl: ").rstrip("\n")
    with pytest.raises(marsrl.Error) as caught:
        marsrl.train(**settings)
    assert str(caught.value).replace("keywords", "command line") == printed
    assert not list(tmp_path.iterdir())


def test_settings_that_no_file_could_hold_are_refused() -> None:
    with pytest.raises(marsrl.Error, match="run is {'steps': <object.*classes go to team and task"):
        marsrl.train(run={"steps": object()})


def test_several_ranks_are_left_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        marsrl.Error, match=r"needs 4 ranks \(WORLD_SIZE is 1\); start them with torchrun --nproc-per-node 4"
    ):
        marsrl.train(policies={"main": {"layout": {"tensor": 2, "pipeline": 2}}})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(marsrl.Error, match=r"needs 2 ranks \(WORLD_SIZE is 2\); start them with torchrun"):
        marsrl.train()


def test_a_call_in_another_thread_is_refused() -> None:
    errors = list[Exception]()

    def call() -> None:
        try:
            marsrl.train()
        except marsrl.Error as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "outside the main thread" in str(errors)


def test_a_class_from_a_file_is_found_by_name_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pairs_of_mine.py").write_text("import marsrl\nclass Own(marsrl.Orchestration):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    team_class = importlib.import_module("pairs_of_mine").Own
    assert name_of(team_class) == f"{tmp_path}/pairs_of_mine.py:Own"
    assert own_class("orchestration", name_of(team_class), marsrl.Orchestration) is team_class
    (tmp_path / "pairs_of_mine.py").write_text("import marsrl\nclass Other(marsrl.Orchestration):\n    pass\n")
    own_classes.forget_files()  # the edited file must be read again
    assert own_class("orchestration", f"{tmp_path}/pairs_of_mine.py:Other", marsrl.Orchestration) is not team_class


def test_a_class_in_memory_is_found_here_and_missed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(marsrl.Orchestration):  # like a notebook cell that is run again
        pass

    assert name_of(Pair) == "memory:Pair"
    assert own_class("orchestration", "memory:Pair", marsrl.Orchestration) is Pair
    monkeypatch.setattr(own_classes, "_in_memory", {})
    with pytest.raises(marsrl.Error, match=r"memory:Pair'.*this process does not have it; pass the class again"):
        marsrl.train(orchestration="memory:Pair")


def test_a_team_is_tried_with_answers_of_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"solver": [r"\boxed{4}"], "judge": ["Verdict: wrong"]}
    rollout = {"group_size": 2}
    played = marsrl.try_team(
        team=Pair, task=Doubles, answers=answers, question="What is 2 + 2?", reference="4", rollout=rollout
    )
    assert played.num_episodes == 2 and not played.errors
    samples = [sample for group in played.credited.groups for sample in group.samples]
    assert {(each.agent, each.reward.value) for each in samples} == {("solver", 1.0), ("judge", 0.0)}
    assert "# settings: preset math_default.yaml < keywords" in capsys.readouterr().out
    with pytest.raises(marsrl.Error, match="answers: the team has no agent 'critic'; expected one of solver, judge"):
        marsrl.try_team(team=Pair, answers={"critic": ["no"]})


def test_an_answer_that_hangs_or_exits_does_not_end_the_run() -> None:
    task = build_task(name_of(Doubles), {"timeout_s": 0.5, "workers": 1})
    problem = Problem("1", "What is 2 + 2?", "4", "doubles")
    try:
        right, hung, ended, wrong = (task.judge(problem, each).result(30) for each in ("4", "hang", "exit", "5"))
    finally:
        task.close()
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert hung.is_missing and "took more than 0.5 s and was abandoned" in hung.note
    assert ended.is_missing and "SystemExit: 3" in ended.note


def test_a_folder_without_a_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(marsrl.Error, match="is not a run directory: it has no config.yaml"):
        marsrl.load_run(tmp_path)
