r"""Equality of two mathematical answers, part by part: lists, pairs, sets, intervals, inequalities, equations and matrices.

    1, 2       a list, in any order; may equal a pair or set. Also lists: 2 and 1, x=1 \text{ or } x=2, \frac32 \pm \frac12
    (1, 2)     a pair, in this order, unlike the set \{1, 2\}; an interval if it is compared with an interval or inequality
    [2, \infty), x \geq 2, \{x : 2 \leq x\}, \mathbb{R} \setminus (-\infty, 2)
               sets of real numbers, by sympy
    y = 2x+1   an equation: equals 4x-2y+2=0, and the bare 2x+1
Single parts are compared by answer_quantities.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from marsrl.rollout.agents.answer_latex import Tokens, bracketed, joined, normal, split, stripped
from marsrl.rollout.agents.answer_quantities import same_quantity
from marsrl.rollout.agents.answer_values import constant, proportional

if TYPE_CHECKING:
    from sympy import Expr, Set

_AND, _OR = (r"\text{and}", r"\land"), (r"\text{or}", r"\lor")
_SEPARATORS = (",", ";", r"\text{and}", *_OR)
_RELATIONS = ("=", "<", ">", r"\leq", r"\geq", r"\neq", r"\in", r"\approx", r"\equiv")
_MIRRORED = {">": "<", r"\geq": r"\leq"}
_MATRICES = ("matrix", "pmatrix", "bmatrix", "smallmatrix", "array")
_SIGNS = {r"\pm": ("+", "-"), r"\mp": ("-", "+")}


_NAME = re.compile(
    r"(?:\\text\{[^{}]*\}|\\(?:vec|bar|hat|tilde|mathcal) \{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z](?: [a-zA-Z]){2,}|[a-zA-Z])"
    r"(?: ?_\{[^{}]*\}| ?'| ?\^\{-1 \})*(?: ?\((?:[^()]|\([^()]*\))*\))?"
)
_NO_NAMES = frozenset(["e", "i", r"\infty", r"\pi", r"\emptyset"])
_REGION_MARKS = frozenset(["(", "[", r"\{", "<", ">", r"\leq", r"\geq", r"\neq", r"\in", r"\mathbb", r"\emptyset"])


@dataclass(frozen=True)
class Several:
    """Parts of an answer.

    brackets: "" for a list, "{" for a set, "(" for a tuple, ":" for a ratio, "[)" and the like for an interval. name: x, if each
    part is a value of x. ordered: True if the parts are values of different variables (x=1, y=2); an answer without names must
    then list the values in the same order. x_1 and x_2 count as one variable.
    """

    brackets: str
    parts: list[list[str]]
    name: str = ""
    ordered: bool = False


def same_parts(reference: Tokens, answer: Tokens) -> bool:
    """Return True if an answer equals the reference, part by part."""
    reference, answer = _bare(reference), _bare(answer)
    if normal(reference) == normal(answer):
        return True
    if not reference or not answer:
        return False
    here, there = _region(reference), _region(answer)
    if here and there:
        return here[1] == there[1] and (here[0] == there[0] or not here[0] or not there[0])
    matrix, other_matrix = _matrix(reference), _matrix(answer)
    if matrix and other_matrix:
        return list(map(len, matrix)) == list(map(len, other_matrix)) and all(
            same_parts(a, b) for a, b in zip(itertools.chain(*matrix), itertools.chain(*other_matrix), strict=True)
        )
    several, others = _several(reference), _several(answer)
    relation, relation_said = (
        ([part], []) if found else split(part, _RELATIONS) for found, part in ((several, reference), (others, answer))
    )
    if relation[1] and relation_said[1]:
        return _same_relation(*relation, *relation_said)
    if relation[1] and (value := _found(*relation, is_reference=True)):
        return same_parts(value, answer)
    if relation_said[1]:
        value = _found(*relation_said, is_reference=False)
        return value is not None and same_parts(reference, value)
    if several or others:
        return _same_several(several or Several("", [reference]), others or Several("", [answer]))
    return not relation[1] and same_quantity(reference, answer)


def _bare(part: Tokens) -> list[str]:
    """Remove a final comma, a final approximation, braces, and parentheses around a single part."""
    part = stripped(part)
    if part[-1:] in ([","], [";"]):
        part = stripped(part[:-1])
    exact, approximations = split(part, (r"\approx",))
    if approximations and not _is_name(exact[0]):  # \sqrt{2} \approx 1.414
        part = exact[0]
    while (
        bracketed(part)
        and part[0] in ("{", "(")
        and part[-1] in ("}", ")")
        and (part[0] == "{" or not any(split(part[1:-1], (",", ";"))[1]))
    ):
        part = stripped(part[1:-1])
    return part


def _is_name(part: Tokens) -> bool:
    """Return True if an equation may define this part: x, x_1, Area, f(x), f^{-1}(x), y', (x, y)."""
    if bracketed(part) and part[0] == "(":
        return all(_is_name(each) for each in split(part[1:-1], (",",))[0])
    text = joined(normal(part))
    return _NAME.fullmatch(text) is not None and text not in _NO_NAMES


