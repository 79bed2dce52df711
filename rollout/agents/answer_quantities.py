r"""Equality of two numbers or quantities. The texts of a line are equal:

1,234 and 1234.0       numbers, by value
5 km, 5000 m and 5     quantities; metric prefixes are converted, and one side may omit the unit
28\%, 0.28 and 28      percentages
\$5 and 5 dollars      amounts of money
101_2 and 101          numbers with a base, which one side may omit
"""

from __future__ import annotations

import math
import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from marsrl.rollout.agents.answer_latex import Tokens, stripped
from marsrl.rollout.agents.answer_values import constant, same_value

_FRACTION = re.compile(r"([+-]?)\\[dtc]?frac\s*(?:\{(\d{1,1000})\}|(\d))\s*(?:\{(\d{1,1000})\}|(\d))")  # \frac12
_NUMBER = re.compile(
    r"([+-]?)\s*(\d{1,3}(?:,\d{3}){1,300}|\d{1,1000}|(?=\.\d))(\.\d{0,1000})?"
    r"(?:e([+-]?\d{1,3})|\s*(?:\\times|\\cdot|\*|×|·)\s*10\s*\^\s*\{?\s*([+-]?\d{1,3})\s*\}?)?(?:\s*/\s*(\d{1,1000}))?",
    re.IGNORECASE,
)
_MIXED = re.compile(r"([+-]?)(\d{1,1000}) ?((?<= )\d{1,1000}\s*/\s*\d{1,1000}|\\[dtc]?frac.*)")  # 1 1/2, 1\frac12
_POWER_OF_TEN = re.compile(r"([+-]?)10\s*\^\s*\{?\s*([+-]?\d{1,3})\s*\}?")
_REPEATING = re.compile(  # 0.1\overline{6}, 0.1(6), 0.1666...
    r"([+-]?)(\d{0,100})\.(\d{0,100}?)(?:\\(?:overline|bar)\s*\{(\d{1,100})\}|\((\d{1,100})\)|(\d)\6\6+\s*(?:\.{2,3}|\\[lc]?dots))"
)
_DOTTED = re.compile(r"\\dot\s*\{?(\d)\}?(?:(\d{0,100})\\dot\s*\{?(\d)\}?)?$")  # 0.\dot{3}, 0.\dot{1}2\dot{3}
_LARGEST = 10**1000  # Python raises ValueError when it writes numbers of more than 4300 digits.
_ROUNDED_DIGITS = 6  # a decimal with this many significant digits also equals values that round to it


def number(text: str) -> Fraction | None:
    """Return the value of an integer, a decimal, a fraction of integers or a mixed number; None for anything else."""
    text = _DOTTED.sub(lambda match: rf"\overline{{{''.join(filter(None, match.groups()))}}}", text)
    if match := _FRACTION.fullmatch(text):
        sign, over, under = match[1], match[2] or match[3], match[4] or match[5]
        exponent = "0"
    elif match := _NUMBER.fullmatch(text):
        sign, under, exponent = match[1], match[6] or "1", match[4] or match[5] or "0"
        over = match[2].replace(",", "") + (match[3] or "")
    elif match := _POWER_OF_TEN.fullmatch(text):
        sign, over, under, exponent = match[1], "1", "1", match[2]
    elif match := _MIXED.fullmatch(text):
        part = number(match[3])
        return None if part is None else Fraction(f"{match[1]}1") * (int(match[2]) + part)
    elif match := _REPEATING.fullmatch(text):
        sign, whole, before, *repeated = match.groups()
        period = next(digits for digits in repeated if digits)
        value = Fraction(f"0{whole}.{before}0") + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(before))
        return Fraction(f"{sign}1") * value
    else:
        return None
    return None if int(under) == 0 else Fraction(f"{sign}{over}") * Fraction(10) ** int(exponent) / int(under)


