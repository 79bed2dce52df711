r"""Equality of mathematical answers, by kind. answer_pairs.tsv has pairs of reference and answer, and whether they are equal.

Users of other graders reported many of them: huggingface/Math-Verify#10, #14, #25, #26, #37, #41, #60, #64, #71 and #82.
"""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import pytest

from marsrl.rollout.agents.answer_latex import joined, normal, one_form, tokens
from marsrl.rollout.agents.same_answer import answer_key, same_answer

HERE = Path(__file__).parent
DATA = HERE.parents[2] / "shared/data"
with (HERE / "answer_pairs.tsv").open(encoding="utf-8", newline="") as file:
    PAIRS = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
KINDS = sorted({pair["kind"] for pair in PAIRS})


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_every_kind_are_judged_right(kind: str) -> None:
    pairs = [(pair["reference"], pair["answer"], pair["same"] == "yes") for pair in PAIRS if pair["kind"] == kind]
    assert [pair for pair in pairs if same_answer(*pair[:2]) is not pair[2]] == []


def test_every_answer_is_the_same_as_itself() -> None:
    texts = {pair[side] for pair in PAIRS for side in ("reference", "answer")}
    assert [text for text in texts if not (same_answer(text, text) and same_answer(text, f"${text}$"))] == []


@pytest.mark.parametrize("mark", ["\u200b", "\u2060", "\ufeff", "\u00ad", "\u200e"])
@pytest.mark.parametrize("answer", ["42", "Lima", "x^2+1", "(C)"])
def test_invisible_characters_change_no_answer(mark: str, answer: str) -> None:
    for changed in (mark + answer, answer + mark, answer[:1] + mark + answer[1:]):
        assert (
            same_answer(answer, changed) and same_answer(changed, answer) and answer_key(changed) == answer_key(answer)
        )


ONE_WAY = [  # (reference, answer) whose result changes if the two swap roles
    ("0.5", "0.5\\%"),
    ("1", "1%"),
    ("1\\%", "1"),
    ("25", "x^2+y^2=25"),
    ("3x+4y=14", "14"),  # a line, whose value is not 14
    ("5", "a+b=5"),
    ("x^2+y^2=25", "25"),
]


def test_roles_can_be_swapped_but_for_these_pairs() -> None:
    one_way = [
        (pair["reference"], pair["answer"])
        for pair in PAIRS
        if same_answer(pair["reference"], pair["answer"]) is not same_answer(pair["answer"], pair["reference"])
    ]
    assert sorted(one_way) == ONE_WAY


def test_answers_with_one_key_are_the_same_answer() -> None:
    keys = [(pair, answer_key(pair["reference"]) == answer_key(pair["answer"])) for pair in PAIRS]
    assert [pair for pair, is_one_key in keys if is_one_key and pair["same"] == "no"] == []
    assert sum(is_one_key for _, is_one_key in keys) > 90


@pytest.mark.parametrize(
    "answers",
    [
        ["3 \\times 10^8", "3e8", "300000000", "300,000,000", "3\\cdot10^{8}", "3×10⁸"],
        ["\\frac{1}{3}", "0.\\overline{3}", "\\dfrac13", "1/3", "0.333\\ldots"],
        ["28\\%", "28 %", "28 percent", "28\\text{ percent}"],
        ["5 km", "5 kilometers", "5000 m", "5\\text{ km}"],
        ["x^{2}+\\frac{1}{2}", "x^2 + \\dfrac12", "X^2+\\tfrac{1}{2}"],
    ],
)
def test_one_value_in_several_notations_has_one_key(answers: list[str]) -> None:
    assert len({answer_key(answer) for answer in answers}) == 1


def test_no_two_constants_of_a_list_are_mistaken() -> None:
    constants = [
        "0", "1", r"1-3^{-60}", "3^{-40}", r"e^{-80}", r"10^{-20}\pi", r"\pi^{50}", r"\frac{7}{10^{30}}", r"6.63 \times 10^{-34}",
        r"\frac{2019!}{2018!}", r"\left(\frac{364}{365}\right)^{22}", r"\frac{1}{\binom{52}{5}}", "(10^9)!",
        "10^{10^{10}}", "10^{10^{11}}",
    ]  # fmt: skip
    assert [pair for pair in itertools.permutations(constants, 2) if same_answer(*pair)] == []


