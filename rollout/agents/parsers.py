"""Parsers of completions: the visible text, the verdict, the final answer, tool calls. Completions are hostile input.

Every function takes time linear in the text's length and returns None if it finds nothing. Users' regular expressions run in
RE2, which does not backtrack: `re` can take exponential time, and a time limit would make results depend on the machine's load.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from marsrl.rollout.types import Sample, ToolCall, ToolFunction

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
MOST_CALLS = 8
"""Maximum executed calls per turn; further ones are rejected."""

_MOST_SHOWN = 100  # characters of a model's text quoted in a message
_MAX_REGEX = 1000  # characters; RE2's time grows with the expression too
_MAX_VERDICT_LINE = 200  # characters; verdict lines are short, so longer lines are skipped
_VERDICT_LINE = re.compile(r"[ \t*_`]*Verdict[ \t*_`]*:[ \t*_`]*(correct|wrong)[ \t*_`.]*", re.IGNORECASE)
_VERIFY_OPEN, _VERIFY_CLOSE = "<verify>", "</verify>"
_VERIFY_TAG = re.compile(r"<verify>\s*(approve|reject)\s*</verify>", re.IGNORECASE)
_CHINESE = re.compile("[\u4e00-\u9fff]")
_BOX = re.compile(r"\\(?:boxed|fbox)\b")
# Maximum characters and words of an answer outside a box; longer text counts as reasoning.
_MAX_STATED, _MAX_WORDS = 200, 3
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")  # not a LaTeX command
_STATED = re.compile(
    r"\banswer[ \t*]*(?:\bis\b|[:：=])[\s*:]*+(?!(?:not|correct|incorrect|right|wrong)\b)|^[ \t]*####(?!#)",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"\.[*_]*(?=\s)")  # only full stops: an exclamation mark may be a factorial
_NUMBER = re.compile(r"[-+]?(?:\\?[$€£])?[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\\?%)?")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def visible(text: str, starts_in_thought: bool = False) -> str | None:
    """Return the text shown to the next agent: everything after the last closing think tag, without outer white space.

    Returns None if a thought was opened (by the text, or by the prompt: `starts_in_thought`) and never closed: the completion
    was truncated before any visible text.
    """
    _, closed, shown = text.rpartition(THINK_CLOSE)
    if THINK_OPEN in shown or (starts_in_thought and not closed):
        return None
    return shown.strip()


def strict_verdict(report: str) -> bool | None:
    """Return True/False for "correct"/"wrong" in the last line that is exactly `Verdict: correct|wrong`.

    Upper or lower case, Markdown emphasis around the words and a full stop at the end are allowed.
    """
    for line in reversed(report.splitlines()):
        line = line.strip()
        if len(line) <= _MAX_VERDICT_LINE and (match := _VERDICT_LINE.fullmatch(line)):
            return match[1].lower() == "correct"
    return None


def compat_verdict(text: str) -> bool:
    """Return the published evaluation script's verdict: True if "correct" occurs after the last "correctness" in the text.

    So "incorrect" counts as correct, and an unfinished thought is read as if it were the report. Use it only for comparison with
    published figures.
    """
    return "correct" in text.rpartition(THINK_CLOSE)[2].lower().rpartition("correctness")[2]


def compat_report(text: str) -> str:
    """Return the bug report as the published script extracts it: the text before "**Correctness**", or "" without it.

    The published prompt asks for a line `**Correctness**: ...`. Without it, the Corrector gets an empty report.
    """
    before, marker, _ = text.rpartition(THINK_CLOSE)[2].partition("**Correctness**")
    return before.strip() if marker else ""


def tagged_verdict(report: str) -> bool | None:
    """Return True/False for approve/reject in the last `<verify>` tag that contains one of them, ignoring case (Dr. MAS)."""
    found = _VERIFY_TAG.findall(report)
    return found[-1].lower() == "approve" if found else None


def drmas_report(text: str) -> str:
    """Return the output as Dr. MAS's published code passes it to the next agent.

    The output is complete, with thoughts, except that white space in the first tag is removed.
    """
    start, end = text.find(_VERIFY_OPEN), text.find(_VERIFY_CLOSE)
    if start < 0 or end < 0:
        return text
    inside = start + len(_VERIFY_OPEN)
    return text[:inside] + text[inside:end].strip() + text[end:]


def drmas_verdict(text: str) -> bool:
    """Return the published code's verdict: True if a tag contains "approve", or no tag contains "reject".

    So the verdict is True if the tag is missing.
    """
    report = drmas_report(text)
    return f"{_VERIFY_OPEN}approve{_VERIFY_CLOSE}" in report or f"{_VERIFY_OPEN}reject{_VERIFY_CLOSE}" not in report


def drmas_is_valid(text: str) -> bool:
    """Return True if the published code accepts the format: both tags, with any contents, and no Chinese character."""
    return _VERIFY_OPEN in text and _VERIFY_CLOSE in text and not _CHINESE.search(text)


def tagged(tag: str, text: str) -> str | None:
    """Return the text between the last <tag> and the </tag> after it, ignoring case; None if it is missing or blank."""
    found = all_tagged(tag, text)
    return found[-1] or None if found else None


def all_tagged(tag: str, text: str) -> list[str]:
    """Return each text between a <tag> and the </tag> after it, ignoring case, without outer white space."""
    opened, texts = -1, []
    for match in re.finditer(rf"<(/?){tag}>", text, re.IGNORECASE):
        if not match[1]:
            opened = match.end()
        elif opened >= 0:
            texts.append(text[opened : match.start()].strip())
            opened = -1
    return texts


def route(text: str) -> bool | None:
    """Return True/False for yes/no in the last <verify> tag (Dr. MAS's team for search)."""
    return {"yes": True, "no": False}.get((tagged("verify", text) or "").lower())


def boxed_answer(solution: str) -> str | None:
    r"""Return the contents of the last \boxed{...} (or \fbox{...}) whose braces balance; None if it is missing or blank."""
    # Try only the last 20 boxes, which bounds the work on hostile text.
    boxes = list(re.finditer(r"\\(?:boxed|fbox)\s*\{", solution))[-20:]
    for match in reversed(boxes):
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


def final_answer(solution: str) -> str | None:
    r"""Return the last \boxed{...}; without any box, the answer that the text states last, in models' usual forms.

    A stated answer is a last line that is a number; text after `answer is`, `answer:` or `answer =` up to the end of the
    sentence; or `####` followed by a number or, on the last line, by any text. Nothing is taken from other sentences and
    equations, and an empty or broken box gives None.
    """
    if _BOX.search(solution):
        return boxed_answer(solution)
    delimiters = " \t`$[]\\"  # lines with only these characters surround display mathematics
    text = "\n".join(line for line in solution.splitlines() if line.strip(delimiters))
    last = _undressed(text.rpartition("\n")[2])
    if _NUMBER.fullmatch(last):
        return last
    *_, match = (None, *_STATED.finditer(text))
    if match is None:
        return None
    line, _, below = text[match.end() : match.end() + _MAX_STATED + 1].partition("\n")
    answer = _undressed(_SENTENCE_END.split(line, maxsplit=1)[0])
    is_number = _NUMBER.fullmatch(answer) is not None
    is_heading = below != "" and ("\n" in match[0] or (match[0].endswith("#") and not is_number))
    is_short = any(map(str.isalnum, answer)) and len(answer) <= _MAX_STATED and len(_WORD.findall(answer)) <= _MAX_WORDS
    return answer if is_short and not is_heading else None


def _undressed(text: str) -> str:
    """Remove the full stop, Markdown emphasis and LaTeX delimiters around a text."""
    text = text.strip(" \t*_`").removesuffix(".").strip(" \t*_`")
    for opened, closed in _DELIMITERS:
        inner = text.removeprefix(opened).removesuffix(closed)
        if len(text) - len(inner) == len(opened) + len(closed) and opened not in inner:
            return inner.strip()
    return text


def _word_after_last(key: str, text: str) -> str | None:
    found = [after for word, after in itertools.pairwise(text.split()) if word == key]
    return found[-1] if found else None


def chain_answer(solution: str) -> str | None:
    """Return the digit after the last `Answer:`; None if something else follows it."""
    word = _word_after_last("Answer:", solution)
    return word if word is not None and word in set("0123456789") else None


def chain_verdict(report: str) -> bool | None:
    """Return True/False for correct/wrong after the last `Verdict:`; None if another word follows."""
    return {"correct": True, "wrong": False}.get(_word_after_last("Verdict:", report) or "")


@dataclass(frozen=True, slots=True)
class Parser:
    """Parser of an answer text, or of a yes-or-no verdict, in a completion.

    examples: for a text, forms that the parser accepts, with ANSWER as placeholder and the recommended form first; for a verdict,
    one example of yes and one of no; () if unknown.
    """

    read: Callable[[str], str | bool | None]
    examples: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        r"""Form that the parser looks for, for messages: `\boxed{...}`; `Verdict: correct or Verdict: wrong`; "" if unknown."""
        return " or ".join(example.replace("ANSWER", "...") for example in self.examples)

    @property
    def markers(self) -> tuple[str, ...]:
        r"""Texts such as `\boxed{` or `Verdict:`. A prompt that asks for the form contains at least one. () if unknown."""
        if len(self.examples) == 2:  # examples of a yes and a no
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*self.examples, strict=False))
            shared = "".join(character for character, _ in same).rstrip()
            if shared and not shared[-1].isalnum():
                return (shared,)
        parts = (example.partition("ANSWER") for example in self.examples)
        return tuple(marker for before, _, after in parts if (marker := before.strip() or after.strip()))

    def is_shown(self, *texts: str) -> bool:
        """Return True if one of the texts contains one of the markers."""
        return any(marker in text for marker in self.markers for text in texts)


