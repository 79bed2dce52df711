import time

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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("<think>a</think>\n\nshown", "shown"),
        ("a</think>shown", "shown"),  # the template opened the thought
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>cut off", None),
        ("<think>a</think>b<think>cut off", None),
        ("", ""),
    ],
)
def test_only_text_after_a_closed_thought_is_visible(text: str, shown: str | None) -> None:
    assert visible(text) == shown


def test_a_thought_that_the_prompt_opened_and_nobody_closed_shows_nothing() -> None:
    assert visible("still thinking, Verdict: correct", starts_in_thought=True) is None
    assert visible("done</think>x", starts_in_thought=True) == "x"


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        ("Findings: none\nVerdict: correct", True),
        ("Verdict: wrong", False),
        ("VERDICT : Wrong", False),
        ("**Verdict: correct**", True),
        ("**Verdict:** wrong.", False),
        ("Verdict: *correct*\n\n", True),
        ("Verdict: correct\nVerdict: wrong", False),
        ("Verdict: wrong\nOn reflection that holds.", False),
        ("Verdict: incorrect", None),
        ("Verdict: not correct", None),
        ("Verdict: correct or wrong?", None),
        ("I would say Verdict: correct", None),
        ("The solution is correct.", None),
        ("Verdict: correct|wrong", None),
        ("", None),
    ],
)
def test_a_strict_verdict_is_a_line_of_its_own(report: str, verdict: bool | None) -> None:
    assert strict_verdict(report) is verdict


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        ("Correctness: incorrect", True),  # the published slip
        ("**Correctness**: wrong", False),
        ("correct so far. Correctness: wrong", False),
        ("<think>this looks correct", True),  # an unfinished thought is read
        ("<think>correct</think>wrong", False),
        ("", False),
    ],
)
def test_compat_reads_a_substring_as_the_published_script_does(report: str, verdict: bool) -> None:
    assert compat_verdict(report) is verdict


def test_the_compat_report_is_empty_without_the_marker() -> None:
    assert compat_report("step 2 fails\n**Correctness**: wrong") == "step 2 fails"
    assert compat_report("step 2 fails\nVerdict: wrong") == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{7} and \boxed{unclosed", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {x^{2}}", "x^{2}"),
        (r"\boxed{}", None),
        ("no box", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


def test_chain_words_after_the_last_key_are_read() -> None:
    assert chain_answer("Answer: 3 agree Answer: 5") == "5"
    assert chain_answer("Answer: claim") is None
    assert chain_answer("Answer:") is None
    assert chain_verdict("got 3 said 3 Verdict: correct") is True
    assert chain_verdict("Verdict: wrong Verdict: 3") is None


@pytest.mark.parametrize(
    ("report", "tagged", "published", "is_valid"),
    [
        ("fine <verify>approve</verify>", True, True, True),
        ("no <verify>reject</verify>", False, False, True),
        ("no <verify>\n reject </verify> so", False, False, True),  # the first tag's white space is taken off
        ("nothing in tags", None, True, False),  # a missing tag approves
        ("<verify>maybe</verify>", None, True, True),
        ("<verify>Reject</verify>", False, True, True),  # in small letters alone
        ("<verify>reject</verify> no: <verify>approve</verify>", True, True, True),
        ("<verify>approve</verify> no: <verify>reject</verify>", False, True, True),  # approve anywhere
        ("<verify>approve</verify> no: <verify> reject </verify>", False, True, True),
        ("<verify>reject", None, True, False),  # cut off
        ("<think><verify>reject</verify></think> I say <verify>approve</verify>", True, True, True),
        ("\u4e0d <verify>reject</verify>", False, False, False),  # Chinese is a failure of format
        ("</verify><verify>reject", None, True, True),
    ],
)
def test_a_verdict_in_a_tag_is_read_by_us_and_as_the_published_code_does(
    report: str, tagged: bool | None, published: bool, is_valid: bool
) -> None:
    assert tagged_verdict(report) is tagged
    assert (drmas_verdict(report), drmas_is_valid(report)) == (published, is_valid)


def test_the_published_code_hands_on_all_that_was_said() -> None:
    assert (
        drmas_report("<think>x</think> a <verify> reject\n</verify> b")
        == "<think>x</think> a <verify>reject</verify> b"
    )
    assert drmas_report("no tag") == "no tag"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer> Lima </answer>", "Lima"),
        ("<answer>a</answer> or <ANSWER>b</Answer> .", "b"),
        ("<answer>a</answer> <answer>b", "a"),
        ("<answer>a <answer>b</answer>", "b"),
        ("a</answer>", None),
        ("<answer>a", None),
        ("<answer> \n</answer>", None),
        ("<answer></answer><answer>b</answer></answer>", "b"),
        ("<answer\n>a</answer>", None),
        ("İ<answer>a</answer>", "a"),
    ],
)
def test_the_last_whole_tag_is_read(text: str, found: str | None) -> None:
    assert tagged("answer", text) == found


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("<verify>yes</verify>", True),
        ("<verify> NO </verify>", False),
        ("<verify>no</verify> then <verify>yes</verify>", True),
        ("yes", None),
        ("<verify>yes, maybe</verify>", None),
        ("<verify></verify>", None),
    ],
)
def test_a_route_is_yes_or_no(text: str, way: bool | None) -> None:
    assert route(text) is way


@pytest.mark.parametrize(
    "unit",
    [
        "\\boxed{",
        "*",
        "Verdict: correct*",
        "<think>",
        "\n",
        "Verdict:",
        "{",
        "Answer: ",
        "<verify> ",
        "<answer>",
        "<answer>x</answer>",
    ],
)
def test_hostile_repetition_is_read_in_linear_time(unit: str) -> None:
    text = unit * (400_000 // len(unit))
    start = time.process_time()
    ours = (
        visible,
        strict_verdict,
        boxed_answer,
        chain_answer,
        chain_verdict,
        route,
        lambda text: tagged("answer", text),
    )
    published = (compat_verdict, compat_report, tagged_verdict, drmas_report, drmas_verdict, drmas_is_valid)
    for read in (*ours, *published):
        read(text)
    assert time.process_time() - start < 20  # seconds; quadratic work would take hours