def _assigned(sides: list[list[str]], operators: list[str]) -> tuple[str, list[str] | None]:
    """Return the name that an equation defines and the value on its last side; ("", None) for another relation."""
    if operators and set(operators) <= {"=", r"\approx", r"\in", r"\equiv"} and _is_name(sides[0]) and sides[-1]:
        return joined(normal(sides[0]), fold=True), sides[-1]
    return "", None


def _found(sides: list[list[str]], operators: list[str], *, is_reference: bool) -> list[str] | None:
    """Return the value that an equation states for a name or an expression (a+b=5); None if it states none, or the value is 0.

    is_reference: True if the equation is the reference. Then an expression has a value only if it is a quantity in upper case
    (AB=5, S_1:S_2=5), since x+y=5 may describe a line.
    """
    value = _assigned(sides, operators)[1]
    if value is not None or operators != ["="] or not constant(sides[1]):
        return value
    is_quantity = all(token.isupper() for token in normal(sides[0]) if token.isalpha()) and constant(sides[0]) is None
    return sides[1] if is_quantity or not is_reference else None


def _region(part: list[str]) -> tuple[str, Set] | None:
    """Return (variable of the inequalities, "" if there are none; set of real numbers), or None for any other part."""
    if _REGION_MARKS.isdisjoint(part):
        return None
    from sympy import Intersection, Union

    for alike, combined in ((_OR, Union), (_AND, Intersection), ((",",), Intersection)):
        parts, words = split(part, alike)
        if words:
            regions = [_region(item) for item in parts]
            known = [item for item in regions if item]
            names = {name for name, _ in known}
            # "1 or 2" is a list, not a set of real numbers.
            if len(known) < len(regions) or len(names) > 1 or names == {""}:
                return None
            sets = [item for _, item in known]
            region = combined(*sets)
            # "x < 1, x > 2" means the union.
            return names.pop(), Union(*sets) if alike == (",",) and region.is_empty else region
    sides, operators = split(part, _RELATIONS)
    if operators == [r"\in"] and (inner := _region(sides[1])) and _is_name(sides[0]):
        return joined(normal(sides[0]), fold=True), inner[1]
    if operators:
        return _inequality(sides, operators)
    found = _set(part)
    return None if found is None else ("", found)


def _inequality(sides: list[list[str]], operators: list[str]) -> tuple[str, Set] | None:
    """Read 2 < x \\leq 3, and relations with more bounds; x must be on one side of each sign."""
    from sympy import FiniteSet, Intersection, Interval, S, oo

    if not set(operators) <= {"<", ">", r"\leq", r"\geq", r"\neq"}:
        return None
    names, region = set(), S.Reals
    for left, operator, right in zip(sides, operators, sides[1:], strict=False):
        low, high = _endpoint(left), _endpoint(right)
        if (low is None) == (high is None):
            return None
        names.add(joined(normal(left if low is None else right), fold=True))
        if not _is_name(left if low is None else right):
            return None
        bound = high if low is None else low
        is_upper = (low is None) == (operator in ("<", r"\leq"))
        is_open = operator in ("<", ">")
        if operator == r"\neq":
            region = region - FiniteSet(bound)
        else:
            region = Intersection(
                region, Interval(-oo, bound, True, is_open) if is_upper else Interval(bound, oo, is_open, True)
            )
    return (names.pop(), region) if len(names) == 1 else None