PARSERS: Mapping[str, Mapping[str, Parser]] = {
    "answer": {
        "boxed": Parser(boxed_answer, ("\\boxed{ANSWER}",)),
        "answer_tag": Parser(lambda text: tagged("answer", text), ("<answer>ANSWER</answer>",)),
        "answer_word": Parser(chain_answer, ("Answer: ANSWER",)),
        "final_answer": Parser(final_answer, ("\\boxed{ANSWER}", "#### ANSWER", "Answer: ANSWER")),
    },
    "verdict": {
        "verdict_line": Parser(strict_verdict, ("Verdict: correct", "Verdict: wrong")),
        "verdict_word": Parser(chain_verdict, ("Verdict: correct", "Verdict: wrong")),
        "verify_tag": Parser(tagged_verdict, ("<verify>approve</verify>", "<verify>reject</verify>")),
    },
    "route": {"verify_tag": Parser(route, ("<verify>yes</verify>", "<verify>no</verify>"))},
    "query": {"search_tag": Parser(lambda text: tagged("search", text), ("<search>ANSWER</search>",))},
}
"""Parsers by kind and by their name in a prompt file."""


@dataclass(frozen=True, slots=True)
class Compat:
    """Parser of a Verifier's whole output as in the code published with a paper (agents.<name>.parser: compat).

    marker: text that the parser looks for and the prompt must ask for. report: returns the part that other agents see. verdict:
    returns the verdict; there always is one. is_valid: returns True if the format is valid.
    """

    marker: str
    report: Callable[[str], str]
    verdict: Callable[[str], bool]
    is_valid: Callable[[str], bool]


