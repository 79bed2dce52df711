"""A user's class as the task: its problems, its reward in the judge processes, and what is said when it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from marsrl.rollout.tasks.own_task import own_problems
from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.types import Problem

OWN = """
from marsrl.rollout.tasks.own_task import OwnTask
from marsrl.rollout.types import Problem

class Doubles(OwnTask):
    class Options(OwnTask.Options):
        near: float = 0.5

    def problems(self):
        return [(f"double of {n}?", str(2 * n)) for n in range(20)]

    def reward(self, problem, answer):
        return float(int(answer) == int(problem.answer))

class FromData(OwnTask):
    prompts = "chain"
    def reward(self, problem, answer):
        return float(len(answer) == len(problem.question))

class Mine(OwnTask):
    pass
"""


@pytest.fixture
def named(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "my_task.py").write_text(OWN)
    return lambda kind: f"{tmp_path}/my_task.py:{kind}"


def test_problems_are_those_of_the_data_by_default(named: Callable[[str], str]) -> None:
    given = [Problem("f:1", "abc", "1", "t")]
    assert own_problems(named("FromData"), {}, given, ()) == (given, [])
    assert build_task(named("FromData"), {}, given, ()).prompts == "chain"


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("Missing", "pass", "task is .*: Missing is no class of .*my_task.py that extends OwnTask"),
        (
            "Mine",
            "import no_such_module",
            "task: .*my_task.py cannot be imported: ModuleNotFoundError: .*no_such_module",
        ),
        ("Mine", "prompts = 'poetry'", "task is .*: Mine.prompts: .*no prompt set is called 'poetry'"),
        (
            "Mine",
            "def problems(self): return [('q', 'a'), 7]",
            r"problems\[1\] is 7, expected \(question, answer\) or a Problem",
        ),
        ("Mine", "def problems(self): return [Problem('a', 'q', None, 't')] * 2", "two problems with the same id"),
        ("Mine", "def problems(self): return [][0]", "task is .*: problems raises IndexError: list index out of range"),
        ("Mine", "pass", "task is .*: problems is empty: return some, or set data.train"),
    ],
)
def test_what_is_wrong_with_a_class_is_said_in_one_line(kind: str, body: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(OWN.replace("    pass", f"    {body}"))
    with pytest.raises(ValueError, match=said) as caught:
        own_problems(f"{tmp_path}/my_task.py:{kind}", {}, (), ())
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="task is .*: there is no file .*missing.py"):
        own_problems(f"{tmp_path}/missing.py:{kind}", {}, (), ())


def test_its_options_are_checked(named: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match=r"task Doubles: task_options.far: unknown key; "):
        own_problems(named("Doubles"), {"far": 1.0}, (), ())
    with pytest.raises(ValueError, match=r"task Doubles: task_options.workers: .*greater than 0"):
        build_task(named("Doubles"), {"workers": 0})
