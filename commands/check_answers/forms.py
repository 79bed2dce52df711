r"""Parsers of reference answers: numbers, quantities, lists, intervals, choices, words.

They share no code with the judge, which is under test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

LONGEST = 500
"""Maximum characters of a reference. Longer references parse slowly, so no other answers are made from them."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,60})"
_NUMBER = re.compile(rf"([-+]?)(?=[\d.])({_DIGITS})?(\.\d{{1,60}})?")
_THIN = re.compile(r"\\!\s*")
_FRACTION = re.compile(r"([-+]?)(?:\\[dt]?frac\{(\d{1,60})\}\{(\d{1,60})\}|(\d{1,60})/(\d{1,60}))")
_PERCENT = re.compile(r"(.*\d)\s*(?:\\?%|percent)")
_POWER = re.compile(r"(\d{1,6})\^(?:\{(-?\d{1,6})\}|(\d))")
SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)\s*\\(?:times|cdot)\s*10\^\{?(-?\d{1,3})\}?")
_CHOICE = re.compile(r"(?:\\text(?:bf)?\{)?\(?([A-H])\)?\}?")
_WORDS = re.compile(r"(?:\\text\{)?([A-Za-z][A-Za-z' ]{1,60})\}?")
OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_UNIT = re.compile(
    r"(.*?\d\}?)(?:(?:\s|\\[,;: ]|~)*\\(?:text|mathrm|mbox)\{\s*([A-Za-z]+)\s*\}|(?:\s|\\[,;: ]|~)+([A-Za-z]+))"
)
_SI = re.compile(r"([kMmcnGd]?)(m|g|s|J|N|W|V|A|K|Pa|Hz|L|l|mol|eV)")
_DEGREES = re.compile(r"(.*\d\s*\^\{?\\circ\}?\s*(?:\\(?:text|mathrm)\{)?)([CF])(\}?)")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_AND = re.compile(r"\s*\\text\{\s*,?\s*(?:and|or)\s*\}\s*|\s+(?:and|or)\s+")
RELATION = re.compile(r"[=<>]|\\(?:leq?|geq?|neq?|in|notin|equiv|approx|sim|subset|to|mapsto|lt|gt)(?![a-zA-Z])")
# Expressions whose value may survive a changed number or sign: zero factors, periodic functions, rounding, \pm.
UNSAFE = re.compile(
    r"(?<![\d.])0(?![\d.])|(?<![\d.])1\s*\^|\(\s*-|\\(?:sin|cos|tan|cot|sec|csc|arc|log|ln|lg|lfloor|lceil|gcd|lcm|max|min|lim|sum|int|"
    r"prod|pm|mp|infty|cup|cap|binom|tbinom|dbinom|choose|emptyset|varnothing|mathbb|setminus|arg|det|Re|Im|operatorname|forall|exists|bmod|pmod|mod)|C\b"
)


def plain(text: str) -> str:
    """Return the text without outer dollar signs, currency signs and thousands separators."""
    return _THIN.sub("", text).replace("{,}", ",").strip().strip("$").removeprefix(r"\$").strip()


def number(text: str) -> Fraction | None:
    """Return the value of an integer, a decimal, or a fraction of integers."""
    if match := _NUMBER.fullmatch(text):
        return Fraction(f"{match[1]}{(match[2] or '0').replace(',', '')}{match[3] or ''}")
    if match := _FRACTION.fullmatch(text):
        over, under = int(match[2] or match[4]), int(match[3] or match[5])
        return None if under == 0 else Fraction(over, under) * (-1 if match[1] == "-" else 1)
    return None


def percentage(text: str) -> str | None:
    """Return the number of a percentage, as text."""
    found = _PERCENT.fullmatch(text)
    return found[1].strip() if found and number(found[1].strip()) is not None else None


def power(text: str) -> tuple[int, int] | None:
    """Return (base, exponent) of a power of integers with a base of at least 2."""
    found = _POWER.fullmatch(text)
    return (int(found[1]), int(found[2] or found[3])) if found and int(found[1]) > 1 else None


def choice(text: str) -> str | None:
    found = _CHOICE.fullmatch(text)
    return found and found[1]


def words(text: str) -> str | None:
    """Return the text if it consists of words (Lima, no solution, yes) rather than a product of variables."""
    match = _WORDS.fullmatch(text)
    if match is None or (match[1].lower() not in OPPOSITES and len(re.findall("[aeiouy]", match[1].lower())) < 2):
        return None
    return match[1].strip()


