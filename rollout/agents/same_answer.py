r"""Equality of two final answers. The reference decides whether they are compared as text or as mathematics.

Lima                  text: compared letter by letter, ignoring case, spaces and unicode form
(C), C                a choice: its letter
2024-01-15, 3:45 pm   a date or a time: text
\{red, blue\}         a set of words: in any order
1/2, 0.5, 28\%        numbers and quantities (answer_quantities): by value; 5 km equals 5 and 5000 m, but not 5 m
x^2 + 1, (1, 2], y=x  mathematics (answer_parts, answer_values): part by part, equal in value or in LaTeX (answer_latex)
"""

from __future__ import annotations

import re

from marsrl.rollout.agents.answer_latex import joined, nesting, normal, one_form, tokens, without_marks
from marsrl.rollout.agents.answer_parts import same_parts
from marsrl.rollout.agents.answer_quantities import number, quantity

_SPACE = re.compile(r"\\[,;:! ]|\\q?quad\b|\\(?:display|text)style\b|~|\s+")
_EDGES = ' $"`*'
_QUOTED = re.compile(r"'(.*)'", re.DOTALL)

_BRACKETED_CHOICE = re.compile(r"\(\s*([A-Z])\s*\)", re.IGNORECASE)
# Text after a choice's letter must not name another choice, as in (A) or (B). It may refer to others, as in (D) None of (A), (B),
# and have letters that are hardly choices: (C) (I) and (II), (C) the point (P).
_OTHER_CHOICE = r"(?!\s*(?i:none|all|both|neither|either|only|not)\b).*(?<!\S)\(?\s*(?-i:[A-HJ])\s*\)(?!\w)"
_AFTER_CHOICE = rf"(?:\s(?!\s*(?:or|and)\b|\s*[&/,])(?!{_OTHER_CHOICE}).*)?"
_CHOICE = re.compile(rf"\(\s*([A-Z])\s*\){_AFTER_CHOICE}|([A-Z])", re.DOTALL)
_CHOSEN = re.compile(rf"\(\s*([A-Z])\s*\){_AFTER_CHOICE}|([A-Z])(?:[).:]{_AFTER_CHOICE})?", re.DOTALL | re.IGNORECASE)
_DATE_OR_TIME = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}.*|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}|\d{1,2}:\d{2}(:\d{2}|\s*[ap]\.?m\.?)|"
    r"\d{1,2}(st|nd|rd|th)?( of)? (jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sep(t|tember)?|"
    r"oct(ober)?|nov(ember)?|dec(ember)?)\b.*",
    re.IGNORECASE,
)
_SET = re.compile(r"\\\{(.*)\\\}", re.DOTALL)
_LATEX_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_LETTER_THEN_DIGIT = re.compile(r"(?<!\d)[^\W\d_]\d")  # H2O: a variable's index has an underscore, and its power a ^
_STARTS_WITH_NUMBER = re.compile(r"[+-]?\s*\\?\$?\s*(?:\d|\.\d|\\[dt]?frac|\\sqrt|\\pi)")
_OPERATORS = re.compile(r"[=^_+*<>|]|\\[a-zA-Z]|\d\s*[^\W\d_]")
_MATHEMATICAL = re.compile(
    "(arc)?(sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|frac|pi|inf|infinity|oo|max|min|gcd|lcm|mod|det|dim|and|or|deg|"
    "alpha|beta|gamma|delta|theta|lambda|phi|omega|sigma|cup|cap|[pbv]?matrix|array|cases"
)
_DEFINES = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*\s*=(?=.)", re.DOTALL)  # Area = 5
_MOST_NESTED = 50  # nested brackets; beyond it only identical texts are equal
_VOWELS = frozenset("aeiou")
_SPELLED = {
    "all real numbers": r"\mathbb{R}",
    "all reals": r"\mathbb{R}",
    "empty set": r"\emptyset",
    "the empty set": r"\emptyset",
}
_SPELLED |= dict.fromkeys(["no solution", "no solutions", "no real solution", "no real solutions"], r"\emptyset")


def answer_key(answer: str) -> str:
    """Return a normal form: answers with the same key are equal and count as one in a vote.

    Ignores case, white space, unicode form, quotes, dollar signs, a final full stop and LaTeX that only sets type. Numbers
    compare by value (70, 70.0, 1,234, 1/2, \\frac{1}{2}, 7e1), with a unit too (5 km, 5000 m). Expressions are not evaluated.
    """
    text = _plain(answer)
    if bracketed := _BRACKETED_CHOICE.fullmatch(text):
        text = answer = bracketed[1]
    if (value := number(text)) is not None:
        return str(value)
    if _is_text(text):
        return text.casefold()
    part = _tokens(answer)
    if (found := quantity(part)) and (value := number("".join(found.number))) is not None:
        return f"{value * found.scale} {found.unit}"
    return joined(normal(part), fold=True)


def same_answer(reference: str, answer: str) -> bool:
    """Return True if an answer equals the reference. Answers are hostile input: the caller bounds time and memory."""
    if answer_key(reference) == answer_key(answer):
        return True
    plain_reference, plain_answer = _plain(reference), _plain(answer)
    if choice := _CHOICE.fullmatch(plain_reference):
        chosen = _CHOSEN.fullmatch(plain_answer)
        return chosen is not None and (chosen[1] or chosen[2]).upper() == (choice[1] or choice[2])
    if _is_text(plain_reference):
        return _SET.fullmatch(plain_reference) is not None and _elements(plain_reference) == _elements(plain_answer)
    # 100,200 is a number or a list.
    readings = (True, False) if "," in plain_reference and "," in plain_answer else (True,)
    return any(
        max(nesting(a), nesting(b)) <= _MOST_NESTED and same_parts(a, b)
        for thousands in readings
        for a, b in [(_tokens(reference, thousands), _tokens(answer, thousands))]
    )


def _tokens(text: str, thousands: bool = True) -> list[str]:
    plain = _plain(text)
    return tokens(plain if plain in _SPELLED.values() else one_form(text).strip(_EDGES).removesuffix("."), thousands)


def _plain(text: str) -> str:
    """Remove pure type-setting from the text."""
    text = without_marks(one_form(text))
    text = _SPACE.sub(" ", text).strip(_EDGES).removesuffix(".").strip(_EDGES)
    text = _QUOTED.sub(r"\1", text)
    return _SPELLED.get(text.casefold(), text)


def _is_text(reference: str) -> bool:
    """Return True for words, dates and times; False for mathematics, including a number with a unit."""
    if _DATE_OR_TIME.fullmatch(reference) or _LETTER_THEN_DIGIT.search(_LATEX_COMMAND.sub(" ", reference)):
        return True
    if _DEFINES.match(reference) and not _is_text(reference.rpartition("=")[2].strip()):
        return False
    words = [
        word for word in _WORD.findall(_LATEX_COMMAND.sub(" ", reference)) if not _MATHEMATICAL.fullmatch(word.lower())
    ]
    if not words or _STARTS_WITH_NUMBER.match(reference):
        return False
    if _OPERATORS.search(reference):
        words = [word for word in words if not word.isupper()]  # ABCD: points
    # Up to three letters next to an operator, or two without a vowel, are a product of variables: ab + c, xy.
    limit = 3 if _OPERATORS.search(reference) else 2
    return any(len(word) > limit or (limit == 2 and not _VOWELS.isdisjoint(word.lower())) for word in words)


def _elements(text: str) -> list[str] | None:
    """Return the keys of a set's elements, sorted; None if the text is not a set."""
    found = _SET.fullmatch(text)
    return found and sorted(map(answer_key, found[1].split(",")))