LONG = 2000
HOSTILE = [
    "", " " * LONG, "(" * LONG, "{" * 1000 + "x" + "}" * 1000, "\\{" * 900 + "\\}" * 900, "|" * LONG,
    "f(" * 400 + "x" + ")" * 400, "\\frac" * 400, "\\boxed{" * 300, "\\text{" * 300 + "}" * 300,
    "\\begin{pmatrix}" + "1&" * 900 + "1\\end{pmatrix}",
    "9^" * 900 + "9", "-" * LONG + "1", "9" + "!" * LONG, "1," * 1000, "1 " * 1000, "\\pm 1" * 400, "1\\pm 2," * 250, "²" * LONG,
    "x=" * 900 + "1", "x<" * 900 + "1", "°" * LONG, "5 " + "km " * 600, "5 km" + "^2" * 900, "9" * LONG + "^{" + "9" * 30 + "}",
    "10^{10^{10^{10}}}", "\\binom{10^{9}}{5\\cdot 10^8}", "(10^{25})!", "\\sin(10^{10^{9}})", "e^{e^{e^{e^{e}}}}",
    "\\lfloor 10^{10^{9}}\\rfloor", "__import__('os').system('true')",
]  # fmt: skip


@pytest.mark.parametrize(
    ("start", "repeated"),
    [("1", ",234"), ("", "\\$"), ("", "€"), ("5 ", "trillion "), ("5 ", "hundredths "), ("5 ", "km ")],
)
def test_long_answers_have_keys(start: str, repeated: str) -> None:
    """Votes are counted in the trainer's process, where an exception would end the run."""
    answer = start + repeated * 4000
    assert answer_key(answer) == answer_key(f"\\boxed{{{answer}}}") != answer_key(answer + repeated)


@pytest.mark.parametrize(
    "reference", ["7", r"\frac{7}{10^{30}}", "x^2+1", "(1,2)", "x>2", "1, 2, 3", "Lima", "7 km", "3.14159", "7\\%"]
)
def test_hostile_answers_are_wrong_and_cheap(reference: str) -> None:
    assert [answer[:40] for answer in HOSTILE if same_answer(reference, answer)] == []
    assert all(same_answer(answer, answer) for answer in HOSTILE)


def test_an_unreadable_reference_is_compared_as_text() -> None:
    reference = r"\oint_{\gamma} f \, dz = 0"
    assert same_answer(reference, r"\oint_\gamma f dz=0") and not same_answer(reference, "0")
    assert joined(normal(tokens(one_form(r"\left( \frac12 \right)^10")))) == r"(\frac {1 }{2 })^{10 }"


PUBLIC = [
    r"\left( 3, \frac{\pi}{2} \right)", r"11,\! 111,\! 111,\! 100", r"\{1\pm\sqrt{5},-2\}", r"864 \mbox{ inches}^2", "4210_{5}",
    r"\frac{270}7\text{ degrees}", r"x \in [-2,7]", r"\$32,\!348", r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}",
    r"15\mbox{ cm}^2", r"1 \pm \sqrt{19}",
]  # fmt: skip


def altered(reference: str) -> str:
    """Return the reference with its first digit changed, or plus 1 if it has no digit."""
    at = next((i for i, character in enumerate(reference) if character.isdigit()), None)
    return f"{reference}+1" if at is None else f"{reference[:at]}{(int(reference[at]) + 1) % 10}{reference[at + 1 :]}"


def test_public_references_equal_themselves_and_nothing_altered() -> None:
    references = PUBLIC
    if (file := DATA / "math500.jsonl").exists():
        references = [*PUBLIC, *(json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines())]
    assert [
        each for each in references if not same_answer(each, f"\\boxed{{{each}}}".replace("\\frac", "\\dfrac"))
    ] == []
    assert [each for each in references if same_answer(each, altered(each))] == []
