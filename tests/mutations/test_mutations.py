"""The mutation tester: the mistakes it makes, and that it sees which of them a test notices."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import run
from judges import MODULES, Judged, key
from operators import Mutant, mutants, sample

SOURCE = '''
"""A module."""
import os

def first(values: list[int], limit: int = 2) -> int | None:
    """A docstring, 1."""
    for value in values:
        if value < limit and value != 0:
            return value + 1
    raise ValueError(f"none of {len(values) + 1}" + "text")
'''


def changes(source: str) -> list[str]:
    return [f"{m.before} -> {m.after}" for m in mutants(ast.parse(source), source)]


def test_each_mistake_is_one_small_change_and_messages_stay() -> None:
    condition = "value < limit and value != 0"
    assert changes(SOURCE) == [
        "2 -> 3",
        f"{condition} -> False",
        f"{condition} -> True",
        f"{condition} -> value < limit or value != 0",
        f"{condition} -> value != 0",
        f"{condition} -> value < limit",
        "value < limit -> value <= limit",
        "value != 0 -> value == 0",
        "0 -> 1",
        "return value + 1 -> return None",
        "value + 1 -> value - 1",
        "value + 1 -> value",
        "value + 1 -> 1",
        "1 -> 2",
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a[i:n]", ["i:n -> :n", "i:n -> i + 1:n", "i:n -> i:", "i:n -> i:n + 1"]),
        ("x = sorted(a, key=f)", ["sorted(a, key=f) -> list(a)", "sorted(a, key=f) -> sorted(a)"]),
        ("x = min(a)", ["min(a) -> max(a)"]),
        ("x = not a", ["not a -> a"]),
        ("x = a is None", ["a is None -> a is not None"]),
        ("n += x", ["n += x -> n -= x", "n += x -> n = x"]),
        ("del x[i]", ["del x[i] -> pass"]),
        ("f(x)", ["f(x) -> pass"]),
        ("x.y = z", ["x.y = z -> pass"]),
        ("x = [a for a in b if a]", ["a -> True"]),
        ("while x:\n    break", ["x -> False", "break -> continue"]),
        ("x = zip(a, b, strict=True)", []),
        ("assert x == 1", []),
        ("x: Literal[1] = 2", ["2 -> 3"]),
        ("@dataclass(frozen=True)\nclass A:\n    x: int = 'a'", ["'a' -> 'a?'"]),
    ],
)
def test_mistakes_by_form(source: str, expected: list[str]) -> None:
    assert changes(source) == expected


def test_a_sample_is_spread_over_the_source_and_the_same_again() -> None:
    found: list[Mutant] = list(range(100))  # type: ignore[arg-type]
    chosen = sample(found, 10, seed=3)
    assert [int(m) // 10 for m in chosen] == list(range(10)) == [int(m) // 10 for m in sample(found, 10, seed=4)]  # type: ignore[call-overload]
    assert chosen == sample(found, 10, seed=3) != sample(found, 10, seed=4) and sample(found, 200, seed=0) == found


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judged:
    """A module of marsrl in a folder of its own: half of what it does is tested."""
    (tmp_path / "number.py").write_text("def larger(a, b):\n    return a > b\n\ndef unjudged(a):\n    return -a\n")
    (tmp_path / "test_number.py").write_text(
        "from marsrl.number import larger\n"
        "def test_larger():\n    assert larger(2, 1) is True and larger(1, 1) is False\n"
    )
    package = ModuleType("marsrl")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "marsrl", package)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    return Judged("number.py", ("test_number.py",))


def test_what_a_test_notices_is_killed_and_the_rest_survives(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(run, "equivalents", lambda name: {("return -a", "-a", "a"): "nobody calls it"})
    files = {path: path.read_bytes() for path in run.ROOT.iterdir() if path.is_file()}
    result, told = run.score("number", judged, None, 0)
    assert [m.after for m in result.killed] == ["return None", "a >= b"] and told["num"] == 4
    (survivor,) = result.survived
    assert key(survivor) == ("return -a", "return -a", "return None") and survivor.line == 5
    assert [(m.before, m.after, why) for m, why in result.equivalent] == [("-a", "a", "nobody calls it")]
    assert result.share == pytest.approx(2 / 3) and result.timed_out == []
    assert {path: path.read_bytes() for path in run.ROOT.iterdir() if path.is_file()} == files


def test_tests_that_fail_without_a_mistake_judge_nothing(judged: Judged) -> None:
    (run.ROOT / "test_number.py").write_text("def test_fails():\n    assert False\n")
    with pytest.raises(SystemExit, match="number: the tests fail without any mutation: test_number.py"):
        run.score("number", judged, None, 0)


def test_every_listed_equivalent_is_a_mutant_that_is_made() -> None:
    listed = tomllib.loads((Path(run.__file__).parent / "equivalent.toml").read_text())
    for name, each in ((name, each) for name, entries in listed.items() for each in entries):
        made = {key(mutant) for mutant in run.chosen_mutants(MODULES[name], None, 0)[1]}
        assert (each["line"], each["before"], each["after"]) in made and each["why"], (name, each)
