"""`marsrl compare` of runs with made-up numbers."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import pytest
from made_up_run import make_run
from rich.console import Console
from test_exported_pages import ATTACK, answers_in

from marsrl.commands import cli
from marsrl.commands.look.compare import compare
from marsrl.commands.look.comparison import Difference, difference, names_of, read_compared, side_by_side
from marsrl.rollout.agents.roles import AgentSpec
from marsrl.trainer.evaluate.draws import EVALUATION, Draw, Kept, Said
from marsrl.trainer.evaluate.score import Scorer
from marsrl.trainer.runs.directory import RunDirectory, write_json


def draws(right: float, problems: range, seed: int, data_set: str = "") -> list[Draw]:
    """Return two draws of each problem, whose difficulty is the same in all runs."""
    rng, drawn = random.Random(seed), []
    for i in problems:
        ease = random.Random(f"ease {i}").random()
        for _ in range(2):
            alone, system = (float(rng.random() < min(1.0, ease * 2 * rate)) for rate in (0.5, right))
            said = [Said(correct=value, answer=str(value)) for value in (system, alone)]
            drawn.append(Draw(of=data_set, problem=f"p{i}", question=f"q{i}", system=said[0], alone=said[1], calls=[]))
    return drawn


def keep(folder: Path, drawn: list[Draw]) -> Path:
    with Kept(folder) as kept:
        for i, draw in enumerate(drawn):
            kept.draws.add(str(i), draw.model_dump(mode="json"))
    write_json(folder / EVALUATION, Scorer([AgentSpec("solver")], {}, {}).evaluation(drawn, {}).model_dump(mode="json"))
    return folder


def gap(one: Path, other: Path, row: str = "system") -> Difference:
    found = difference(read_compared(one), read_compared(other), row)
    assert found is not None
    return found


def shown(*runs: Path, page: Path | None = None) -> str:
    """Return the terminal output."""
    compare([str(run) for run in runs], str(page) if page else None, Console(file=(text := io.StringIO()), width=200))
    return text.getvalue()


def test_a_paired_difference_is_over_the_problems_that_both_have(tmp_path: Path) -> None:
    worse = keep(tmp_path / "a", draws(0.3, range(200), 1))
    better = keep(tmp_path / "b", draws(0.6, range(50, 250), 2))
    found = gap(worse, better)
    assert found.num_problems == 150 and found.is_clear and 0.1 < found.low < found.mean < found.high < 0.4
    back = gap(better, worse)
    assert (back.mean, back.low, back.high) == pytest.approx((-found.mean, -found.high, -found.low)) and back.is_clear
    assert not gap(worse, better, "alone").is_clear  # both systems have the same Solver
    same = gap(worse, worse)
    assert (same.mean, same.low, same.high) == (0, 0, 0) and not same.is_clear
    others = read_compared(keep(tmp_path / "c", draws(0.5, range(900, 920), 3)))
    assert difference(read_compared(worse), others, "system") is None
    # No difference is given, because Verifier1 did not play every problem.
    assert difference(read_compared(worse), read_compared(better), "verifier1") is None
    assert "(one problem, no interval)" in str(gap(worse, keep(tmp_path / "f", draws(0.5, range(7, 8), 1))))
    assert Difference(0.5, 0.1, 0.9, 2).is_clear
    few, more = (
        gap(*(keep(tmp_path / f"{n}-{right}", draws(9e9 * right, range(n), 1)) for right in (0, 1))) for n in (2, 9)
    )
    # The same gap on every problem is no proof if there are only two.
    assert few.mean == more.mean == few.high == more.high == 1 and more.is_clear and few.low < 0 < more.low < 1
    # Both runs share the difficulty of each problem, so the interval of their difference is narrower than for independent runs,
    # where it is sqrt(2) times as wide as one run's.
    one, other = (keep(tmp_path / name, draws(0.5, range(200), seed)) for name, seed in (("d", 1), ("e", 2)))
    system, pair = read_compared(one).last.system, gap(one, other)
    assert pair.high - pair.low < 1.3 * (system.high - system.low)
    # Rows of all data sets, and of one. Problems whose answers were not judged do not count.
    math, qa, others = (draws(0.5, range(k, k + 4), 1, of) for k, of in ((0, "math"), (4, "qa"), (8, "qa")))
    unknown = [draw.model_copy(update={"system": Said(correct=None), "alone": None}) for draw in others]
    sets, rows = keep(tmp_path / "g", [*math, *qa[2:], *unknown]), ("system", "alone", "math/system", "qa/alone")
    assert [gap(sets, sets, row).num_problems for row in rows] == [7, 7, 4, 3]


def test_only_settings_that_differ_are_listed(tmp_path: Path) -> None:
    runs = [keep(tmp_path / name, draws(0.5, range(4), 0)) for name in ("a", "b")]
    for run, rate in zip(runs, (1e-5, 2e-5), strict=True):
        settings = {"run": {"seed": 3, "name": run.name}, "policies": {"main": {"optimizer": {"lr": rate}}}}
        RunDirectory(run).write_config(settings | ({"data": {"train": "<b>x"}} if run.name == "b" else {}))
    told = shown(*runs, page=tmp_path / "page.html").partition("settings that differ")[2]
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in told.splitlines() if line.startswith("│")]
    assert rows == [["policies.main.optimizer.lr", "1e-05", "2e-05"], ["data.train", "not set", "<b>x"]]
    found = answers_in(tmp_path / "page.html")["compare"]["settings"]
    assert found == {"policies.main.optimizer.lr": ["1e-05", "2e-05"], "data.train": ["not set", "<b>x"]}
    # A setting that changed when the run was resumed, in more than nine files.
    runs = [keep(tmp_path / name, draws(0.5, range(4), 0)) for name in ("c", "d")]
    for run in runs:
        RunDirectory(run).write_config({"run": {"steps": 200}})
    RunDirectory(runs[1]).checkpoint(9).mkdir(parents=True)
    for steps in (22, *range(30, 40)):
        RunDirectory(runs[1]).write_config({"run": {"steps": steps}})
    assert "then 39" in shown(*runs)
    values = side_by_side([read_compared(run) for run in runs], ["c", "d"])["settings"]
    assert values == {"run.steps": ["200", "200, then 22, then " + ", then ".join(map(str, range(30, 40)))]}


def test_runs_are_compared_in_a_terminal_and_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for k, name in enumerate(("one", "two")):
        path = make_run(tmp_path / name).path.rename(tmp_path / f"run {name}")
        for step in (0, 3, 5):
            keep(RunDirectory(path).evaluation(step), draws(0.2 + 0.1 * step * (1 + k), range(55 + step), step + k))
        paths.append(str(path))
    assert cli.main(["compare", *paths, "--html", str(tmp_path / "compare.html")]) == 0
    shown = capsys.readouterr().out
    assert "run one" in shown and "run two" in shown and "system" in shown and "[+0." in shown
    course = [line for line in shown.splitlines() if " 0.0" in line and "│" in line]
    assert len(course) == 6, shown  # three evaluations per run, each with its hours
    compared = answers_in(tmp_path / "compare.html")["compare"]
    assert compared["names"] == ["run one", "run two"] and {len(row["cells"]) for row in compared["rows"]} == {2}
    titles = {"system: share right", "alone: share right", "reward, mean of all agents"}
    assert {chart["title"] for chart in compared["charts"]} == titles
    for chart in compared["charts"]:
        for curve in chart["curves"]:
            assert len({len(curve[name]) for name in ("step", "tokens", "hours", "mean", "low", "high")}) == 1
            assert None not in curve["mean"] and (None in curve["low"]) == chart["title"].startswith("reward")
    cell = compared["rows"][-1]["cells"][1]
    assert (cell["num_problems"], cell["is_clear"], cell["is_better"]) == (60, True, True)  # last evaluation
    run = read_compared(Path(paths[0]))
    assert [place.step for place, _ in run.evaluations] == [0, 3, 5]
    (first, middle, last) = (place for place, _ in run.evaluations)
    assert (first.tokens, middle.tokens, last.tokens) == (3000, 12_000, 18_000)
    assert 3.9 * 3 < middle.hours * 3600 < last.hours * 3600
    back = side_by_side([read_compared(Path(path)) for path in reversed(paths)], compared["names"])["rows"][-1]["cells"]
    assert [(cell["is_clear"], cell["is_better"]) for cell in back] == [(False, False), (True, False)]
    assert names_of([Path("/r/a/x"), Path("/r/b/x"), Path("/r/y"), Path("/r/y")]) == ["a/x", "b/x", "/r/y", "/r/y"]


def test_hostile_names_and_answers_stay_text(tmp_path: Path) -> None:
    attack = ATTACK.replace("/", "∕").replace("\x00", "").replace("\ud800", "")[:120] + "\u202e\x1b"
    hostile = [
        draw.model_copy(update={"of": attack, "problem": attack, "system": Said(correct=1.0, answer=attack)})
        for draw in draws(0.5, range(4), 1)
    ]
    paths = [keep(tmp_path / f"{attack} {k}", hostile) for k in range(2)]
    for path, value in zip(paths, ("a", attack), strict=True):
        RunDirectory(path).write_config({"data": {"train_key": value}})
    assert not set(shown(*paths, page=tmp_path / "page.html")) & set("\x1b\u202e")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert text.count("<script>") == 7 and "<img src=http" not in text and "\\u27e8U+202E\\u27e9" in text
    assert not set(text) & set("\x1b\u202e") and "1337" not in text


def test_what_cannot_be_compared_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = keep(tmp_path / "a", draws(0.5, range(4), 1))
    (tmp_path / "none").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / EVALUATION).write_text("{}")
    for others, reason in (
        (["none"], "is neither a run (it has no config.yaml) nor an evaluation"),
        ([], "expected two runs or more"),
        (["b"], "is not an evaluation of this version"),
        ([str(make_run(tmp_path / "run").path)], "nothing was evaluated there yet"),
    ):
        assert cli.main(["compare", str(there), *(str(tmp_path / other) for other in others)]) == 2
        assert reason in capsys.readouterr().err
