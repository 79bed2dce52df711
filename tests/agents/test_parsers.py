"""Parsers of completions, ours and those that follow published code."""

import time
from collections.abc import Callable
from functools import partial

import pytest

from marsrl.rollout.agents.parsers import (
    boxed_answer,
    chain_answer,
    chain_verdict,
    compat_report,
    compat_verdict,
    drmas_is_valid,
    drmas_report,
    drmas_verdict,
    route,
    strict_verdict,
    tagged,
    tagged_verdict,
    visible,
)

answer_tag = partial(tagged, "answer")
READ: list[tuple[Callable[[str], object], str, object]] = [
    # the text after the last closed thought
    (visible, "plain", "plain"),
    (visible, "<think>a</think>\n\nshown", "shown"),
    (visible, "a</think>shown", "shown"),  # the template opened the thought
    (visible, "<think>a</think>b<think>c</think>d", "d"),
    (visible, "<think>cut off", None),
    (partial(visible, starts_in_thought=True), "still thinking, Verdict: correct", None),
    # a verdict on a line of its own
    (strict_verdict, "Findings: none\nVerdict: correct", True),
    (strict_verdict, "**Verdict: correct**", True),
    (strict_verdict, "**Verdict:** wrong.", False),
    (strict_verdict, "Verdict: wrong\nOn reflection that holds.", False),
    (strict_verdict, "Verdict: incorrect", None),
    (strict_verdict, "Verdict: correct|wrong", None),
    # a substring, as the script published with MarsRL
    (compat_verdict, "Correctness: incorrect", True),  # the published slip
    (compat_verdict, "**Correctness**: wrong", False),
    (compat_verdict, "<think>this looks correct", True),  # an unfinished thought is read
    (compat_report, "step 2 fails\n**Correctness**: wrong", "step 2 fails"),
    # the last box whose braces balance
    (boxed_answer, r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (boxed_answer, r"\boxed{7} and \boxed{unclosed", "7"),
    (boxed_answer, r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (boxed_answer, r"\boxed{}", None),
    # the word after the last key
    (chain_answer, "Answer: 3 agree Answer: 5", "5"),
    (chain_answer, "Answer: claim", None),
    (chain_verdict, "got 3 said 3 Verdict: correct", True),
    (chain_verdict, "Verdict: wrong Verdict: 3", None),
    # the last whole tag
    (answer_tag, "<answer> Lima </answer>", "Lima"),
    (answer_tag, "<answer>a</answer> or <ANSWER>b</Answer> .", "b"),
    (answer_tag, "<answer>a</answer> <answer>b", "a"),
    (answer_tag, "<answer>a <answer>b</answer>", "b"),
    (answer_tag, "İ<answer>a</answer>", "a"),
    (route, "<verify>yes</verify>", True),
    (route, "<verify>no</verify> then <verify>yes</verify>", True),
    (route, "<verify>yes, maybe</verify>", None),
    # all that was said, as Dr. MAS's code hands it on
    (drmas_report, "<think>x</think> a <verify> reject\n</verify> b", "<think>x</think> a <verify>reject</verify> b"),
]


@pytest.mark.parametrize(("read", "text", "found"), READ)
def test_a_completion_says_what_stands_in_its_grammar_and_else_nothing(
    read: Callable[[str], object], text: str, found: object
) -> None:
    assert read(text) == found


@pytest.mark.parametrize(
    ("report", "ours", "published", "is_valid"),
    [
        ("fine <verify>approve</verify>", True, True, True),
        ("no <verify>\n reject </verify> so", False, False, True),  # the first tag's white space is taken off
        ("<verify>Reject</verify>", False, True, True),  # in small letters alone
        ("<verify>reject</verify> no: <verify>approve</verify>", True, True, True),
        ("<verify>approve</verify> no: <verify> reject </verify>", False, True, True),
        ("<verify>reject", None, True, False),  # cut off
        ("<think><verify>reject</verify></think> I say <verify>approve</verify>", True, True, True),
        ("\u4e0d <verify>reject</verify>", False, False, False),  # Chinese is a failure of format
    ],
)
def test_a_verdict_in_a_tag_is_read_by_us_and_as_the_published_code_does(
    report: str, ours: bool | None, published: bool, is_valid: bool
) -> None:
    assert (tagged_verdict(report), drmas_verdict(report), drmas_is_valid(report)) == (ours, published, is_valid)


@pytest.mark.parametrize(
    "unit",
    [
        *("\\boxed{", "*", "Verdict: correct*", "<think>", "\n", "Verdict:", "{", "Answer: ", "<verify> ", "<answer>"),
        "<answer>x</answer>",
    ],
)
def test_hostile_repetition_is_read_in_linear_time(unit: str) -> None:
    text = unit * (400_000 // len(unit))
    start = time.process_time()
    for read in {read for read, _, _ in READ} | {tagged_verdict, drmas_verdict, drmas_is_valid}:
        read(text)
    assert time.process_time() - start < 20  # seconds; quadratic work would take hours