_PREFIXES = {"n": -9, "u": -6, "m": -3, "c": -2, "d": -1, "k": 3, "M": 6, "G": 9}
_LONG_PREFIXES = {"nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1, "kilo": 3, "mega": 6, "giga": 9}
_METRIC = {
    "m": "meter metre", "g": "gram gramme", "s": "second sec", "J": "joule", "W": "watt", "V": "volt", "A": "ampere amp",
    "N": "newton", "Pa": "pascal", "Hz": "hertz", "L": "liter litre", "mol": "mole", "eV": "electronvolt", "K": "kelvin",
    "C": "coulomb", "T": "tesla", "F": "farad", "Ω": "ohm",
}  # fmt: skip
_OTHERS = {
    "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile", "oz": "ounce", "lb": "pound", "min": "minute",
    "h": "hour hr", "day": "", "week": "", "month": "", "year": "yr", "am": "a.m", "pm": "p.m", "dollar": "usd $",
    "euro": "eur €", "pound sterling": "£ gbp", "yen": "¥", "rupee": "₹", "°": "degree deg", "°C": "celsius", "°F": "fahrenheit",
    "rad": "radian", "%": "percent pct percentage",
}  # fmt: skip
# Denominators of fractions in words (3 fifths). Quarters are not among them, because they may be coins.
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10,
    "hundredth": 100, "thousandth": 1000, "millionth": 10**6,
}  # fmt: skip
_SCALES: dict[str, int | Fraction] = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SCALES |= {f"{name}s": Fraction(1, parts) for name, parts in _PARTS.items()}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}  # 5 meters squared
# Words that are not units, as in "5 minus one" and "5 or more".
_NO_UNITS = frozenset(
    ["plus", "minus", "over", "divided", "multiplied", "factorial", "mod", "modulo", "choose",
     "or", "not", "least", "most", "negative"]
)  # fmt: skip
_CURRENCIES = {"\\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}
_SIGNS = frozenset(["°", "%", "¢", "/", "\\cdot", "\\mu", "\\Omega", ".", " ", *_CURRENCIES])
_DEGREES = r"(?:°|\bdeg(?:ree)?s?\b)\s*"
_ANGLES = frozenset(["\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc"])
_SPELLINGS = [
    (re.compile(_DEGREES + r"c(?:elsius)?\b", re.IGNORECASE), " celsius"),
    (re.compile(_DEGREES + r"f(?:ahrenheit)?\b", re.IGNORECASE), " fahrenheit"),
    (re.compile(r"\bper cent\b"), "percent"),
    (re.compile(r"\bmph\b"), "mi/h"),
    (re.compile(r"\b(?:kph|kmh)\b"), "km/h"),
    (re.compile(r"\\mu\s*"), "u"),
    (re.compile(r"\\Omega"), "Ω"),
    (re.compile(r"\\cdot"), " "),
    (re.compile(r"\\\$"), "$"),
]
_PIECE = re.compile(r"(/|\bper\b)|\^\s*\{?\s*(-?\d)\s*\}?|([^\W\d_](?:\.?[^\W\d_])*|[^\w\s.])\.?|[\s.]+")
_BASE = re.compile(r"(\d[0-9a-fA-F]*|[a-fA-F]\d[0-9a-fA-F]*)\s*_\s*\{?(\d+)\}?")


def _table() -> dict[str, tuple[str, Fraction]]:
    """Build {symbol or word: (base unit, size in base units)}."""
    unity = Fraction(1)
    table = {
        "cent": ("dollar", unity / 100),
        "¢": ("dollar", unity / 100),
        "l": ("L", unity),
        "ml": ("L", unity / 1000),
    }
    for base, words in (_METRIC | _OTHERS).items():
        table |= dict.fromkeys([base, *words.split()], (base, unity))
    for base, words in _METRIC.items():
        table |= {
            prefix + base: (base, Fraction(10) ** power)
            for prefix, power in _PREFIXES.items()
            if prefix + base not in table
        }
        for word in words.split():
            table |= {prefix + word: (base, Fraction(10) ** power) for prefix, power in _LONG_PREFIXES.items()}
    return table


_UNITS = _table()
_CASES = Counter(name.lower() for name in _UNITS)
_FOLDED = {name.lower(): name for name in _UNITS if _CASES[name.lower()] == 1}  # KJ means kJ; mw may be mW or MW
_PERCENT = (("%", 1),)


class Quantity(NamedTuple):
    number: list[str]
    unit: tuple[tuple[str, int], ...]
    """base units and their powers, sorted"""
    scale: Fraction
    """base units per unit; 1000 for km"""


def quantity(part: Tokens) -> Quantity | None:
    """Read a number with a unit, which may be words (12 red cats); None: no unit, or letters that may be variables."""
    sign = list(part[:1]) if part[:1] in (["-"], ["+"]) else []
    if part[len(sign) : len(sign) + 1] and (currency := _CURRENCIES.get(part[len(sign)])):
        rest = stripped(part[len(sign) + 1 :])
        if not _CURRENCIES.keys().isdisjoint(rest):
            return None
        inner = quantity(rest)  # \$5 million
        if inner and inner.unit:
            return None
        return Quantity(sign + (inner.number if inner else rest), ((currency, 1),), Fraction(1))
    start = end = len(part)
    while start:
        power = start  # start of a unit's power: ^2, ^{-1}
        if part[start - 1].isdigit() or part[start - 1] == "}":
            power = max((i for i in range(max(start - 5, 1), start) if part[i] == "^"), default=start)
        if not _is_unit_part(part[power - 1]):
            break
        start = power - 1
    words = next((i for i in range(start, end) if part[i].startswith("\\text{")), end)
    has_variables = any(token.isalpha() for token in part[:start])
    if part[start : start + 1] == ["°"] and not _ANGLES.isdisjoint(part[:start]):
        return None  # \\sin 30°
    found = None if has_variables else _with_unit(part[:start], part[start:], words < end)
    return found or (_with_unit(part[:words], part[words:], True) if words < end else None)


def _is_unit_part(token: str) -> bool:
    return token in _SIGNS or token.isalpha() or token.startswith("\\text{")


def _with_unit(number: Tokens, tail: Tokens, is_text: bool) -> Quantity | None:
    """Return the quantity if the tail is a unit. is_text: the tail is in \\text{}, where unknown words are units too."""
    has_space = tail[:1] == [" "]
    number, tail = stripped(number), stripped(tail)
    if not number or number[-1] in ("+", "-", "^", "_") or not tail or tail[0] in ("/", "\\cdot", "."):
        return None
    text = "".join(f" {token[6:-1]} " if token.startswith("\\text{") else token for token in tail)
    if not is_text and not has_space and len(text) == 1 and text.isalpha():
        return None  # 5m may be a product
    for pattern, name in _SPELLINGS:
        text = pattern.sub(name, text)
    units: list[tuple[str, Fraction, int]] = []  # (name, size in base units, power)
    count, sign, power = Fraction(1), 1, 1
    at = 0
    while at < len(text):
        if (match := _PIECE.match(text, at)) is None:
            return None
        at = match.end()
        per, exponent, name = match.groups()
        word = (name or "").lower()
        if word in _PARTS and not text[at:].strip():
            word += "s"  # 1 third; but 5 third graders
        # 20 people per thousand has a unit; 12 and a half has none.
        is_scale = word in _SCALES and not (units and sign < 0)
        if word in _NO_UNITS or (word in _POWERS_AFTER and not units) or (is_scale and units):
            return None
        if per:
            sign = -1
        elif (exponent or word in _POWERS_AFTER) and units:
            base, factor, before = units.pop()
            units.append((base, factor, before * int(exponent or _POWERS_AFTER[word])))
        elif word in _POWERS:
            power = _POWERS[word]
        elif is_scale:
            count *= Fraction(_SCALES[word]) ** sign
            sign = 1
        elif name:
            base, factor = _unit(name)
            if factor == 0 and not is_text and (len(name) < 3 or not (has_space or units)):
                return None
            units.append((base, factor or Fraction(1), sign * power))
            sign = power = 1
    if any(abs(each[2]) > 9 for each in units) or (not units and count == 1):
        return None
    powers: Counter[str] = Counter()
    for base, _, power in units:
        powers[base] += power
    scale = math.prod((factor**power for _, factor, power in units), start=Fraction(1))
    if max(count.numerator, count.denominator, scale.numerator, scale.denominator) > _LARGEST:
        return None
    if count != 1:
        number = _times(number, count)
    return Quantity(number, tuple(sorted(powers.items())), scale)


def _unit(name: str) -> tuple[str, Fraction]:
    """Return (base unit, size in base units); for an unknown unit (the word in the singular, 0)."""
    lower = name.lower()
    for spelling in (name, lower, lower.removesuffix("s"), lower.removesuffix("es"), _FOLDED.get(lower, "")):
        if spelling in _UNITS:
            return _UNITS[spelling]
    return (lower.removesuffix("s") if len(name) > 2 else name), Fraction(0)


def same_quantity(reference: Tokens, answer: Tokens) -> bool:
    """Return True if the numbers are equal, and the units if both have one. Only metric prefixes are converted."""
    base, other_base = (_BASE.fullmatch("".join(part)) for part in (reference, answer))
    if base and other_base:
        return base[1].lower() == other_base[1].lower() and base[2] == other_base[2]
    if base or other_base:  # the base may be omitted
        digits, bare = (base, answer) if base else (other_base, reference)
        return digits is not None and _is_in_base(*digits.groups()) and digits[1].lower() == "".join(bare).lower()
    a, b = quantity(reference), quantity(answer)
    if a and b and a.unit and b.unit:
        if a.scale == b.scale:
            return a.unit == b.unit and _same_number(a.number, b.number)
        return a.unit == b.unit and _same_number(_times(a.number, a.scale), _times(b.number, b.scale))
    if a and a.unit == _PERCENT:
        return _same_number(a.number, answer) or _same_number(_hundredth(a.number), answer)
    if b and b.unit == _PERCENT:
        value = constant(reference)
        is_proportion = value is None or -1 <= value <= 1  # a bare 28 equals 28 %, but a bare 1 does not equal 1 %
        return _same_number(reference, _hundredth(b.number)) or (
            not is_proportion and _same_number(reference, b.number)
        )
    return _same_number(a.number if a else reference, b.number if b else answer)


def _is_in_base(digits: str, base: str) -> bool:
    return all(int(digit, 16) < int(base) for digit in digits)


def _hundredth(part: Tokens) -> list[str]:
    return ["(", *part, ")", "/", "100"]


def _times(number: Tokens, factor: Fraction) -> list[str]:
    return ["(", *number, ")", "\\cdot", "(", str(factor.numerator), "/", str(factor.denominator), ")"]


def _same_number(reference: Tokens, answer: Tokens) -> bool:
    a, b = number("".join(reference)), number("".join(answer))
    if a is not None and b is not None and a == b:
        return True
    if (a is None or b is None) and same_value(reference, answer):
        return True
    return _rounds_to(reference, a, answer) or _rounds_to(answer, b, reference)


def _rounds_to(part: Tokens, value: Fraction | None, exact: Tokens) -> bool:
    """Return True if the exact number rounds to this decimal, which must have _ROUNDED_DIGITS significant digits or more."""
    text = "".join(part).lstrip("+-")
    digits, point, decimals = text.partition(".")
    if value is None or not point or not decimals.isdigit() or "." in "".join(exact):
        return False
    if len((digits + decimals).lstrip("0")) < _ROUNDED_DIGITS:
        return False
    other = constant(exact)
    return isinstance(other, Fraction) and abs(other - value) <= Fraction(1, 2 * 10 ** len(decimals))