def _set(part: list[str]) -> Set | None:
    """Read an interval, a set of constants, \\mathbb{R}, and unions, intersections and differences of these."""
    from sympy import FiniteSet, Intersection, Interval, S, Union

    minus = ("-",) if r"\mathbb" in part else ()
    for separators, combined in (((r"\setminus", *minus), None), ((r"\cup",), Union), ((r"\cap",), Intersection)):
        parts, separators_found = split(part, separators)
        if separators_found:
            sets = [_set(item) for item in parts]
            known = [item for item in sets if item is not None]
            if len(known) < len(sets):
                return None
            return known[0] - Union(*known[1:]) if combined is None else combined(*known)
    text = joined(normal(part))
    literal = {
        r"\mathbb {R }": S.Reals,
        r"\mathbb {Z }": S.Integers,
        r"\mathbb {Q }": S.Rationals,
        r"\emptyset": S.EmptySet,
    }
    if text in literal:
        return literal[text]
    if not bracketed(part):
        return None
    inner = stripped(part[1:-1])
    if part[0] == r"\{":
        condition = split(inner, ("|", ":"))
        if len(condition[1]) == 1:  # \{x : x > 2\}
            domain, region = (_region(item) for item in condition[0])
            if region is None or not (domain or _is_name(condition[0][0])):
                return None
            return region[1] & domain[1] if domain else region[1]
        if not inner:
            return S.EmptySet
        values = [_endpoint(item) for item in _expanded(split(inner, (",",))[0])]
        return FiniteSet(*values) if None not in values else None
    if part[0] == "(" and part[-1] == ")" and any(token in inner for token in (r"\cup", r"\cap", r"\setminus")):
        return _set(inner)
    ends = split(inner, (",",))[0]
    if len(ends) != 2 or part[0] not in ("(", "[") or part[-1] not in (")", "]"):
        return None
    low, high = map(_endpoint, ends)
    if low is None or high is None or not low < high:
        return None
    return Interval(low, high, part[0] == "(", part[-1] == ")")


def _endpoint(part: list[str]) -> Expr | None:
    """Return a real constant as a sympy number; None for anything else."""
    from sympy import Rational, oo

    value = constant(part)
    if value is None:
        return None
    return (
        Rational(value.numerator, value.denominator)
        if isinstance(value, Fraction)
        else oo * int(math.copysign(1, value))
    )


def _matrix(part: list[str]) -> list[list[list[str]]] | None:
    """Return rows of elements, each multiplied by the factor before the matrix; brackets around the matrix are ignored."""
    if bracketed(part) and part[0] in ("(", "["):
        part = stripped(part[1:-1])
    start = next((i for i, token in enumerate(part) if token.startswith(r"\begin")), None)
    if start is None or part[start][7:-1] not in _MATRICES or not part[-1].startswith(r"\end"):
        return None
    factor, body = stripped(part[:start]), part[start + 1 : -1]
    if not set(factor).isdisjoint(_RELATIONS):
        return None
    if part[start] == r"\begin{array}" and body[:1] == ["{"]:
        body = body[body.index("}") + 1 :] if "}" in body else body
    factor = [*factor, "1"] if factor == ["-"] else factor[: len(factor) - (factor[-1:] == [r"\cdot"])]
    rows = [split(row, ("&",))[0] for row in split(body, ("\\\\",))[0] if row]
    return [[["(", *factor, ")", r"\cdot", "(", *each, ")"] if factor else each for each in row] for row in rows]


def _expanded(parts: list[list[str]]) -> list[list[str]]:
    """Replace each part with \\pm by one part for each sign: 1 \\pm 2 by 1+2 and 1-2; \\mp has the other sign."""
    result = []
    for part in parts:
        signs = [token for token in part if token in _SIGNS][:4]
        together = r"\mp" in signs or len(signs) > 3
        for choice in itertools.product((0, 1), repeat=min(1 if together else 4, len(signs))):
            chosen = itertools.cycle(choice)
            result.append([_SIGNS[token][next(chosen)] if token in _SIGNS else token for token in part])
    return result


