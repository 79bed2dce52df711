"""Equality of two final answers: text as text, mathematics as mathematics. The reference decides which of them it is.

Lima                  text: case, spaces and unicode form do not matter; Mail is wrong
(C), C                a choice: its letter
2024-01-15, 3:45 pm   a date or a time: text
1/2, 0.5              numbers, by value
5 km                  a quantity: its number as mathematics; 5 is right, 5 m is wrong
x^2 + 1, (1, 2]       mathematics, by math-verify
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

# LaTeX that only sets type: its argument stands as it is.
_WRAPPER = re.compile(
    r"\\(?:boxed|text(?:bf|it|rm|sf|tt)?|mbox|hbox|math(?:rm|bf|it|sf|tt)|operatorname)\s*\{([^{}]*)\}"
)
_SPACE = re.compile(r"\\[,;:! ]|\\q?quad\b|~|\s+")
_EDGES = ' $"`*'

_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(\d{1,1000})\}\{(\d{1,1000})\}")
_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d{1,1000})(\.\d{0,1000})?(?:\s*/\s*(\d{1,1000}))?")

_CHOICE = re.compile(r"\(([A-Z])\)(?:\s.*)?|([A-Z])", re.DOTALL)
_CHOSEN = re.compile(r"\(([A-Z])\)(?:\s.*)?|([A-Z])(?:[).:](?:\s.*)?)?", re.DOTALL | re.IGNORECASE)
_DATE_OR_TIME = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}.*|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}|\d{1,2}:\d{2}(:\d{2}|\s*[ap]\.?m\.?)", re.IGNORECASE
)
_LATEX_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_LETTER_THEN_DIGIT = re.compile(r"[^\W\d_]\d")  # H2O: a variable's index has an underscore, its power a ^
_STARTS_WITH_NUMBER = re.compile(r"[+-]?\s*\\?\$?\s*(?:\d|\.\d|\\[dt]?frac|\\sqrt|\\pi)")
_OPERATORS = re.compile(r"[=^_+*<>|]|\d\s*[^\W\d_]")
_MATHEMATICAL = re.compile(
    "(arc)?(sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|frac|pi|inf|infinity|oo|max|min|gcd|lcm|mod|det|dim|and|or|deg|"
    "alpha|beta|gamma|delta|theta|lambda|phi|omega|sigma|cup|cap|[pbv]?matrix|array|cases"
)
_VOWELS = frozenset("aeiou")

_UNITS = {
    alias: unit
    for unit, aliases in {
        "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
        "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
        "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram", "oz": "oz ounce", "lb": "lb pound",
        "ml": "ml milliliter millilitre", "l": "l liter litre",
        "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "week": "week", "month": "month",
        "year": "yr year", "am": "am a.m", "pm": "pm p.m",
        "cent": "cent ¢", "dollar": "dollar", "euro": "euro €",
        "mph": "mph", "km/h": "km/h kmh kph", "m/s": "m/s",
    }.items()
    for alias in aliases.split()
}  # fmt: skip
_QUANTITY = re.compile(r"(.*?[\d})])\s*([a-zA-Z¢€][a-zA-Z./]*(?:\s+[a-zA-Z./]+)*)\s*(?:\^\s*\{?(\d)\}?)?", re.DOTALL)
_BASE = re.compile(r"([0-9a-zA-Z]+)_\{?(\d+)\}?")
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}


def answer_key(answer: str) -> str:
    """A normal form: answers with the same key are one answer to whoever counts votes.

    Case, white space, unicode form, quotes, dollar signs, a final full stop and LaTeX that only sets type do not matter;
    numbers go by value (70, 70.0, 1,234, 1/2, \\frac{1}{2}).
    """
    text = _plain(answer)
    return _key(text, _number(text))


def same_answer(reference: str, answer: str) -> bool:
    """True where an answer is the reference. sympy may hang on hostile input or take all memory: the caller bounds both.

    Raises:
        ValueError: the reference is mathematics that math-verify cannot read.
    """
    wanted, said = _plain(reference), _plain(answer)
    numbers = _number(wanted), _number(said)
    if _key(wanted, numbers[0]) == _key(said, numbers[1]):
        return True
    if choice := _CHOICE.fullmatch(wanted):
        chosen = _CHOSEN.fullmatch(said)
        return chosen is not None and (chosen[1] or chosen[2]).upper() == (choice[1] or choice[2])
    if _is_text(wanted) or None not in numbers:
        return False
    if (quantity := _quantity(wanted)) and (other := _quantity(said)):
        return quantity[1:] == other[1:] and same_answer(quantity[0], other[0])
    return _same_mathematics(reference, answer)


def _key(text: str, number: Fraction | None) -> str:
    return text.casefold() if number is None else str(number)


def _plain(text: str) -> str:
    """Without what only sets type."""
    text, before = unicodedata.normalize("NFKC", text), ""
    while before != text:
        before, text = text, _WRAPPER.sub(r"\1", text)
    return _SPACE.sub(" ", text).strip(_EDGES).removesuffix(".").strip(_EDGES)


def _number(text: str) -> Fraction | None:
    """The value of an integer, a decimal or a fraction of integers; None for anything else."""
    if found := _FRACTION.fullmatch(text):
        sign, over, under = found.groups()
    elif found := _NUMBER.fullmatch(text):
        sign, over, under = found[1], found[2].replace(",", "") + (found[3] or ""), found[4] or "1"
    else:
        return None
    return None if int(under) == 0 else Fraction(sign + over) / int(under)


def _is_text(reference: str) -> bool:
    """True for words, dates and times; False for mathematics, a number with a unit among it."""
    if _DATE_OR_TIME.fullmatch(reference) or _LETTER_THEN_DIGIT.search(_LATEX_COMMAND.sub(" ", reference)):
        return True
    words = [
        word for word in _WORD.findall(_LATEX_COMMAND.sub(" ", reference)) if not _MATHEMATICAL.fullmatch(word.lower())
    ]
    if not words or _STARTS_WITH_NUMBER.match(reference):
        return False
    # up to three letters beside an operator, or two without a vowel, are a product of variables: ab + c, xy
    limit = 3 if _OPERATORS.search(reference) else 2
    return any(len(word) > limit or (limit == 2 and not _VOWELS.isdisjoint(word.lower())) for word in words)


def _quantity(text: str) -> tuple[str, str, str] | None:
    """(number, unit, power), ("15", "cm", "2") of "15 cm^2" and "15 square centimeters"; (digits, base, "") of 101_2.

    None: no unit, or none of _UNITS.
    """
    if found := _BASE.fullmatch(text):
        return found[1], found[2], ""
    if (found := _QUANTITY.fullmatch(text)) is None:
        return None
    *before, name = found[2].lower().split()
    powers = [_POWERS[word] for word in before if word in _POWERS]
    unit = _UNITS.get(name.rstrip(".")) or _UNITS.get(name.removesuffix("s"))
    return None if unit is None or len(powers) != len(before) else (found[1], unit, found[3] or (powers or ["1"])[0])


def _same_mathematics(reference: str, answer: str) -> bool:
    from math_verify import parse, verify  # takes 2 s: answers that need no parser do not pay for it

    # The dollar signs make it LaTeX wherever it can be read so; a bare number is read either way.
    # Timeouts of math-verify are off: the pool kills what hangs.
    gold = parse(f"\\boxed{{{reference}}}", parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"the reference answer {reference[:80]!r} cannot be parsed")
    target = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return bool(verify(gold, target, timeout_seconds=None))
