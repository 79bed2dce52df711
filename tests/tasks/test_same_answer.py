"""Equality of answers: a table by hand. right: answers that are the reference; wrong: answers that are not."""

import pytest

from marsrl.rollout.agents.same_answer import answer_key, same_answer

# reference: (right answers, wrong answers)
TABLE: dict[str, tuple[list[str], list[str]]] = {
    # words, names
    "Lima": (["lima", " LIMA ", r"\text{Lima}", "**Lima**", "Lima.", '"Lima"', r"$\textbf{Lima}$"], ["Mail", "Li ma", "5", ""]),
    r"\text{Evelyn}": (["Evelyn", r"\text{ evelyn }"], [r"\text{Navin}", "E"]),
    "C\u00f4te d'Ivoire": (["C\u00f4te d\u2019Ivoire", "\u201cC\u00f4te d'Ivoire\u201d", "'C\u00f4te d'Ivoire'"], ["Cote"]),
    "South  Korea": (["South Korea", r"South\ Korea", "south~korea"], ["Korea", "Korea South"]),
    "Z\u00fcrich": (["Zu\u0308rich", "z\u00dcRICH"], ["Zurich"]),
    "\u6771\u4eac": (["\u6771\u4eac"], ["\u4eac\u6771"]),
    "\u03a9\u03bc\u03ae\u03b3\u03b1": (["\u03c9\u03bc\u03ae\u03b3\u03b1"], ["\u03b1\u03bc\u03ae\u03b3\u03c9"]),
    "no solution": (["No solution."], ["0", "solution no"]),
    r"\text{Alice and Bob}": (["Alice and Bob"], ["Bob and Alice"]),
    "H2O": (["h2o"], ["OH2", "2HO"]),
    # choices
    "C": (["(C)", "c", "C.", "C)", r"\textbf{(C)}", r"(C) 12\text{ cm}", "C: ellipse"], ["B", "(D)", "CD", "12"]),
    r"\text{(E)}": (["E", "(e)"], ["A", "(A) E"]),
    # dates and times
    "2024-01-15": (["2024-01-15"], ["2008", "2024-01-16", "15-01-2024"]),
    "01/02/2024": (["01/02/2024"], ["1/4048", "02/01/2024"]),
    "3:45 pm": (["3:45 PM"], ["3:45 am", "1/15"]),
    "5 May": (["5 may"], ["5 Yam", "5"]),
    # numbers
    "70": (["70.0", "+70", "070", r"\boxed{70}", "$70$", "70."], ["71", "-70", "7", "7 0 1"]),
    "1234": (["1,234", "1{,}234", "1234.00"], ["1.234", "12,34"]),
    "-0.5": (["-1/2", r"-\frac{1}{2}", r"-\dfrac12", "-.5"], ["0.5", "-5"]),
    r"\frac{1}{3}": (["1/3", "2/6"], ["0.3333", "1/4"]),
    r"1\frac12": (["3/2", "1.5"], ["1/2"]),
    r"\sqrt{2}": ([r"2^{1/2}"], ["1.41", "2"]),
    r"\infty": (["infinity"], [r"-\infty", "0"]),
    "102": (["102.0"], ["10\u00b2", "10^2"]),
    "10\u00b2": (["100", "10^2"], ["102"]),
    "3\u00bd": (["3 1/2", "7/2", "3.5"], ["31/2"]),
    "-1 1/2": (["-1.5", "\u22123/2", "\u22121\u00bd"], ["-11/2", "-1/2", "-0.5"]),
    "10,000": ([r"10\,000", "10{,}000", r"10,\!000", "1e4"], [r"10\,00", "10"]),
    "101_2": (["101_{2}"], ["101_3", "100_2"]),
    # units
    "5 km": (["5", "5km", "5 kilometers", r"5\text{ km}"], ["5 m", "6 km", "5 km^2"]),
    "25 cm\u00b2": (["25", "25 cm^2", "25 square cm"], ["25 cm", "5"]),
    "12 cats": (["12", "12 Cats", r"12\text{ cats}", "12 cat"], ["12 tacs", "12 dogs", "11", "cats"]),
    r"36\pi \text{ cm}^2": ([r"36\pi", "36 pi"], ["36", r"36\pi \text{ cm}^3"]),
    "18": (["18 dollars", r"\$18", r"18\text{ eggs}"], ["18 million", r"18\text{ million}"]),
    "5 million": (["5 Million"], ["5", "5 noillim", "5 billion"]),
    r"864 \mbox{ inches}^2": (["864", "864 in^2", r"864\text{ square inches}"], ["864 cm^2", "865", "864 inches"]),
    r"90^\circ": (["90", "90 degrees", "90\u00b0"], ["91"]),
    r"10\%": (["0.1", "10"], ["100"]),
    r"\$5": (["5", r"\$5.00"], ["6"]),
    # mathematics
    "x+1": (["1+x", r"x + 1"], ["x-1", "1"]),
    "(x+1)^2": (["x^2+2x+1"], ["x^2+1"]),
    "x\u00b2": (["x^2", "x^{2}"], ["x2", "2x"]),
    r"2\pi": (["2pi", "2 \u03c0"], ["2ip", "2", "pi"]),
    "x": (["x"], ["y", "2x"]),
    # pairs, sets, intervals
    "(3,4)": (["(3, 4)"], ["(4,3)", "3"]),
    r"\{1,2,3\}": ([r"\{3,1,2\}", r"\{1, 2, 3\}"], [r"\{1,2\}", r"\{1,2,4\}"]),
    r"\{\text{red}, \text{blue}\}": ([r"\{blue, red\}"], [r"\{red\}", r"\{red, red\}", r"\{der, blue\}", "red, blue"]),
    "(1,2]": (["(1, 2]"], ["(1,2)", "[1,2]"]),
    r"(-\infty, 3)": ([r"(-\infty,3)"], [r"(-\infty,3]"]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reference", TABLE)
def test_answers_are_compared_as_the_kind_of_thing_that_the_reference_is(reference: str) -> None:
    right, wrong = TABLE[reference]
    found = {answer: same_answer(reference, answer) for answer in [reference, *right, *wrong]}
    assert found == {answer: answer not in wrong for answer in found}


def test_the_same_answers_have_one_vote_key_and_others_do_not() -> None:
    assert answer_key("0.5") == answer_key(r"\frac{1}{2}") == answer_key(" 1/2 ") == answer_key("$0.50$")
    assert answer_key("Lima") == answer_key(r"\text{LIMA}.") != answer_key("Mail")
    assert answer_key("-5") == answer_key("\u22125") and answer_key("10,000") == answer_key(r"10\,000") == answer_key(
        "10{,}000"
    )
    assert answer_key("C") == answer_key("(C)") == answer_key("(c)") != answer_key("(D)")
    assert answer_key("10\u00b2") != answer_key("102") and answer_key("x\u00b2") != answer_key("x2")
    assert answer_key("1/0") != answer_key("2/0") and answer_key("") == ""