def _several(part: list[str]) -> Several | None:
    """Return the parts of a list, a set or a tuple; None for a single part."""
    parts, separators = split(part, _SEPARATORS)
    if {",", ";"} <= set(separators):  # x=1, y=2; x=3, y=4
        parts = [["(", *item, ")"] for item in split(part, (";",))[0]]
    if not separators:
        ratio = split(part, (":",))[0]
        if len(ratio) > 2 and not split(part, _RELATIONS)[1]:
            return Several(":", ratio)
        if bracketed(part) and part[0] in ("(", "[", r"\{", r"\langle"):
            inner, separators = split(stripped(part[1:-1]), (",", ";"))
            if part[0] == r"\{":
                return Several("{", _expanded(inner))
            if separators and _SIGNS.keys().isdisjoint(part):
                is_tuple = part[0] + part[-1] in ("()", r"\langle\rangle") or (
                    part[0] + part[-1] == "[]" and len(inner) > 2
                )
                return Several("(" if is_tuple else part[0] + part[-1], inner)
    parts = _expanded([item for item in parts if item])  # 1, 2, and 3
    if len(parts) < 2:
        return None
    named = [_assigned(*split(item, _RELATIONS)) for item in parts]
    names = {name for name, _ in named}
    if len(names) == 1 and "" not in names:
        return Several("", [value or [] for _, value in named], names.pop())
    if named[0][0] and not any(split(item, _RELATIONS)[1] for item in parts[1:]):  # n = 2, 3, 4
        return Several("", [named[0][1] or [], *parts[1:]], named[0][0])
    sides = [split(item, ("=",))[0] for item in parts]
    defined = {joined(normal(item[0])).partition("_")[0] for item in sides if len(item) == 2}
    return Several("", parts, ordered=len(defined) == len(parts))


def _same_several(reference: Several, answer: Several) -> bool:
    if len(reference.parts) != len(answer.parts) or (reference.name and answer.name and reference.name != answer.name):
        return False
    kinds = {reference.brackets, answer.brackets}
    if kinds <= {"", "{"} and reference.ordered == answer.ordered:
        rest = list(answer.parts)
        for part in reference.parts:
            same = next((i for i, other in enumerate(rest) if same_parts(part, other)), None)
            if same is None:
                return False
            del rest[same]
        return True
    if kinds == {":"}:  # 2:4:6 equals 1:2:3
        ratios = (
            [["(", *part, ")", ":", "(", *each.parts[0], ")"] for part in each.parts] for each in (reference, answer)
        )
        return all(map(same_parts, *ratios))
    return (len(kinds) == 1 or kinds == {"", "("}) and all(map(same_parts, reference.parts, answer.parts))


def _same_relation(sides: list[list[str]], operators: list[str], others: list[list[str]], their: list[str]) -> bool:
    """Return True if the sides are equal, or if one equation or inequality is a multiple of the other."""
    sides, operators = _mirrored(sides, operators)
    others, their = _mirrored(others, their)
    (name, value), (other_name, other_value) = _assigned(sides, operators), _assigned(others, their)
    if value and other_value and name == other_name:
        return same_parts(value, other_value)
    if operators != their:
        return False
    if all(map(same_parts, sides, others)) or (operators == ["="] and all(map(same_parts, sides, others[::-1]))):
        return True
    if len(operators) > 1 or operators[0] not in ("=", "<", r"\leq", r"\neq"):
        return False
    a, b = ([*left, "-", "(", *right, ")"] for left, right in (sides, others))
    return proportional(a, b, positive=operators[0] in ("<", r"\leq"))


def _mirrored(sides: list[list[str]], operators: list[str]) -> tuple[list[list[str]], list[str]]:
    """Rewrite a relation without > and \\geq: x > 2 becomes 2 < x."""
    if _MIRRORED.keys().isdisjoint(operators):
        return sides, operators
    back = {small: large for large, small in _MIRRORED.items()}
    return sides[::-1], [_MIRRORED.get(operator, back.get(operator, operator)) for operator in operators[::-1]]
