"""What a completion says: the visible text, the verdict, the final answer. Completions are hostile input.

Every function is linear in the length of the text and returns None where the text does not say it.
"""

from __future__ import annotations

import re

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_MAX_VERDICT_LINE = 200  # characters; a verdict line is short, and a long one is not worth a regular expression
_VERDICT_LINE = re.compile(r"[ \t*_`]*Verdict[ \t*_`]*:[ \t*_`]*(correct|wrong)[ \t*_`.]*", re.IGNORECASE)
_VERIFY_OPEN, _VERIFY_CLOSE = "<verify>", "</verify>"
_VERIFY_TAG = re.compile(r"<verify>\s*(approve|reject)\s*</verify>", re.IGNORECASE)
_CHINESE = re.compile("[\u4e00-\u9fff]")
_CHAIN_VERDICT = {"correct": True, "wrong": False}


def visible(text: str, starts_in_thought: bool = False) -> str | None:
    """What the next agent is shown: the text after the last closing think tag, stripped of outer white space.

    None: a thought was begun (by the text, or by the prompt: `starts_in_thought`) and never closed, so the
    completion was cut off before it said anything.
    """
    _, closed, shown = text.rpartition(THINK_CLOSE)
    if THINK_OPEN in shown or (starts_in_thought and not closed):
        return None
    return shown.strip()


def strict_verdict(report: str) -> bool | None:
    """True/False = "correct"/"wrong" of the last line that is `Verdict: correct|wrong` and nothing else.

    Any case; Markdown emphasis around the words and a full stop at the end are allowed.
    """
    for line in reversed(report.splitlines()):
        line = line.strip()
        if len(line) <= _MAX_VERDICT_LINE and (match := _VERDICT_LINE.fullmatch(line)):
            return match[1].lower() == "correct"
    return None


def compat_verdict(text: str) -> bool:
    """The published evaluation script's verdict: is "correct" a substring of what follows the last "correctness"?

    So "incorrect" counts as correct, and an unfinished thought is read as if it were the report. For comparison
    with published figures only.
    """
    return "correct" in text.rpartition(THINK_CLOSE)[2].lower().rpartition("correctness")[2]


def compat_report(text: str) -> str:
    """The bug report as the published script cuts it: what stands before "**Correctness**", "" without it.

    Its own prompt never asks for that marker, so its Corrector mostly reads an empty report.
    """
    before, marker, _ = text.rpartition(THINK_CLOSE)[2].partition("**Correctness**")
    return before.strip() if marker else ""


def compat_is_valid(text: str) -> bool:
    """Has the thought ended? What says nothing is a failure of format, though the published script reads a verdict into it."""
    return visible(text) is not None


def tagged_verdict(report: str) -> bool | None:
    """True/False = approve/reject in the last `<verify>` tag that holds one of the two, in any case (Dr. MAS)."""
    found = _VERIFY_TAG.findall(report)
    return found[-1].lower() == "approve" if found else None


def drmas_report(text: str) -> str:
    """What Dr. MAS's published code hands on: all of it, thoughts too, without white space inside the first tag."""
    start, end = text.find(_VERIFY_OPEN), text.find(_VERIFY_CLOSE)
    if start < 0 or end < 0:
        return text
    inside = start + len(_VERIFY_OPEN)
    return text[:inside] + text[inside:end].strip() + text[end:]


def drmas_verdict(text: str) -> bool:
    """The published code's: approved where "approve" stands in a tag, or "reject" in none; so a missing tag approves."""
    report = drmas_report(text)
    return f"{_VERIFY_OPEN}approve{_VERIFY_CLOSE}" in report or f"{_VERIFY_OPEN}reject{_VERIFY_CLOSE}" not in report


def drmas_is_valid(text: str) -> bool:
    """Does the published code take the output as well formed: both tags, whatever is in them, and no Chinese character?"""
    return _VERIFY_OPEN in text and _VERIFY_CLOSE in text and not _CHINESE.search(text)


def tagged(tag: str, text: str) -> str | None:
    """What stands between the last <tag> and the </tag> after it, in any case; None without, or if blank."""
    opened, found = -1, None
    for match in re.finditer(rf"<(/?){tag}>", text, re.IGNORECASE):
        if not match[1]:
            opened = match.end()
        elif opened >= 0:
            found, opened = text[opened : match.start()].strip() or None, -1
    return found


def route(text: str) -> bool | None:
    """True/False = yes/no in the last <verify> tag."""
    return {"yes": True, "no": False}.get((tagged("verify", text) or "").lower())


def boxed_answer(solution: str) -> str | None:
    r"""The contents of the last \boxed{...} (or \fbox{...}) whose braces balance; None without one, or if blank."""
    for match in reversed(list(re.finditer(r"\\f?boxed\s*\{", solution))[-20:]):  # 20: bounds the work on hostile text
        depth = 0
        position = match.end() - 1
        while position < len(solution):
            character = solution[position]
            if character == "\\":
                position += 2  # an escaped brace is not a brace
                continue
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return solution[match.end() : position].strip() or None
            position += 1
    return None


def _word_after_last(key: str, text: str) -> str | None:
    words = text.split()
    for index in range(len(words) - 2, -1, -1):
        if words[index] == key:
            return words[index + 1]
    return None


def chain_answer(solution: str) -> str | None:
    """The word after the last `Answer:` if it is one digit."""
    word = _word_after_last("Answer:", solution)
    return word if word is not None and word in set("0123456789") else None


def chain_verdict(report: str) -> bool | None:
    """The word after the last `Verdict:` if it is correct or wrong."""
    return _CHAIN_VERDICT.get(_word_after_last("Verdict:", report) or "")
