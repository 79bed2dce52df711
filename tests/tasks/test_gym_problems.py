"""task=reasoning_gym: its problems, separate held-out ones, and its scorers in judge processes."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import replace
from typing import Any

import pytest

from marsrl.rollout.tasks.find_task import own_problems
from marsrl.rollout.tasks.registry import build_task, prompts_of
from marsrl.trainer.config.read import ConfigError, read_config

needs_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning_gym is missing")
MIXED: dict[str, Any] = {
    "dataset": "composite",
    "datasets": [
        {
            "name": "chain_sum",
            "weight": 3,
            "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        },
        {"name": "ransom_note"},  # draws from a Python set, whose order differs between processes
    ],
    "size": 60,
    "eval_size": 30,
}


@needs_gym
@pytest.mark.slow
def test_gym_problems_repeat_and_held_out_ones_are_apart() -> None:
    train, held_out = own_problems("reasoning_gym", MIXED, (), ())
    assert (train, held_out) == own_problems("reasoning_gym", MIXED, (), ())
    questions, kept = [{each.question for each in problems} for problems in (train, held_out)]
    assert len(questions) == len(train) < 60 and len(kept) == len(held_out) <= 30  # each question occurs once
    assert not questions & kept
    sums = [problem for problem in train if problem.question.startswith("State the final")]
    assert 0 < len(train) - len(sums) < len(sums)
    with contextlib.closing(build_task("reasoning_gym", MIXED, train, held_out)) as task:
        right = [task.judge(problem, problem.answer or "") for problem in train]
        partial, wrong = task.judge(sums[0], f"{sums[0].answer} apples"), task.judge(sums[0], "none")
        assert {reward.result().value for reward in right} == {1.0}
        length = len(sums[0].answer or "")
        assert partial.result().value == partial.result().correct == length / (length + 7)
        assert wrong.result().value == 0.0
        changed = task.judge(replace(sums[0], question="What?"), "none").result()
        assert changed.is_missing and f"no longer draws the same problem as {sums[0].id}" in changed.note


@needs_gym
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dataset": "chain_smu"}, "dataset is 'chain_smu'; .* the closest: chain_sum"),
        ({"dataset": "chain_sum", "min_trems": 3}, "unexpected keyword argument 'min_trems'"),
        ({"dataset": "chain_sum", "eval_seed": 999}, "draw the same problems"),
        ({}, "task_options.dataset: Field required"),
    ],
)
def test_wrong_options_of_gym_are_named(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        own_problems("reasoning_gym", options, (), ())


def test_files_beside_gym_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["task=reasoning_gym", "task_options.dataset=chain_sum"]
    assert read_config(None, words)[0].task_options == {"dataset": "chain_sum"}
    with pytest.raises(ConfigError, match="task=reasoning_gym generates its problems"):
        read_config(None, [*words, "data.train=problems.jsonl"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install reasoning_gym \(marsrl\[reasoning_gym\]\)"):
        prompts_of("reasoning_gym", {"dataset": "chain_sum"})