COMPATS: Mapping[str, Compat] = {
    # An unclosed thought is not a valid format, although the published script finds a verdict in it.
    "MarsRL": Compat("**Correctness**", compat_report, compat_verdict, lambda text: visible(text) is not None),
    "Dr. MAS": Compat(_VERIFY_OPEN, drmas_report, drmas_verdict, drmas_is_valid),
}


class LastMatch:
    """Finder of the last match of an expression, as re.finditer would find it, in linear time.

    A new search after each match would take quadratic time, because each search may read to the end of the text. Here one
    expression matches everything up to the last match, so that RE2 reads the text once.

    Raises:
        ValueError: the expression is too long, invalid in RE2, or matches the empty text.
    """

    def __init__(self, expression: str) -> None:
        import re2  # imported here: few runs use expressions

        if len(expression) > _MAX_REGEX:
            raise ValueError(f"has {len(expression):,} characters, expected at most {_MAX_REGEX:,}")
        options = re2.Options()
        options.log_errors = False
        try:
            alone = re2.compile(expression, options)
            self._whole: Any = re2.compile(f"(?:(?s:.)*?({expression}))+", options)
        except re2.error as error:
            reason = error.args[0].decode("utf-8", "replace") if error.args else "too large"
            raise ValueError(f"is not a valid RE2 regular expression: {reason}") from error
        if alone.search(""):
            raise ValueError("matches empty text, so it matches everywhere; require at least one character")
        self.num_groups = int(alone.groups)

    def groups(self, text: str) -> tuple[str | None, ...] | None:
        """Return the last match and its groups, as `(match[0], *match.groups())`; None without a match."""
        match = self._whole.match(text.encode("utf-8", "replace").decode())  # RE2 rejects lone surrogates
        if match is None:
            return None
        start = match.start(1)  # positions before this belong to groups of earlier matches
        return tuple(match[n] if match.start(n) >= start else None for n in range(1, self.num_groups + 2))