def quantity(text: str) -> tuple[str, str] | None:
    """Return (number as text, unit) of a quantity, such as `3 kJ`, `12 cats` or 5 \\text{ km}."""
    found = _unit_of(text)
    return None if found is None else (found[1].strip(), found[2] or found[3])


def other_unit(text: str) -> str | None:
    """Return the same number with another unit, which is a wrong answer; None if the text is not a quantity."""
    if degrees := _DEGREES.fullmatch(text):
        return f"{degrees[1]}{'F' if degrees[2] == 'C' else 'C'}{degrees[3]}"
    if (found := _unit_of(text)) is None:
        return None
    start, end = found.span(2 if found[2] else 3)
    si = _SI.fullmatch(text[start:end])
    other = "zebras" if si is None else si[2] if si[1] else f"k{si[2]}"
    return f"{text[:start]}{other}{text[end:]}"


def _unit_of(text: str) -> re.Match[str] | None:
    match = _UNIT.fullmatch(text)
    if match is None or number(match[1].strip()) is None or "percent" in (match[2], match[3]):
        return None
    return match if match[2] or len(match[3]) > 3 or _SI.fullmatch(match[3]) else None


@dataclass(frozen=True, slots=True)
class Items:
    """A list, set, tuple or interval. opening: "(", "[", "{", or "" without brackets; separator: text between items."""

    opening: str
    parts: tuple[str, ...]
    closing: str
    separator: str = ", "

    def with_parts(self, *parts: str) -> str:
        return replace(self, parts=parts).in_brackets(self.opening, self.closing)

    def in_brackets(self, opening: str, closing: str) -> str:
        escaped = {"{": r"\{", "}": r"\}"}
        return f"{escaped.get(opening, opening)}{self.separator.join(self.parts)}{escaped.get(closing, closing)}"

    @property
    def is_interval(self) -> bool:
        """True if the items can only be an interval: an end is infinite, or one end is open and the other closed."""
        is_mixed = (self.opening, self.closing) in (("(", "]"), ("[", ")"))
        return len(self.parts) == 2 and (is_mixed or any(r"\infty" in part for part in self.parts))


def items(text: str) -> Items | None:
    """Parse a list, a set, a tuple or an interval; None for fewer than two items and for any other text."""
    if number(text) is not None or (RELATION.search(text) and not _AND.search(text)):
        return None
    plain = text.replace(r"\left", "").replace(r"\right", "").strip()
    opening = next((mark for mark, shown in (("{", r"\{"), ("(", "("), ("[", "[")) if plain.startswith(shown)), "")
    inner, closing = plain, ""
    if opening and plain[-1] in ")]}":
        head, tail = (2 if opening == "{" else 1), (2 if plain.endswith(r"\}") else 1)
        body = plain[head:-tail]
        if depths(body) is not None and (plain[-1] == "}") == (opening == "{"):
            inner, closing = body, plain[-1]
    if not closing:
        opening = ""
    parts = _split(_AND.sub(", ", inner).replace(", ,", ","))
    if parts is None or len(parts) < 2 or len(set(parts)) < len(parts) or not all(parts):
        return None
    said = _AND.search(inner)
    return Items(opening, tuple(parts), closing, said[0] if said and len(parts) == 2 else ", ")


def intervals(text: str) -> list[Items] | None:
    """Parse a union of intervals that each have at least one infinite end; None for other texts."""
    parts = [items(part.strip()) for part in text.split(r"\cup")]
    known = [interval for interval in parts if interval is not None and interval.is_interval]
    return (
        known
        if len(known) == len(parts) and all(any(r"\infty" in p for p in interval.parts) for interval in known)
        else None
    )


def is_expression(text: str) -> bool:
    """Return True for a mathematical expression with one value; False for a number, list, relation, quantity or text."""
    others = (number, percentage, choice, words, quantity, items, other_unit)
    if RELATION.search(text) or any(read(text) is not None for read in others):
        return False
    return (
        r"\begin" not in text and r"\text" not in text and bool(re.search(r"[\d\w]", text)) and depths(text) is not None
    )


def depths(text: str) -> list[int] | None:
    """Return the bracket depth before each character; None if brackets do not balance. "(1, 2]" counts as balanced."""
    before, depth = [], 0
    for mark in text:
        before.append(depth)
        depth += (mark in "([{") - (mark in ")]}")
        if depth < 0:
            return None
    return before if depth == 0 else None


def _split(text: str) -> list[str] | None:
    """Split the text at commas outside brackets; None if brackets do not balance."""
    if (levels := depths(text)) is None:
        return None
    parts, start = [], 0
    for position, (mark, level) in enumerate(zip(text, levels, strict=True)):
        if mark == "," and level == 0 and not text[:position].endswith("\\"):
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]
