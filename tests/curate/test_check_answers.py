"""`marsrl check-answers`: how it alters reference answers, and which errors of a judge it finds."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marsrl.commands import cli
from marsrl.commands.check_answers import alterations, forms, notations


def others(reference: str) -> dict[str, list[str]]:
    """Return altered answers by rule, without the two rules that apply to every reference."""
    found: dict[str, list[str]] = {}
    for rule, answer in alterations.of(reference, Random(0)):
        if rule not in ("a tiny constant", alterations.PLACEHOLDER):
            found.setdefault(rule, []).append(answer)
    return found


ALTERED: list[tuple[str, str, list[str]]] = [
    ("3^{-40}", "an exponent changed", ["3^{-39}"]),
    (r"6.63 \times 10^{-34}", "an exponent changed", [r"6.63 \times 10^{-33}"]),
    ("28\\%", "another magnitude", ["2800\\%"]),
    ("5", "an element added", ["5, 987654321"]),
    ("4", "a factor more", [r"4\sqrt{2}", r"4\sqrt(2)"]),
    (r"\frac{3}{7}", "numerator and denominator swapped", [r"\frac{7}{3}"]),
    (r"2\mathbf{i}+3\mathbf{j}", "a sign flipped", [r"2\mathbf{i}-3\mathbf{j}"]),
    (r"2\mathbf{i}+3\mathbf{j}", "a part alone", ["2"]),
    (r"1, 2, \ldots, n", "elements dropped", ["1", r"1, 2, \ldots"]),
    (r"\{1, 2, 3\}", "elements dropped", ["1", r"\{1, 2\}"]),
    (r"x=2 \text{ or } x=3", "elements dropped", ["x=2"]),
    ("1331 and 1728", "elements dropped", ["1331"]),
    ("(1,2)", "a tuple reversed", ["(2, 1)"]),
    ("(1,2)", "other brackets", [r"\{1, 2\}"]),
    (r"[2,\infty)", "other brackets", [r"(2, \infty)"]),
    (r"x \leq 3", "another relation", [r"x \geq  3", "x <  3"]),
    (r"\gcd(a,b)=2", "a digit changed", [r"\gcd(a,b)=3"]),
    ("y''+2y=0", "a prime dropped", ["y'+2y=0"]),
    (r"n \equiv 2 \pmod 5", "another modulus", [r"n \equiv 2 \pmod 7"]),
    (
        r"\begin{cases} x & x>2 \\ y & x<2 \end{cases}",
        "rows swapped",
        [r"\begin{cases} y & x>2 \\ x & x<2 \end{cases}"],
    ),
    ("3 kJ", "another unit", ["3 J"]),
    (r"25^\circ\mathrm{C}", "another unit", [r"25^\circ\mathrm{F}"]),
    ("12 cats", "another unit", ["12 zebras"]),
    ("x^2+3", "a variable renamed", ["w^2+3"]),
    (r"\text{yes}", "other words", [r"\text{no}"]),
    ("Lima", "other words", [r"\text{not Lima}"]),
]


@pytest.mark.parametrize(("reference", "rule", "answers"), ALTERED)
def test_an_alteration_is_another_answer(reference: str, rule: str, answers: list[str]) -> None:
    assert [" ".join(answer.split()) for answer in others(reference)[rule]] == [
        " ".join(each.split()) for each in answers
    ]


@pytest.mark.parametrize(
    ("reference", "rules"),
    [
        (r"\sin(2\pi)", {"a digit changed", "a sign flipped", "one more"}),  # sin(n pi) is 0 for every integer n
        (r"2 \cdot 0 + 3x", {"a digit changed", "an exponent changed"}),
        ("1^{7}", {"a digit changed", "an exponent changed"}),
        (r"\binom{5}{2}", {"a digit changed"}),  # equals 10, as 3 of 5 does
        (r"2 \pm 3", {"a sign flipped"}),
        ("(-1)^{n+1}", {"a sign flipped"}),
        (r"e^{2i\pi}", {"a digit changed"}),
        (r"(1,5) \cup (2,6)", {"a digit changed"}),
        (r"\lfloor 2.3 \rfloor", {"a digit changed"}),
        ("x = 5", {"a variable renamed", "a part alone"}),
        ("2x = 0", {"a digit changed"}),
        ("2!", {"a part alone"}),
        ("0", {"a sign flipped", "another magnitude", "a factor more"}),
        ("2, 2", {"elements dropped"}),
        ("C", {"a digit changed", "one more", "a variable renamed"}),
        (r"\frac{3}{3}", {"numerator and denominator swapped"}),
    ],
)
def test_alterations_that_may_keep_the_meaning_are_left_out(reference: str, rules: set[str]) -> None:
    assert not rules & set(others(reference))


NOTATIONS: list[tuple[str, str, list[str]]] = [
    (r"\frac{1}{2}", "a decimal", ["0.5"]),
    (r"\frac{1}{3}", "a decimal", [r"0.\overline{3}"]),
    ("-7/6", "a decimal", [r"-1.1\overline{6}"]),
    ("0.5", "another fraction", [r"\dfrac{1}{2}", "1/2", r"\frac{3}{6}"]),
    (r"10,\!080", "thousands separators", ["10080"]),
    ("12345", "thousands separators", ["12,345", "12{,}345", r"12\,345"]),
    (r"3 \times 10^{8}", "scientific notation", ["3e8", "300000000"]),
    ("2^{100}", "a power written out", ["1267650600228229401496703205376"]),
    ("3^{-40}", "a power written out", [r"\frac{1}{3^{40}}"]),
    (r"28\%", "a percentage", ["28%", r"28 \%", "28 percent", "28", "0.28"]),
    (r"5\text{ km}", "a unit written otherwise, or left out", ["5", "5 km", r"5\,\mathrm{km}"]),
    (r"\{1,2\}", "another order", [r"\{2, 1\}"]),
    (r"x=2 \text{ or } x=3", "another order", [r"x=3 \text{ or } x=2"]),
    (r"\emptyset", "another empty set", [r"\varnothing"]),
    (r"[2,\infty)", "an interval as an inequality", [r"x \geq 2"]),
    (
        r"(-\infty,2)\cup(2,\infty)",
        "an interval as an inequality",
        [r"\mathbb{R}\setminus\{2\}", r"x < 2 \text{ or } x > 2"],
    ),
    ("(C)", "a choice's letter", ["c", "C.", r"\text{C}"]),
]


@pytest.mark.parametrize(("reference", "rule", "answers"), NOTATIONS)
def test_a_notation_is_the_same_answer(reference: str, rule: str, answers: list[str]) -> None:
    assert [answer for found, answer in notations.of(reference) if found == rule] == answers


def test_an_ordered_pair_has_one_order() -> None:
    assert not [answer for rule, answer in notations.of("(1,2)") if rule == "another order"]


@pytest.mark.parametrize(
    "text", ["(" * 499, "1," * 249, "9" * 499, r"\frac{" * 83, "x+" * 249, "1 a" * 166, "\\" * 499, "'" * 499]
)
def test_hostile_references_are_read(text: str) -> None:
    assert next(notations.of(text)) == (notations.ITSELF, text) and list(alterations.of(text, Random(0)))
    longer = text * 2
    assert list(notations.of(longer)) == [(notations.ITSELF, longer)]
    assert {rule for rule, _ in alterations.of(longer, Random(0))} == {alterations.PLACEHOLDER}


@given(st.fractions(max_denominator=500), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_numbers_keep_their_value_or_lose_it(value: Fraction, seed: int) -> None:
    reference = (
        str(value) if seed % 2 or value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    )
    reference = reference.replace(r"\frac{-", r"-\frac{")
    plain = [forms.number(forms.plain(answer)) for _, answer in notations.of(reference)]
    assert {each for each in plain if each is not None} == {value} and plain[0] == value
    altered = [forms.number(answer) for _, answer in alterations.of(reference, Random(seed))]
    assert value not in altered and sum(each is not None for each in altered) >= 2


FAULTY = r"""
import re
import time
from marsrl.rollout.tasks.own_task import OwnTask

