r"""Equality of two mathematical expressions by value. An expression is read completely or rejected.

Constants are compared exactly if they are rational, otherwise at a relative precision of 300 digits. Expressions with variables
are equal if they have equal values at every sample point where both are defined in the reals (in the complex numbers if an
expression has an i). latex2sympy2_extended, which math-verify uses, reads 2(3) as 5, y''+2y as 3y, \frac{4}{2}\frac{1}{3} as 7/3
and 25^\circ as 25, so this module has its own parser, with mpmath's functions. Nothing is evaluated as Python.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
from mpmath import mp

from marsrl.rollout.agents.answer_latex import ACCENTS, Tokens, normal

_FEW_DIGITS, _MANY_DIGITS = 60, 360
_EXACT_BITS = 1 << 17  # maximum bits of an exact rational; larger ones are rounded
_LARGEST = 10**30  # maximum argument of growing or oscillating functions; beyond it too few digits are exact
_LONGEST = 1 << 13  # maximum bits before the point, or zeros after it, when an irrational number becomes a fraction
_MOST_EXACT = 5000  # largest n of an exact n!

# Ranges of the sample points. Variables are odd multiples of 1/64, so that no exponent is an odd root of a negative number; in
# the first ranges they are integers, for expressions such as (-1)^n.
_RANGES = [(2, 9), (3, 40), (2, 9), (0, 1), (0, 1), (1, 3), (-3, 3), (-1, 1), (-9, -1)]
_INTEGER_POINTS = 2

_PLAIN_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "\\sin": mp.sin, "\\cos": mp.cos, "\\tan": mp.tan, "\\cot": mp.cot, "\\sec": mp.sec, "\\csc": mp.csc,
    "\\sinh": mp.sinh, "\\cosh": mp.cosh, "\\tanh": mp.tanh, "\\exp": mp.exp, "\\ln": mp.ln, "\\log": mp.ln, "\\lg": mp.ln,
    "\\arcsin": mp.asin, "\\arccos": mp.acos, "\\arctan": mp.atan,
}  # fmt: skip
_INVERSES = {"\\sin": mp.asin, "\\cos": mp.acos, "\\tan": mp.atan}
_OF_SEVERAL: dict[str, Callable[..., Any]] = {"\\gcd": math.gcd, "\\lcm": math.lcm, "\\max": max, "\\min": min}
_LETTERS = frozenset(
    rf"\{name}"
    for name in [
        "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi", "rho",
        "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma",
        "Upsilon", "Phi", "Psi", "Omega", "ell", "hbar",
    ]
)  # fmt: skip
_ENDS = frozenset([")", "]", "}", "|", ",", "\\}", "\\rfloor", "\\rceil", "+", "-", "\\cdot", "/", ":", ""])


class Unreadable(Exception):
    """Raised for text that cannot be read completely as an expression."""


class Undefined(Exception):
    """Raised if the expression has no value at this point, or a value too large to compute."""


def same_value(reference: Tokens, answer: Tokens) -> bool:
    """Return True if both can be read and are equal at every sample point where both are defined."""
    a, b = _one_case(normal(reference), normal(answer))
    if a == b:
        return True
    equal = 0
    for point in range(len(_RANGES)):
        try:
            if not _close(a, b, point):
                return False
        except Unreadable:
            return False
        except Undefined:
            continue
        equal += 1
        if not _variables(a) | _variables(b):
            return True
    return equal > 1


def proportional(reference: Tokens, answer: Tokens, positive: bool) -> bool:
    """Return True if reference = c * answer at every sample point, for one constant c other than 0. positive: require c > 0."""
    a, b = _one_case(normal(reference), normal(answer))
    ratio, equal = None, 0
    if _variables(a) != _variables(b):
        return False
    for point in range(len(_RANGES)):
        try:
            over, under = (_value(each, point, _MANY_DIGITS, _is_complex(a, b)) for each in (a, b))
            with mp.workdps(_MANY_DIGITS):
                quotient = _divided(over, under)
        except Unreadable:
            return False
        except (Undefined, ZeroDivisionError):
            continue
        if quotient == 0 or (ratio is not None and not _near(quotient, ratio)):
            return False
        if positive and not (_is_real(quotient) and quotient > 0):
            return False
        ratio, equal = quotient, equal + 1
    return equal > 1 and bool(_variables(a))


def constant(part: Tokens) -> Fraction | float | None:
    """Return the value of a real constant, to 100 digits if it is irrational; inf and -inf are allowed.

    Returns None for anything else, and for a value with thousands of digits before the point or zeros after it.
    """
    expression = tuple(normal(part))
    if _variables(expression):
        return None
    try:
        value = _value(expression, 0, _MANY_DIGITS, False)
    except (Unreadable, Undefined):
        return None
    if isinstance(value, Fraction) or mp.isinf(value):
        return value if isinstance(value, Fraction) else float(value)
    if value and abs(mp.mag(value)) > _LONGEST:
        return None
    with mp.workdps(_MANY_DIGITS):
        return Fraction(0) if abs(value) * 10**300 < 1 else Fraction(mp.nstr(value, 100))


def _one_case(*expressions: Tokens) -> list[tuple[str, ...]]:
    """Convert variables to lower case, except E and I; return the expressions as they are if one has a letter in both cases."""
    if any(
        {token.swapcase() for token in expression if len(token) == 1 and token.isalpha()} & set(expression)
        for expression in expressions
    ):
        return [tuple(expression) for expression in expressions]
    return [tuple(t.lower() if len(t) == 1 and t not in "EI" else t for t in expression) for expression in expressions]


def _close(a: tuple[str, ...], b: tuple[str, ...], point: int) -> bool:
    """Return True if two values are equal, that is, if their difference shrinks at a higher precision like a rounding error."""
    differences = []
    for digits in (_FEW_DIGITS, _MANY_DIGITS):
        x, y = (_value(each, point, digits, _is_complex(a, b)) for each in (a, b))
        if isinstance(x, Fraction) and isinstance(y, Fraction):
            return x == y
        with mp.workdps(digits):
            x, y = _rounded(x), _rounded(y)
            if mp.isinf(x) or mp.isinf(y):
                return bool(x == y)
            largest = max(abs(x), abs(y))
            differences.append(abs(x - y))
            if differences[-1] > max(1, largest) / 10**30:
                return False
    few, many = differences
    return bool(many <= largest / 10**300 or many < few / 10**250)


def _near(x: Any, y: Any) -> bool:
    with mp.workdps(_MANY_DIGITS):
        return bool(abs(_rounded(x) - _rounded(y)) <= abs(_rounded(x)) / 10**300)


def _is_complex(*expressions: tuple[str, ...]) -> bool:
    return any("i" in each for each in expressions)


def _variables(expression: tuple[str, ...]) -> frozenset[str]:
    return frozenset(token for token in expression if _is_letter(token) and token not in ("e", "i"))


def _is_letter(token: str) -> bool:
    return (len(token) == 1 and token.isascii() and token.isalpha()) or token in _LETTERS or token.startswith("\\text{")


@lru_cache(maxsize=512)
def _value(expression: tuple[str, ...], point: int, digits: int, is_complex: bool) -> Any:
    """Return the value at a point: a Fraction, or an mpmath number of `digits` digits. Raises Unreadable or Undefined."""
    with mp.workdps(digits):
        try:
            return _Reader(expression, point, is_complex).whole()
        except (ValueError, ZeroDivisionError, OverflowError, mp.NoConvergence) as error:
            raise Undefined from error
        except (RecursionError, TypeError) as error:
            raise Unreadable from error


class _Reader:
    """Reads an expression from left to right and computes its value at one point.

    sum      product (("+" | "-") product)*
    product  factors (("\\cdot" | "/" | ":") factors)*
    factors  factor factor...               2x(x+1); 2\frac{1}{3} is a mixed number, 1/2x is (1/2)x, a/2x is a/(2x)
    factor   operand ("!" | "°" | "^{...}")*
    """

    def __init__(self, expression: tuple[str, ...], point: int, is_complex: bool) -> None:
        self._tokens, self._at = expression, 0
        self._point, self._is_complex = point, is_complex

    def whole(self) -> Any:
        value = self._sum()
        if self._next:
            raise Unreadable(self._next)
        return self._checked(value)

    @property
    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, expected: str = "") -> str:
        token = self._next
        if not token or (expected and token != expected):
            raise Unreadable(token)
        self._at += 1
        return token

    def _took(self, token: str) -> bool:
        found = self._next == token
        self._at += found
        return found

    def _checked(self, value: Any) -> Any:
        """Return the value if it is finite and of an allowed kind; rationals that have grown too long are rounded."""
        if isinstance(value, Fraction):
            return (
                value
                if max(value.numerator.bit_length(), value.denominator.bit_length()) < _EXACT_BITS
                else _rounded(value)
            )
        if isinstance(value, mpmath.mpc) and not self._is_complex:
            if value.imag != 0:
                raise Undefined("not real")
            value = value.real
        if mp.isnan(value) or (mp.isinf(value) and isinstance(value, mpmath.mpc)):
            raise Undefined("not a number")
        return value

    def _sum(self) -> Any:
        value = self._product()
        while self._next in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value = self._checked(_arithmetic(value, "+", _arithmetic(self._product(), "*", Fraction(sign))))
        return value

    def _product(self) -> Any:
        sign = Fraction(1)
        while self._next in ("+", "-"):
            sign *= 1 if self._take() == "+" else -1
        value = self._factors()
        while (operator := self._next) in ("\\cdot", "/", ":"):
            self._take()
            before, start = self._tokens[self._at - 2], self._at
            negative = self._took("-")
            if operator != "\\cdot" and before.isdigit() and self._next.isdigit() and not negative:
                other = self._factor()  # 1/2x: a fraction of numbers binds tighter
                value = self._checked(_divided(value, other))
                if self._next not in _ENDS and not self._is_number(start + 1):
                    value = self._checked(_arithmetic(value, "*", self._factors()))
                continue
            other = self._factors()
            value = _arithmetic(value, "*", other) if operator == "\\cdot" else _divided(value, other)
            value = self._checked(-value if negative else value)
        return _arithmetic(value, "*", sign)

    def _factors(self) -> Any:
        start = self._at
        value = self._factor()
        whole_number = self._at == start + 1 and self._tokens[start].isdigit()
        while self._next not in _ENDS:
            before = self._tokens[self._at - 1]
            if self._is_number(self._at) and (
                self._is_number(self._at - 1) or before.isalpha() or before[:5] == "\\text"
            ):
                raise Unreadable("two numbers side by side, or two quantities (5 ft 3 in)")
            if whole_number and self._is_fraction():  # 2\frac{1}{3}
                value = _arithmetic(value, "+", self._factor())
            else:
                value = self._checked(_arithmetic(value, "*", self._factor()))
            whole_number = False
        return value

    def _is_number(self, at: int) -> bool:
        return at < len(self._tokens) and self._tokens[at][0] in "0123456789."

    def _is_fraction(self) -> bool:
        """Return True before \\frac{number}{number}."""
        frac = self._tokens[self._at : self._at + 7]
        return len(frac) == 7 and frac[:2] == ("\\frac", "{") and frac[2].isdigit() and frac[5].isdigit()

    def _factor(self) -> Any:
        value = self._operand()
        while self._next in ("!", "°", "^"):
            operator = self._take()
            if operator == "!":
                if self._next == "!":
                    raise Unreadable("a double factorial")
                value = _factorial(value)
            elif operator == "°":
                value = _arithmetic(value, "*", mp.pi / 180)
            else:
                value = self._power(value, self._group())
            value = self._checked(value)
        return value

    def _group(self) -> Any:
        self._take("{")
        value = self._sum()
        self._take("}")
        return value

    def _operand(self) -> Any:
        token = self._take()
        if token[0] in "0123456789.":
            return Fraction(token)
        if token in ("(", "[", "{", "|", "\\lfloor", "\\lceil"):
            value = self._sum()
            self._take({"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}[token])
            if token == "|":
                return abs(value)
            if token in ("\\lfloor", "\\lceil"):
                return _whole(value, up=token == "\\lceil")
            return value
        if token == "\\frac":
            return self._checked(_divided(self._group(), self._group()))
        if token == "\\binom":
            return _binomial(self._group(), self._group())
        if token == "\\sqrt":
            root = Fraction(2)
            if self._took("["):
                root = self._sum()
                self._take("]")
            return self._checked(self._power(self._group(), _divided(Fraction(1), root)))
        if token in _PLAIN_FUNCTIONS:
            return self._function(token)
        if token in _OF_SEVERAL:
            return self._of_several(token)
        if token == "\\pi":
            return +mp.pi
        if token == "\\infty":
            return mp.inf
        return self._variable(token)

    def _power(self, base: Any, exponent: Any) -> Any:
        if not isinstance(exponent, Fraction):
            if base == 0 or (_is_real(base) and base < 0 and not self._is_complex):
                raise Undefined("a power of a number that is not positive")
        elif exponent.denominator == 1 and isinstance(base, Fraction):
            if base == 0 and exponent < 0:
                raise ZeroDivisionError
            if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) < _EXACT_BITS:
                return base ** int(exponent)
        elif (
            exponent.denominator % 2
            and _is_real(base)
            and base < 0
            and not self._is_complex
            and exponent.denominator > 1
        ):
            value = _rounded(-base) ** _rounded(exponent)  # the real cube root of -8
            return -value if exponent.numerator % 2 else value
        base = _rounded(base)
        if base != 0 and not mp.isinf(base) and abs(_rounded(exponent) * mp.log(abs(base), 2)) > _LARGEST:
            raise Undefined("too large")
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            return base ** int(exponent)
        return mp.sqrt(base) if exponent == Fraction(1, 2) else base ** _rounded(exponent)

    def _function(self, name: str) -> Any:
        function, power, base = _PLAIN_FUNCTIONS[name], Fraction(1), Fraction(10)
        while self._next in ("^", "_"):
            mark = self._take()
            if mark == "^":
                power = self._group()
            elif name == "\\log":
                base = self._group()
            else:
                raise Unreadable(name)
        if power == -1 and name in _INVERSES:
            function, power = _INVERSES[name], Fraction(1)
        if self._next in ("(", "[", "{", "|"):
            value = self._operand()
        else:
            if self._next in _ENDS:
                raise Unreadable(name)
            value = self._factor()
            while self._next not in _ENDS and self._next not in _PLAIN_FUNCTIONS:
                value = _arithmetic(value, "*", self._factor())  # \sin 2x
        value = _rounded(value)
        if abs(value) > _LARGEST and name not in ("\\log", "\\ln", "\\lg"):
            raise Undefined("too large")
        value = self._checked(function(value))
        if name in ("\\log", "\\lg"):
            value = self._checked(value / mp.ln(_rounded(base)))
        return value if power == 1 else self._power(value, power)

    def _of_several(self, name: str) -> Any:
        closing = {"(": ")", "\\{": "\\}"}.get(self._take(), "")
        values = [self._sum()]
        while self._took(","):
            values.append(self._sum())
        self._take(closing)
        if name in ("\\gcd", "\\lcm"):
            if not all(isinstance(value, Fraction) and value.denominator == 1 for value in values):
                raise Undefined("not integers")
            values = [int(value) for value in values]
        value = _OF_SEVERAL[name](*values) if len(values) > 1 else values[0]
        return Fraction(value) if isinstance(value, int) else value

    def _variable(self, token: str) -> Any:
        """Return the value of e, i, a variable or a function such as f(x); variables and functions get random values."""
        name = token
        if token in ACCENTS:
            self._take("{")
            name += "".join(self._take() for _ in range(self._index("}")))
            self._take("}")
        elif not (
            (token.isascii() and len(token) == 1 and token.isalpha())
            or token in _LETTERS
            or token.startswith("\\text{")
        ):
            raise Unreadable(token)
        while self._next in ("_", "'"):
            if self._take() == "'":
                name += "'"
                continue
            self._take("{")
            name += "_" + "".join(self._take() for _ in range(self._index("}")))
            self._take("}")
        if name == "e":
            return +mp.e
        if name == "i":
            return mp.mpc(0, 1)
        if self._next == "(" and (name[0] in "fgh" or "'" in name or token.startswith("\\text{")):
            values = [self._drawn(name)]
            self._take("(")
            while True:
                values.append(_rounded(self._sum()))
                if not self._took(","):
                    break
            self._take(")")
            return mp.fsum(mp.sin(value * (k + 2) + 1) for k, value in enumerate(values))
        return self._drawn(name)

    def _index(self, token: str) -> int:
        """Return the number of tokens of a name before this closing token."""
        rest = self._tokens[self._at : self._at + 40]
        if token not in rest or "{" in rest[: rest.index(token)]:
            raise Unreadable(token)
        return rest.index(token)

    def _drawn(self, name: str) -> Fraction:
        low, high = _RANGES[self._point]
        drawn = random.Random(f"{self._point} {name}")
        if self._point < _INTEGER_POINTS:
            return Fraction(drawn.randint(low, high))
        return Fraction(2 * drawn.randrange(low * 32, high * 32) + 1, 64)


def _rounded(value: Any) -> Any:
    """Convert the value to an mpmath number of the current precision."""
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _is_real(value: Any) -> bool:
    return not isinstance(value, mpmath.mpc)


def _arithmetic(a: Any, operator: str, b: Any) -> Any:
    if not (isinstance(a, Fraction) and isinstance(b, Fraction)):
        a, b = _rounded(a), _rounded(b)
    return a + b if operator == "+" else a * b


def _divided(a: Any, b: Any) -> Any:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a / b
    return _rounded(a) / _rounded(b)


def _whole(value: Any, up: bool) -> Any:
    if not _is_real(value) or (not isinstance(value, Fraction) and abs(value) > _LARGEST):
        raise Undefined("not a real number")
    return Fraction(math.ceil(value) if up else math.floor(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= _MOST_EXACT


def _factorial(value: Any) -> Any:
    if _is_count(value):
        return Fraction(math.factorial(int(value)))
    if not _is_real(value) or abs(value) > _LARGEST:
        raise Undefined("too large")
    return mp.gamma(_rounded(value) + 1)


def _binomial(n: Any, k: Any) -> Any:
    if _is_count(n) and _is_count(k):
        return Fraction(math.comb(int(n), int(k)))
    if _is_count(k) and k < 100:
        return _divided(
            math.prod((_arithmetic(n, "+", Fraction(-i)) for i in range(int(k))), start=Fraction(1)), _factorial(k)
        )
    return mp.binomial(_rounded(n), _rounded(k))
