"""The mutation tester: the mistakes it makes, and that it sees which of them a test notices."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import run
from judges import MODULES, key
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


WORKER = """
import json, sys, types
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run
from judges import Judged, key
package = types.ModuleType("marsrl")
package.__path__ = [sys.argv[2]]
sys.modules["marsrl"], run.ROOT = package, Path(sys.argv[2])
run.equivalents = lambda name: {("return -a", "-a", "a"): "nobody calls it"}
result, told = run.score("number", Judged("number.py", (sys.argv[3],)), None, 0)
fates = {name: [key(m) for m in getattr(result, name)] for name in ("killed", "timed_out", "survived")}
equivalent = [(key(m), why) for m, why in result.equivalent]
print("TOLD" + json.dumps({**fates, "equivalent": equivalent, "share": result.share, "num": told["num"]}))
"""


def tried(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """A module of which half is tested, in a process of its own: a fork of one with threads may hang."""
    (folder / "number.py").write_text("def larger(a, b):\n    return a > b\n\ndef unjudged(a):\n    return -a\n")
    (folder / "test_number.py").write_text(tests)
    command = [sys.executable, "-c", WORKER, str(Path(run.__file__).parent), str(folder), "test_number.py"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_what_a_test_notices_is_killed_and_the_rest_survives_and_nothing_is_written(tmp_path: Path) -> None:
    tests = "from marsrl.number import larger\ndef test_larger():\n    assert larger(2, 1) is True\n"
    done = tried(tmp_path, tests + "    assert larger(1, 1) is False\n")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.rpartition("TOLD")[2])
    assert [after for _, _, after in told["killed"]] == ["return None", "a >= b"] and told["timed_out"] == []
    assert told["survived"] == [["return -a", "return -a", "return None"]]
    assert told["equivalent"] == [[["return -a", "-a", "a"], "nobody calls it"]]
    assert told["num"] == 4 and told["share"] == pytest.approx(2 / 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["number.py", "test_number.py"]
    assert "return a > b" in (tmp_path / "number.py").read_text()


def test_tests_that_fail_without_a_mistake_judge_nothing(tmp_path: Path) -> None:
    done = tried(tmp_path, "def test_fails():\n    assert False\n")
    assert done.returncode == 1 and "number: the tests fail without any mutation: test_number.py" in done.stderr


def test_every_listed_equivalent_is_a_mutant_that_is_made() -> None:
    listed = tomllib.loads((Path(run.__file__).parent / "equivalent.toml").read_text())
    for name, each in ((name, each) for name, entries in listed.items() for each in entries):
        made = {key(mutant) for mutant in run.chosen_mutants(MODULES[name], None, 0)[1]}
        assert (each["line"], each["before"], each["after"]) in made and each["why"], (name, each)