def regex_text(expression: str) -> Callable[[str], str | None]:
    """Build a parser that returns the group of the last match; None without a match, or if the group is blank.

    Raises ValueError as LastMatch does, or if there is not exactly one group.
    """
    last = LastMatch(expression)
    if last.num_groups != 1:
        raise ValueError(
            f"has {last.num_groups} groups, expected exactly one, (...), around the text to read; (?:...) is not counted"
        )

    def read(text: str) -> str | None:
        groups = last.groups(text)
        return None if groups is None or groups[1] is None else groups[1].strip() or None

    return read


def regex_verdict(yes: str, no: str) -> Callable[[str], bool | None]:
    """Build a parser that returns True if the last match of the two expressions is of `yes`, False if it is of `no`.

    Raises ValueError as LastMatch does.
    """
    num_groups = LastMatch(yes).num_groups
    LastMatch(no)
    last = LastMatch(f"({yes})|({no})")

    def read(text: str) -> bool | None:
        groups = last.groups(text)
        if groups is None:
            return None
        is_yes, is_no = groups[1] is not None, groups[num_groups + 2] is not None
        assert is_yes != is_no, (yes, no)
        return is_yes

    return read


def read_calls(sample: Sample, functions: Mapping[str, ToolFunction]) -> list[ToolCall | str]:
    """Read the calls in the sample's current turn, in the form below; an invalid call becomes an error text.

        <tool_call>
        {"name": "convert", "arguments": {"value": 3, "unit": "km"}}
        </tool_call>

    functions: the functions that the sample can call, by name.
    """
    turn = f"{sample.uid}/{sample.turn}"
    return [_call(turn, index, text, functions) for index, text in enumerate(all_tagged("tool_call", sample.shown))]


def _call(turn: str, index: int, text: str, functions: Mapping[str, ToolFunction]) -> ToolCall | str:
    if index >= MOST_CALLS:
        return f"this call was not made: at most {MOST_CALLS} calls are made in a turn"
    try:
        call = json.loads(text)
        has_keys = isinstance(call, dict) and call.keys() == {"name", "arguments"}
        if not has_keys or not isinstance(call["arguments"], dict):
            return 'a call must be {"name": ..., "arguments": {...}}'
        function = functions.get(str(call["name"]))
        if function is None:
            return f"there is no tool {str(call['name'])[:_MOST_SHOWN]!r}; expected one of {', '.join(functions)}"
        tool, arguments = (function.server, call) if function.server else (function.name, call["arguments"])
        return ToolCall(f"{turn}/{tool}#{index}", tool, json.dumps(arguments, sort_keys=True))
    except (ValueError, RecursionError) as error:
        return f"the call is not JSON ({str(error)[:_MOST_SHOWN]})"
