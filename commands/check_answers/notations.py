r"""Other notations of a reference, such as 0.5 for \frac{1}{2} or a reordered set; a judge that rejects one is too strict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from marsrl.commands.check_answers import forms
from marsrl.commands.check_answers.forms import Items

ITSELF = "the reference itself"
_MOST_DIGITS = 40
_SUM = re.compile(r"([\w\\{}^]+)\s*\+\s*([\w\\{}^]+)")
_EMPTY = {r"\emptyset": r"\varnothing", r"\varnothing": r"\emptyset"}
_INTERVAL_FROM = {"(": ">", "[": r"\geq"}
_INTERVAL_TO = {")": "<", "]": r"\leq"}

Rule = Callable[[str], Iterator[str]]


def _dollars(text: str) -> Iterator[str]:
    if forms.words(text) is None:
        yield f"${text}$"


def _spaces(text: str) -> Iterator[str]:
    if forms.is_expression(text) or forms.items(text) is not None:
        yield re.sub(r"(?<=[\w})\]])([-+=])(?=[\w\\({])", r" \1 ", re.sub(r",\s*", r",\\, ", text))


def _fraction(text: str) -> Iterator[str]:
    value = forms.number(text)
    if value is not None and value.denominator > 1:
        sign, over, under = "-" * (value < 0), abs(value.numerator), value.denominator
        yield f"{sign}\\dfrac{{{over}}}{{{under}}}"
        yield f"{sign}{over}/{under}"
        yield f"\\frac{{{sign}{3 * over}}}{{{3 * under}}}"
    elif r"\frac{" in text:
        yield text.replace(r"\frac{", r"\dfrac{")


def _decimal(text: str) -> Iterator[str]:
    value = forms.number(text)
    if value is not None and value.denominator > 1 and (decimal := _decimal_of(value)) is not None:
        yield decimal
    elif value is not None and value.denominator == 1 and "." not in text:
        yield f"{text}.0"


def _decimal_of(value: Fraction) -> str | None:
    r"""Return the exact decimal, with \overline above repeating digits; None for more than 12 digits."""
    whole, rest = divmod(abs(value.numerator), value.denominator)
    digits, seen = "", dict[int, int]()
    while rest and rest not in seen and len(digits) <= 12:
        seen[rest] = len(digits)
        digit, rest = divmod(10 * rest, value.denominator)
        digits += str(digit)
    if len(digits) > 12:
        return None
    if rest:
        digits = rf"{digits[: seen[rest]]}\overline{{{digits[seen[rest] :]}}}"
    return f"{'-' * (value < 0)}{whole}.{digits}"


def _thousands(text: str) -> Iterator[str]:
    if re.fullmatch(r"-?\d{4,40}", text) and not text.lstrip("-").startswith("0"):
        yield f"{int(text):,}"
        yield f"{int(text):,}".replace(",", "{,}")
        yield f"{int(text):,}".replace(",", r"\,")
    elif forms.number(text) is not None and "," in text:
        yield text.replace(",", "")


def _scientific(text: str) -> Iterator[str]:
    if match := forms.SCIENTIFIC.fullmatch(text):
        yield f"{match[1]}e{match[2]}"
        value = Fraction(match[1]) * Fraction(10) ** int(match[2])
        if value.denominator == 1 and abs(int(match[2])) <= _MOST_DIGITS:
            yield str(value)
    elif match := re.fullmatch(r"(\d)(0{4,30})", text):
        yield rf"{match[1]} \times 10^{{{len(match[2])}}}"
        yield f"{match[1]}e{len(match[2])}"


def _power(text: str) -> Iterator[str]:
    if (found := forms.power(text)) is not None:
        base, exponent = found
        if exponent < 0:
            yield rf"\frac{{1}}{{{base}^{{{-exponent}}}}}"
        elif exponent <= 4 * _MOST_DIGITS and len(whole := str(base**exponent)) <= _MOST_DIGITS:
            yield whole


def _percent(text: str) -> Iterator[str]:
    if (percent := forms.percentage(text)) is not None and (share := forms.number(percent)) is not None:
        yield f"{percent}%"
        yield rf"{percent} \%"
        yield f"{percent} percent"
        yield percent
        if (decimal := _decimal_of(share / 100)) is not None and "overline" not in decimal:
            yield decimal.removesuffix(".")


def _unit(text: str) -> Iterator[str]:
    if (quantity := forms.quantity(text)) is not None:
        yield quantity[0]
        yield f"{quantity[0]} {quantity[1]}"
        yield rf"{quantity[0]}\,\mathrm{{{quantity[1]}}}"


def _brackets(text: str) -> Iterator[str]:
    is_other = forms.words(text) is not None or forms.choice(text) is not None or r"\begin" in text or r"\left" in text
    if not is_other and text.count("(") == text.count(")") > 0:
        yield text.replace("(", r"\left(").replace(")", r"\right)")


def _order(text: str) -> Iterator[str]:
    if (
        (items := forms.items(text)) is not None
        and items.opening in ("{", "")
        and r"\ldots" not in text
        and r"\dots" not in text
    ):
        yield items.with_parts(*reversed(items.parts))
    elif forms.is_expression(text) and (both := _SUM.fullmatch(text)) and forms.depths(both[1]) is not None:
        yield f"{both[2]} + {both[1]}"


def _empty(text: str) -> Iterator[str]:
    if text in _EMPTY:
        yield _EMPTY[text]


def _interval(text: str) -> Iterator[str]:
    intervals = forms.intervals(text) or []
    ends = [part for interval in intervals for part in interval.parts]
    is_gap = len(ends) == 4 and ends[1] == ends[2] and all(r"\infty" in end for end in (ends[0], ends[3]))
    if is_gap and (intervals[0].closing, intervals[1].opening) == (")", "("):
        yield rf"\mathbb{{R}}\setminus\{{{ends[1]}\}}"
    inequalities = [_inequality(interval) for interval in intervals]
    if inequalities and all(inequalities):
        yield r" \text{ or } ".join(filter(None, inequalities))


def _inequality(interval: Items) -> str | None:
    first, last = interval.parts
    if r"\infty" in first and r"\infty" in last:
        return None
    if r"\infty" in first:
        return f"x {_INTERVAL_TO[interval.closing]} {last}"
    return f"x {_INTERVAL_FROM[interval.opening]} {first}"


def _choice(text: str) -> Iterator[str]:
    if (letter := forms.choice(text)) is not None:
        yield from (letter.lower(), f"({letter})", f"{letter}.", rf"\text{{{letter}}}")


def _words(text: str) -> Iterator[str]:
    if (said := forms.words(text)) is not None:
        yield from (said.upper(), f"{said}.")


def _text(text: str) -> Iterator[str]:
    if (said := forms.words(text)) is not None:
        yield rf"\text{{{said}}}"


RULES: dict[str, Rule] = {
    ITSELF: lambda text: iter(()),
    "dollar signs": _dollars,
    "spaces": _spaces,
    "another fraction": _fraction,
    "a decimal": _decimal,
    "thousands separators": _thousands,
    "scientific notation": _scientific,
    "a power written out": _power,
    "a percentage": _percent,
    "a unit written otherwise, or left out": _unit,
    r"\left and \right": _brackets,
    "another order": _order,
    "another empty set": _empty,
    "an interval as an inequality": _interval,
    "a choice's letter": _choice,
    "words in another case": _words,
    r"words in \text": _text,
}
_OF_WORDS = (ITSELF, "words in another case")


def of(reference: str, *, is_text: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (rule, answer) for the reference itself and then its other notations. is_text: answers are compared as text."""
    yield ITSELF, reference
    if len(reference) > forms.LONGEST:
        return
    text = reference if is_text else forms.plain(reference)
    for name, rule in RULES.items():
        if not is_text or name in _OF_WORDS:
            yield from ((name, answer) for answer in rule(text) if answer != reference)
