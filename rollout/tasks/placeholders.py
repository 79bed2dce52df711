"""Detection of placeholders among reference answers, and of answers that suspiciously many problems share.

A policy that boxes a placeholder is rewarded without solving the problem. In NuminaMath 16% of the answers are `proof` or
`notfound`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

from marsrl.rollout.agents.same_answer import answer_key

SHARE, FEWEST = 0.05, 20
"""A free-form answer is suspicious if at least this share of the problems, and at least this number of problems, have it.

Genuine answers vary: even the most frequent number is the answer of only a few percent of the problems. A share of fewer than 20
problems means little."""

_PLACEHOLDERS = frozenset(  # without spaces
    [
        *("proof", "seeproof", "notfound", "answernotfound", "noanswer", "noanswerfound", "unknown"),
        *("notavailable", "notprovided", "n/a", "n.a", "null", "tbd", "todo", "error"),
        *("answer", "finalanswer", "youranswer"),
        *("seesolution", "seethesolution", "seeabove", "seebelow", "seeexplanation"),
    ]
)
_OF_PROGRAMS = ("None", "NaN", "nan", "<NA>")  # spellings of missing values; other spellings of `none` may be answers
_TYPE_SETTING = re.compile(r"\\(?:boxed|fbox|text\w*|math\w+|mbox|hbox|operatorname)(?=\{)|[\s${}`'\"*]+")
_NOTHING = re.compile(r"[-–—_?.…]*")
_MARKS = re.compile(r"[()\[\]_-]")  # (not found), [N/A], not-found
_NUMBER_OR_CHOICE = re.compile(r"-?\d+(/\d+)?|[a-z]")  # matches the form that answer_key returns
_LABELS = frozenset(["yes", "no", "true", "false"])


def is_placeholder(answer: str) -> bool:
    r"""Return True for a text in place of an answer: proof, \text{Not found}, N/A, None, see solution, -, or bare LaTeX."""
    text = _TYPE_SETTING.sub("", answer)
    if _NOTHING.fullmatch(text) or answer.strip() in _OF_PROGRAMS or not answer_key(answer):  # a zero-width space
        return True
    return _MARKS.sub("", text).casefold().rstrip(".") in _PLACEHOLDERS


def shared(answers: Iterable[Collection[str]]) -> list[tuple[str, int]]:
    """Return (answer, number of problems) of free-form answers that suspiciously many problems share, most frequent first.

    answers: right answers of each problem. Numbers, choices, yes, no, true and false are excluded, since many problems share
    them.
    """
    rows = list(answers)
    counts: Counter[str] = Counter()
    shown: dict[str, str] = {}
    for text, count in Counter(text for row in rows for text in set(row)).items():
        if count > 1:
            key = answer_key(text)
            counts[key] += count
            shown.setdefault(key, text)
    most = max(SHARE * len(rows), FEWEST)
    found = [(shown[key], count) for key, count in counts.most_common() if count >= most]
    return [(text, count) for text, count in found if not _is_label(answer_key(text))]


def _is_label(key: str) -> bool:
    return _NUMBER_OR_CHOICE.fullmatch(key) is not None or key in _LABELS