class Faulty(OwnTask):
    "Rewards answers with the reference's first number, and tiny ones. Hangs at 13; fails at other notations of 13."

    def reward(self, problem, answer):
        if problem.answer == "13":
            time.sleep(600 * (answer == "13"))
            raise ValueError
        if answer == problem.answer or "10^{30}" in answer:
            return 1.0
        wanted, said = (re.search(r"\d+", text) for text in (problem.answer, answer))
        return float(wanted is not None and said is not None and wanted[0] == said[0])
"""


def write(name: str, *answers: object) -> None:
    rows = ({"question": f"{place}?", "answer": answer} for place, answer in enumerate(answers))
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows) + "no row\n")


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> Path:
    os.chdir(tmp_path)
    return tmp_path


def test_misjudged_answers_are_listed_by_line_and_rule(capsys: Any) -> None:
    Path("my_task.py").write_text(FAULTY)
    write("refs.jsonl", r"2\mathbf{i}+3\mathbf{j}", "1/2", r"\{4, 5\}", "proof", "7 km", "13")
    words = ["refs.jsonl", "task=my_task.py:Faulty", "task_options.timeout_s=1", "task_options.workers=1"]
    assert cli.main(["check-answers", *words, "--out", "found.jsonl"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("6 of 6 problems, ") and "; lines without a problem: 1" in shown.splitlines()[0]
    misjudged: dict[str, dict[str, list[str]]] = {}
    for row in map(json.loads, Path("found.jsonl").read_text().splitlines()):
        assert row["reward"] == (None if row["reference"] == "13" else float(not row["is_right"]))
        misjudged.setdefault(row["id"], {}).setdefault(row["rule"], []).append(row["answer"])
    assert misjudged["refs.jsonl:1"]["a part alone"] == ["2"] and "a sign flipped" in misjudged["refs.jsonl:1"]
    assert misjudged["refs.jsonl:2"]["a decimal"] == ["0.5"] and "another fraction" in misjudged["refs.jsonl:2"]
    assert misjudged["refs.jsonl:3"]["elements dropped"] == ["4", r"\{4\}"]
    assert misjudged["refs.jsonl:3"]["another order"] == [r"\{5, 4\}"]
    assert misjudged["refs.jsonl:4"] == {"a tiny constant": [alterations.TINY], alterations.PLACEHOLDER: ["proof"]}
    assert misjudged["refs.jsonl:5"]["another unit"] == ["7 m"]
    # The judge fails on this reference itself, so no other answers are tried.
    assert misjudged["refs.jsonl:6"] == {notations.ITSELF: ["13"]}
    last_column = [line[-10:] for line in shown.splitlines() if line.startswith("  ") and line[-10:].strip().isdigit()]
    assert sum(map(int, last_column)) == 3  # trials that were not judged; all are of line 6
    assert all("a tiny constant" in rules for uid, rules in misjudged.items() if uid != "refs.jsonl:6")
    assert (
        "refs.jsonl:4: 2 misjudged, reference proof\n  accepted: " in shown
        and "  not judged: 13 (the reference itself): " in shown
    )


def test_a_judge_of_texts_is_tried_with_texts(capsys: Any) -> None:
    rows = [{"question": "?", "golden_answers": each} for each in (["Lima", "not Lima"], ["12 cats"], ["yes"], ["C"])]
    Path("qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["check-answers", "qa.jsonl", "task=qa", "--problems", "3", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("3 of 4 problems, ") and "misjudged" not in shown
    Path("shared.jsonl").write_text(
        "".join(json.dumps({**rows[0], "golden_answers": ["N/A"]}) + "\n" for _ in range(20))
    )
    assert cli.main(["check-answers", "shared.jsonl", "task=qa"]) == 1
    shown = capsys.readouterr().out
    assert (
        "20 of 20 problems have misjudged answers" in shown
        and "warning: data.train: one answer is right for many" in shown
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("a.jsonl b.jsonl", "expected one file, found a.jsonl, b.jsonl"),
        ("a.jsonl task=arithmetic", "task=arithmetic (the default) generates its problems; did you mean task=math?"),
        ("task=math", "data.train has no problem with a reference answer"),
        ("missing.jsonl", "missing.jsonl does not exist"),
    ],
)
def test_files_that_cannot_be_tried_are_rejected(words: str, says: str, capsys: Any) -> None:
    assert cli.main(["check-answers", *words.split()]) == 2
    assert says in capsys.readouterr().err
