r"""Equality of two final answers: text as text, mathematics as mathematics; the reference decides which.

Lima                  text: case, spaces and unicode form do not matter; Mail is wrong
(C), C                a choice: its letter
2024-01-15, 3:45 pm   a date or a time: text
\{red, blue\}         a set of words: in any order
1/2, 0.5              numbers, by value
5 km, 12 cats         a quantity: its number as mathematics; 5 is right, 5 m is wrong
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
_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|\{,\}|,\\!)(?=\d{3}(?!\d))")  # 10\,000, 10{,}000, 10,\!000
_EDGES = ' $"`*'
_QUOTED = re.compile(r"'(.*)'", re.DOTALL)

# NFKC alone would make 102 of 10², and 31/2 of 3½.
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_DEGREES = re.compile(r"°(?!\s*[A-Za-z])")
_LOOKALIKES = str.maketrans("−⁄‘’“”", "-/''\"\"")

_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(\d{1,1000})\}\{(\d{1,1000})\}")
_NUMBER = re.compile(
    r"([+-]?)(\d{1,3}(?:,\d{3})+|\d{1,1000})(\.\d{0,1000})?(e[+-]?\d{1,3})?(?:\s*/\s*(\d{1,1000}))?", re.IGNORECASE
)
_MIXED = re.compile(r"([+-]?)(\d{1,1000}) (\d{1,1000}\s*/\s*\d{1,1000})")  # 1 1/2

_BRACKETED_CHOICE = re.compile(r"\(([A-Z])\)", re.IGNORECASE)
_CHOICE = re.compile(r"\(([A-Z])\)(?:\s.*)?|([A-Z])", re.DOTALL)
_CHOSEN = re.compile(r"\(([A-Z])\)(?:\s.*)?|([A-Z])(?:[).:](?:\s.*)?)?", re.DOTALL | re.IGNORECASE)
_DATE_OR_TIME = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}.*|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}|\d{1,2}:\d{2}(:\d{2}|\s*[ap]\.?m\.?)|"
    r"\d{1,2}(st|nd|rd|th)?( of)? (jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sep(t|tember)?|"
    r"oct(ober)?|nov(ember)?|dec(ember)?)\b.*",
    re.IGNORECASE,
)
_SET = re.compile(r"\\\{(.*)\\\}", re.DOTALL)
_BARE_PI = re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])")
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
        "hz": "hz hertz", "cent": "cent ¢", "dollar": "dollar", "euro": "euro €",
        "mph": "mph", "km/h": "km/h kmh kph", "m/s": "m/s",
    }.items()
    for alias in aliases.split()
}  # fmt: skip
_QUANTITY = re.compile(
    r"(.*?(?:[\d})]|\\pi))(\s*)([a-zA-Z¢€][a-zA-Z./]*(?:\s+[a-zA-Z./]+)*)\s*(?:\^\s*\{?(\d)\}?)?", re.DOTALL
)
_SCALES = frozenset(["hundred", "thousand", "million", "billion", "trillion", "dozen"])
_BASE = re.compile(r"([0-9a-zA-Z]+)_\{?(\d+)\}?")
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}


def answer_key(answer: str) -> str:
    """A normal form: answers with the same key count as one in a vote.

    Case, white space, unicode form, quotes, dollar signs, a final full stop and LaTeX that only sets type do not matter;
    numbers go by value (70, 70.0, 1,234, 1/2, \\frac{1}{2}).
    """
    text = _plain(answer)
    if bracketed := _BRACKETED_CHOICE.fullmatch(text):
        text = bracketed[1]
    number = _number(text)
    return text.casefold() if number is None else str(number)


def same_answer(reference: str, answer: str) -> bool:
    """True if an answer equals the reference; ValueError: math-verify cannot read the reference's mathematics.

    sympy may hang on hostile input or exhaust memory: the caller bounds both.
    """
    reference, answer = _one_form(reference), _one_form(answer)
    if answer_key(reference) == answer_key(answer):
        return True
    wanted, said = _plain(reference), _plain(answer)
    if choice := _CHOICE.fullmatch(wanted):
        chosen = _CHOSEN.fullmatch(said)
        return chosen is not None and (chosen[1] or chosen[2]).upper() == (choice[1] or choice[2])
    if _is_text(wanted):
        return _SET.fullmatch(wanted) is not None and _elements(wanted) == _elements(said)
    if _number(wanted) is not None and _number(said) is not None:
        return False
    quantity, other = _quantity(wanted), _quantity(said)
    if quantity and other:
        return quantity[1:] == other[1:] and same_answer(quantity[0], other[0])
    if any(each and each[1] in _SCALES for each in (quantity, other)):
        return False
    if quantity and not quantity[1].isdigit():
        return same_answer(quantity[0], said)
    if other and other[1] in _UNITS.values():
        return same_answer(wanted, other[0])
    return _same_mathematics(reference, answer)


def _one_form(text: str) -> str:
    """The text with one character for each meaning: superscripts as powers, ½ as 1/2, plain quotes and minus signs."""
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{found[0]}}}", text)
    text = _VULGAR_FRACTION.sub(lambda found: f" {found[0]}", text)
    text = unicodedata.normalize("NFKC", text).translate(_LOOKALIKES)
    return _DEGREES.sub(r"^\\circ", _THOUSANDS.sub(",", text))


def _plain(text: str) -> str:
    """The text without pure type-setting."""
    text, before = _one_form(text), ""
    while before != text:
        before, text = text, _WRAPPER.sub(r"\1", text)
    text = _SPACE.sub(" ", text).strip(_EDGES).removesuffix(".").strip(_EDGES)
    return _QUOTED.sub(r"\1", text)


def _number(text: str) -> Fraction | None:
    """The value of an integer, a decimal, a fraction of integers or a mixed number; None for anything else."""
    if found := _FRACTION.fullmatch(text):
        sign, over, under = found.groups()
    elif found := _NUMBER.fullmatch(text):
        sign, under = found[1], found[5] or "1"
        over = found[2].replace(",", "") + (found[3] or "") + (found[4] or "")
    elif found := _MIXED.fullmatch(text):
        part = _number(found[3])
        return None if part is None else Fraction(f"{found[1]}1") * (int(found[2]) + part)
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
    """(number, unit, power), ("15", "cm", "2") of "15 cm^2" and "15 square centimeters", ("12", "red cat", "1") of "12 red
    cats"; (digits, base, "") of 101_2. None: no unit, or letters that may be a product of variables.
    """
    if found := _BASE.fullmatch(text):
        return found[1], found[2], ""
    if (found := _QUANTITY.fullmatch(text)) is None:
        return None
    *before, name = words = found[3].lower().split()
    powers = [_POWERS[word] for word in before if word in _POWERS]
    unit = _UNITS.get(name.rstrip(".")) or _UNITS.get(name.removesuffix("s"))
    if unit is not None and len(powers) == len(before):
        return found[1], unit, found[4] or (powers or ["1"])[0]
    if found[2] and all(len(word) > 2 and not _MATHEMATICAL.fullmatch(word) for word in words):
        return found[1], " ".join(words).removesuffix("s"), found[4] or "1"
    return None


def _elements(text: str) -> list[str] | None:
    """Keys of a set's elements, sorted; None if it is no set."""
    found = _SET.fullmatch(text)
    return found and sorted(map(answer_key, found[1].split(",")))


def _same_mathematics(reference: str, answer: str) -> bool:
    from math_verify import parse, verify  # takes 2 s, so imported only for answers that need a parser

    # The dollar signs make math-verify try LaTeX first; a bare number parses either way.
    # Timeouts of math-verify are off: the pool kills what hangs.
    reference, answer = (_BARE_PI.sub(r"\\pi ", text) for text in (reference, answer))
    gold = parse(f"\\boxed{{{reference}}}", parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"the reference answer {reference[:80]!r} cannot be parsed")
    target = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return bool(verify(gold, target, timeout_seconds=None))
