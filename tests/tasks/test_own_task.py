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

    def held_out(self):
        return [("double of 100?", None)]

    def reward(self, problem, answer):
        wanted = problem.answer or "200"
        return 1 if int(answer) == int(wanted) else self.options.near * (abs(int(answer) - int(wanted)) < 3)

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


def test_problems_are_the_class_s_and_its_reward_is_asked_in_processes(named: Callable[[str], str]) -> None:
    name, options = named("Doubles"), {"near": 0.25, "timeout_s": 5.0, "workers": 2}
    train, held_out = own_problems(name, options, (), ())
    assert [(p.question, p.answer) for p in train[:2]] == [("double of 0?", "0"), ("double of 1?", "2")]
    task = build_task(name, options, train, held_out)
    try:
        assert (task.name, task.prompts) == ("Doubles", "math")
        source = task.problems(seed=3)
        assert sorted(source.next_problem().id for _ in range(20)) == sorted(p.id for p in train)  # an epoch
        again = task.problems(seed=3)
        again.load(source.state())
        assert again.next_problem() == source.next_problem()
        (unknown,) = task.held_out(5, seed=0)
        assert unknown.answer is None
        asked = [(train[3], "6"), (train[3], "7"), (train[3], "99"), (unknown, "200"), (train[3], "six")]
        right, near, far, by_judge, raises = (each.result() for each in [task.judge(*pair) for pair in asked])
        assert [r.value for r in (right, near, far, by_judge)] == [1.0, 0.25, 0.0, 1.0]
        assert raises.is_missing and "ValueError" in raises.note
    finally:
        task.close()


def test_problems_are_those_of_the_data_by_default(named: Callable[[str], str]) -> None:
    given = [Problem("f:1", "abc", "1", "t")]
    assert own_problems(named("FromData"), {}, given, ()) == (given, [])
    assert build_task(named("FromData"), {}, given, ()).prompts == "chain"


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("Missing", "pass", "task is .*: Missing is no class of .*my_task.py that extends OwnTask"),
        ("Problem", "pass", "task is .*: Problem is no class of .* that extends OwnTask"),
        (
            "Mine",
            "import no_such_module",
            "task: .*my_task.py cannot be imported: ModuleNotFoundError: .*no_such_module",
        ),
        ("Mine", "prompts = 'poetry'", "task is .*: Mine.prompts: .*no prompt set is called 'poetry'"),
        ("Mine", "__init__ = lambda *_: {}[7]", "task is .*: making Mine raises KeyError: 7"),
        (
            "Mine",
            "def problems(self): yield 'q', 'a'",
            r"problems returns generator, expected a list of \(question, answer\)",
        ),
        (
            "Mine",
            "def problems(self): return [('q', 'a'), 7]",
            r"problems\[1\] is 7, expected \(question, answer\) or a Problem",
        ),
        (
            "Mine",
            "def problems(self): return [(' ', 'a')]",
            r"problems\[0\] is .*expected a question and an answer as text",
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
