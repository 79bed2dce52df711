r"""Wrong answers made from a reference; the judge must not reward any of them.

A rule yields an answer only if its change is certain to alter the value: it changes a digit of 1/2, but not of \sin(2\pi),
whose value would stay 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random

from marsrl.commands.check_answers import forms
from marsrl.rollout.tasks.placeholders import is_placeholder

TINY = r"\frac{7}{10^{30}}"
_UNHEARD = "987654321"  # a value that no reference contains
_PLACEHOLDERS = ("proof", "notfound")
PLACEHOLDER = "a placeholder"
_INTEGER = re.compile(r"(?<![\d_])(?<!_\{)\d+")
_EXPONENT = re.compile(r"\^(?:\{(-?\d{1,6})\}|(\d))")
_SIGN = re.compile(r"(?<=[\w})\]'])\s*([+-])\s*(?=[\w\\({])")
_FRACTION = re.compile(r"\\([dt]?)frac\{(\d+)\}\{(\d+)\}|(?<!\d)(\d+)/(\d+)(?!\d)")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[xyzabrst](?![a-zA-Z])")
_VECTOR = re.compile(r"\\(?:mathbf|vec|hat|boldsymbol|overrightarrow)")
_MODULUS = re.compile(r"(\\(?:pmod|bmod|mod)\s*\{?\s*)(\d+)")
_ROWS = re.compile(r"(\\begin\{(?:cases|[pbB]?matrix|array)\}(?:\{[^}]*\})?)(.*?)(\\end\{\w+\})", re.DOTALL)
_I = re.compile(r"(?<![\\a-zA-Z])i(?![a-zA-Z])")
_IS_0 = re.compile(r"=\s*0$")
_TURNED = {r"\leq": r"\geq", r"\geq": r"\leq", r"\le": r"\ge", r"\ge": r"\le", "<": ">", ">": "<"}
_STRICT = {r"\leq": "<", r"\geq": ">", r"\le": "<", r"\ge": ">"}
_TURNS = re.compile(r"\\[lg]eq?(?![a-zA-Z])|[<>]")

Rule = Callable[[str, Random], Iterator[str]]


def _is_safe(text: str) -> bool:
    """Return True if changing a number or sign is certain to change the value of this expression or equation."""
    if _SIGN.search(text):
        text = _IS_0.sub("", text)
    return forms.UNSAFE.search(text) is None and not (_I.search(text) and r"\pi" in text)


def _is_plain(text: str) -> bool:
    """Return True for a number, a percentage, a quantity, or a list, tuple or set of numbers."""
    listed = forms.items(text)
    parts = [text] if listed is None else listed.parts
    reads = (forms.number, forms.percentage, forms.quantity)
    return all(any(read(part) is not None for read in reads) for part in parts)


def _digit(text: str, rng: Random) -> Iterator[str]:
    is_of_words = forms.words(re.sub(r"\s*\d+", "", text)) is not None
    equals_number = "=" in text and forms.number(text.rpartition("=")[2].strip()) not in (None, 0)
    if not (_is_plain(text) or is_of_words or equals_number or (_is_safe(text) and not forms.choice(text))):
        return
    matches = [*_INTEGER.finditer(text)]
    if equals_number:  # change only the number after "=", as in \gcd(a, b) = 2: other changes could keep the meaning
        matches = [match for match in matches if match.start() > text.rindex("=")]
    if matches:
        position = rng.choice(matches).end() - 1
        digit = int(text[position])
        yield f"{text[:position]}{digit + 1 if digit < 9 else 8}{text[position + 1 :]}"


def _sign(text: str, rng: Random) -> Iterator[str]:
    value = forms.number(text)
    if value is not None:
        if value:
            yield text.removeprefix("-") if text.startswith("-") else f"-{text.removeprefix('+')}"
        return
    found = [*_SIGN.finditer(text)]
    if found and _is_safe(text) and forms.words(text) is None and not forms.SCIENTIFIC.fullmatch(text):
        sign = rng.choice(found)
        yield f"{text[: sign.start(1)]}{'-' if sign[1] == '+' else '+'}{text[sign.end(1) :]}"


def _one_more(text: str, rng: Random) -> Iterator[str]:
    value = forms.number(text)
    if value is not None and value.denominator == 1:
        yield str(value + 1)
    elif forms.is_expression(text) and _is_safe(text):
        yield f"{text} + 1"


def _factor(text: str, rng: Random) -> Iterator[str]:
    if forms.number(text):
        yield rf"{text}\sqrt{{2}}"
        yield rf"{text}\sqrt(2)"  # models also write parentheses in place of braces


def _exponent(text: str, rng: Random) -> Iterator[str]:
    if not _is_safe(text):
        return
    if found := [*_EXPONENT.finditer(text)]:
        each = rng.choice(found)
        yield f"{text[: each.start()]}^{{{int(each[1] or each[2]) + 1}}}{text[each.end() :]}"


def _magnitude(text: str, rng: Random) -> Iterator[str]:
    value, percentage = forms.number(text), forms.percentage(text)
    if value:
        yield str(10 * value)
    elif percentage is not None and (share := forms.number(percentage)):
        yield rf"{100 * share}\%"


def _fraction(text: str, rng: Random) -> Iterator[str]:
    matches = [match for match in _FRACTION.finditer(text) if len({match[2] or match[4], match[3] or match[5]}) == 2]
    if matches and (forms.number(text) or (forms.is_expression(text) and _is_safe(text))):
        match = rng.choice(matches)
        if int(match[2] or match[4]):
            yield f"{text[: match.start()]}\\frac{{{match[3] or match[5]}}}{{{match[2] or match[4]}}}{text[match.end() :]}"


def _dropped(text: str, rng: Random) -> Iterator[str]:
    if (items := forms.items(text)) is not None:
        yield items.parts[0]
        if len(items.parts) > 2 or items.opening == "{":
            yield items.with_parts(*items.parts[:-1])


def _added(text: str, rng: Random) -> Iterator[str]:
    if (items := forms.items(text)) is not None:
        yield items.with_parts(*items.parts, _UNHEARD)
    elif forms.number(text) is not None:
        yield f"{text}, {_UNHEARD}"


def _order(text: str, rng: Random) -> Iterator[str]:
    if (items := forms.items(text)) is not None and items.opening in ("(", "[") and not items.is_interval:
        yield items.with_parts(*reversed(items.parts))


def _brackets(text: str, rng: Random) -> Iterator[str]:
    if (items := forms.items(text)) is None or not items.opening:
        return
    if items.is_interval:
        ends = {"(": "[", "[": "(", ")": "]", "]": ")"}
        if r"\infty" in items.parts[1]:
            yield items.in_brackets(ends[items.opening], items.closing)
        else:
            yield items.in_brackets(items.opening, ends[items.closing])
    elif items.opening in "({":
        yield items.in_brackets(*("{}" if items.opening == "(" else "()"))


def _relation(text: str, rng: Random) -> Iterator[str]:
    if len(found := _TURNS.findall(text)) == 1:
        yield _TURNS.sub(lambda mark: f"{_TURNED[mark[0]]} ", text)
        if found[0] in _STRICT:
            yield _TURNS.sub(lambda mark: f"{_STRICT[mark[0]]} ", text)


def _part(text: str, rng: Random) -> Iterator[str]:
    has_variable = _VARIABLE.search(text) or _VECTOR.search(text)
    if has_variable and forms.is_expression(text) and _is_safe(text) and (found := _INTEGER.search(text)):
        yield found[0]


def _variable(text: str, rng: Random) -> Iterator[str]:
    if forms.is_expression(text) and (found := sorted(set(_VARIABLE.findall(text)))):
        old = rng.choice(found)
        new = next(each for each in "wuvpq" if each not in text)
        yield re.sub(rf"(?<![\\a-zA-Z]){old}(?![a-zA-Z])", new, text)


def _prime(text: str, rng: Random) -> Iterator[str]:
    if re.search(r"[a-zA-Z]'", text) and forms.words(text) is None:
        yield text.replace("'", "", 1)


def _modulus(text: str, rng: Random) -> Iterator[str]:
    if len(_MODULUS.findall(text)) == 1:
        yield _MODULUS.sub(lambda each: f"{each[1]}{int(each[2]) + 2}", text)


def _rows(text: str, rng: Random) -> Iterator[str]:
    if (match := _ROWS.search(text)) is None:
        return
    rows = [row.strip() for row in match[2].strip().removesuffix(r"\\").split(r"\\")]
    if len(rows) < 2 or len(set(rows)) < len(rows):
        return
    if "cases" in match[1]:
        first, second = (row.partition("&") for row in rows[:2])
        if first[0].strip() == second[0].strip() or not first[2] or not second[2]:
            return
        rows[:2] = [f"{second[0]}&{first[2]}", f"{first[0]}&{second[2]}"]
    else:
        rows[0], rows[1] = rows[1], rows[0]
    yield " ".join([text[: match.start(2)], r" \\ ".join(rows), text[match.end(2) :]])


def _unit(text: str, rng: Random) -> Iterator[str]:
    if (other := forms.other_unit(text)) is not None:
        yield other


def _choice(text: str, rng: Random) -> Iterator[str]:
    if (letter := forms.choice(text)) is not None:
        yield rng.choice([each for each in "ABCDE" if each != letter])


def _words(text: str, rng: Random) -> Iterator[str]:
    if (said := forms.words(text)) is not None:
        yield rf"\text{{{forms.OPPOSITES.get(said.lower(), f'not {said}')}}}"


def _tiny(text: str, rng: Random) -> Iterator[str]:
    if forms.choice(text) is None and "30" not in text:
        yield TINY


def _placeholder(text: str, rng: Random) -> Iterator[str]:
    yield from [text] if is_placeholder(text) else _PLACEHOLDERS


RULES: dict[str, Rule] = {
    "a digit changed": _digit,
    "a sign flipped": _sign,
    "one more": _one_more,
    "an exponent changed": _exponent,
    "a factor more": _factor,
    "another magnitude": _magnitude,
    "numerator and denominator swapped": _fraction,
    "elements dropped": _dropped,
    "an element added": _added,
    "a tuple reversed": _order,
    "other brackets": _brackets,
    "another relation": _relation,
    "a part alone": _part,
    "a variable renamed": _variable,
    "a prime dropped": _prime,
    "another modulus": _modulus,
    "rows swapped": _rows,
    "another unit": _unit,
    "another choice": _choice,
    "other words": _words,
    "a tiny constant": _tiny,
    PLACEHOLDER: _placeholder,
}
_OF_WORDS = ("a digit changed", "other words", PLACEHOLDER)


def of(reference: str, rng: Random, *, is_text: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (rule, answer) for wrong answers made from the reference.

    is_text: answers are compared as text, so only words and digits are changed.
    """
    text = reference if is_text else forms.plain(reference)
    names = [PLACEHOLDER] if len(text) > forms.LONGEST else _OF_WORDS if is_text else RULES
    for name in names:
        yield from ((name, answer) for answer in RULES[name](text, rng) if answer != text or name == PLACEHOLDER)
