r"""Canonical LaTeX of an answer: one spelling for each meaning; commands that only change the font are dropped.

    x^10, \dfrac12, \left( a,\ b \right), 2 \times 3, sqrt(2), \mathbf{v}
    x^{10}, \frac{1}{2}, (a,b), 2\cdot3, \sqrt{2}, v

Answers are hostile input: each function takes time linear in the text's length, times the nesting of wrappers.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = Sequence[str]

# Words stay together, marked by \text: \text{cm} is not a product of c and m. The other wrappers only change the font.
_WRAPPER = re.compile(
    r"\\(?:(text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|mathrm|mathsf|mathtt|operatorname\*?)|"
    r"boxed|fbox|mathbf|mathit|boldsymbol|bm|emph)\s*\{([^{}]*)\}"
)
_MOST_NESTED = 4  # levels of nested wrappers
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORD = re.compile(r"[^\W\d_]{2,}")
_UNIT_VECTOR = re.compile(r"\\(?:hat|widehat|vec)\s*\{?\s*\\?([ijk])(?:math)?\s*(?:\}|(?![a-zA-Z}]))")
_UNIT_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\\text\{[^{}]*\})\s*\}\s*\{\s*(\\text\{[^{}]*\}|[a-zA-Z])\s*\}")
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|(?:\^\s*)?\\degree(?![a-zA-Z])")
_MODULUS = re.compile(r"\(\s*\\?b?mod(?![a-zA-Z])\s*\{?(\w+)\}?\s*\)")  # (mod 5)
_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|\{,\}|,\\!\s*|')(?=\d{3}(?!\d))")  # 10\,000, 10{,}000, 10'000
_SPACED_THOUSANDS = re.compile(r"(?<!\d)(?<!\d )\d+(?: \d{3})+(?:\.\d+)?$")  # 1 234 567

# Replaced before NFKC normalisation, which would turn 10² into 102, 101₂ into 1012, 3½ into 31/2, and ℝ into R.
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_BASE = re.compile("(?<=\\d)[₀-₉]+")
# The sign extends over a whole number, unlike \sqrt: √18 is \sqrt{18}.
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?)?")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
# A figure dash, en dash, em dash or horizontal bar in the place of a sign; between two numbers it may mean a range.
_DASH_AS_MINUS = re.compile(r"(^|[$(\[{,;=<>≤≥+*/^])(\s*)[‒-―](?=\s*[\d.\\(a-zA-Z√])")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_BLACKBOARD = re.compile("[ℂℕℚℝℤ]")
_DELIMITED = re.compile(r"\s*(?:\$+([^$]+)\$+|\\\((.*)\\\)|\\\[(.*)\\\])\s*", re.DOTALL)
_BOXED = re.compile(r"\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*", re.DOTALL)
_CROSS_PRODUCT = re.compile(r"(\\(?:vec|hat|overrightarrow|mathbf|boldsymbol|bm)\s*\{[^{}]*\}\s*)\\times(?![a-zA-Z])")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")  # 3 x 10^8
# A dollar sign before a number ($5) is a currency, not a delimiter of mathematics.
_DOLLARS = re.compile(r"^([+-]?)\$(?=\s*[\d.])(?=[^$]*$)")
_LOOKALIKES = str.maketrans("−‐⁄∕‘’′“”", "--//'''\"\"")

_TOKEN = re.compile(
    r"\\(?:begin|end)\s*\{[a-zA-Z]+\*?\}|\\text\{[^{}]*\}|\\[a-zA-Z]+|\\.|\d+\.\d+[eE][+-]?\d{1,3}(?!\d)|\d+[eE]\d{1,3}(?!\d)|"
    r"\d+(?:\.\d+)?|\.\d+|[a-zA-Z]+|\s+|"
    r"\*\*|<=|>=|!=|==|.",
    re.DOTALL,
)
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")  # 1,234

_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu",
    "σ": "sigma", "φ": "phi", "ω": "omega", "π": "pi", "Δ": "Delta", "Ω": "Omega",
}  # fmt: skip
_FUNCTIONS = [
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "log", "ln", "lg", "exp",
    "gcd", "lcm", "max", "min", "sqrt",
]  # fmt: skip
_NAMES = {name: f"\\{name}" for name in [*_GREEK.values(), *_FUNCTIONS, "infty"]}
_NAMES |= dict.fromkeys(["infinity", "inf", "oo"], r"\infty") | {"and": r"\text{and}", "or": r"\text{or}"}
_SPACES = frozenset(["\\,", "\\;", "\\:", "\\!", "\\ ", "~", "\\quad", "\\qquad", "\\thinspace"])
_TYPESETTING = frozenset(
    ["\\left", "\\right", "\\middle", "\\displaystyle", "\\textstyle", "\\limits", "\\bf", "\\rm", "$"]
)
_TYPESETTING |= {f"\\{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r", "m")}
_ALIASES = {
    r"\frac": r"\dfrac \tfrac \cfrac", r"\binom": r"\dbinom \tbinom", "^": "**",
    r"\leq": r"\le \leqslant <= ≤", r"\geq": r"\ge \geqslant >= ≥", "<": r"\lt", ">": r"\gt",
    r"\neq": r"\ne != ≠", "=": "==", r"\approx": "≈", r"\equiv": "≡",
    r"\cdot": r"\times \ast * × · ⋅", "/": r"\div ÷", r"\pm": "±", r"\mp": "∓", r"\infty": "∞",
    r"\cup": "∪", r"\cap": "∩", r"\in": "∈", r"\emptyset": r"\varnothing ∅",
    r"\setminus": r"\backslash \smallsetminus ∖", r"\{": r"\lbrace", r"\}": r"\rbrace", "[": r"\lbrack", "]": r"\rbrack",
    "|": r"\lvert \rvert \vert \mid", ":": r"\colon", "%": r"\%", "'": r"\prime",
    r"\land": r"\wedge", r"\lor": r"\vee", r"\ldots": r"\dots \cdots \dotsc …",
    r"\vec": r"\overrightarrow", r"\bar": r"\overline", r"\hat": r"\widehat", r"\tilde": r"\widetilde",
    r"\phi": r"\varphi", r"\epsilon": r"\varepsilon", r"\langle": "⟨", r"\rangle": "⟩",
}  # fmt: skip
_SPELLING = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
_SPELLING |= {letter: f"\\{name}" for letter, name in _GREEK.items()}

OPENING = frozenset(["(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil"])
CLOSING = frozenset([")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil"])
ACCENTS = frozenset(["\\vec", "\\bar", "\\hat", "\\tilde", "\\dot", "\\mathcal", "\\mathbb", "\\mathfrak", "\\mathscr"])
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "^": 1, "_": 1, "\\pmod": 1} | dict.fromkeys(ACCENTS, 1)


def one_form(text: str) -> str:
    """Return the text with one character for each meaning, and with \\text{} around words inside font commands."""
    text = "".join(char for char in text if unicodedata.category(char) != "Cf")  # invisible, such as U+200B
    text = _ROOT.sub(lambda found: _ROOTS[found[1]] + (f"{{{found[2]}}}" if found[2] else " "), text)
    text = _BASE.sub(lambda found: f"_{{{found[0]}}}", text)
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{found[0]}}}", text)
    text = _VULGAR_FRACTION.sub(lambda found: f" {found[0]}", text)
    text = _BLACKBOARD.sub(lambda found: f"\\mathbb{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = unicodedata.normalize("NFKC", text).translate(_LOOKALIKES)
    while delimited := _DELIMITED.fullmatch(text):
        text = next(filter(None, delimited.groups()), "")
    for _ in range(_MOST_NESTED):
        if (boxed := _BOXED.fullmatch(text)) and _is_balanced(boxed[1]):
            text = boxed[1]
    text = _DASH_AS_MINUS.sub(r"\1\2-", text.strip())
    text = _TIMES_TEN.sub(r"\\times ", text)
    text = _CROSS_PRODUCT.sub(r"\1\\crossproduct", text)
    for _ in range(_MOST_NESTED):
        text = _WRAPPER.sub(_unwrapped, text)
    text = _UNIT_FRACTION.sub(r"\1/\2", text)
    text = _DEGREE.sub("°", _UNIT_VECTOR.sub(r" \1", text))
    text = _DOLLARS.sub(r"\1\\$", text.strip())
    text = _THOUSANDS.sub("", _MODULUS.sub(r"\\pmod{\1}", text))
    return _SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)


def _is_balanced(text: str) -> bool:
    depths = list(itertools.accumulate((character == "{") - (character == "}") for character in text))
    return not depths or (min(depths) >= 0 and depths[-1] == 0)


def without_marks(text: str) -> str:
    """Return a `one_form` text without \\text{} around its words."""
    return _TEXT.sub(r"\1", text)


def _unwrapped(match: re.Match[str]) -> str:
    words, inner = match.groups()
    if words is None:
        return inner if match[0].startswith((r"\boxed", r"\fbox", r"\emph")) else f" {inner} "
    if (name := inner.strip()) in _NAMES and name not in ("and", "or"):
        return f" {_NAMES[name]} "
    if _WORD.search(inner) and "\\" not in inner:
        return f"\\text{{{inner}}}"
    return f" {inner}" if match.string[match.start() - 1 : match.start()].isalpha() else inner  # \circ\mathrm{C}


def tokens(text: str, thousands: bool = True) -> list[str]:
    """Split a `one_form` text into commands, numbers, words, brackets and other characters; each run of white space is " ".

    thousands: True to read 100,200 outside brackets as a number, False to read it as a list.
    """
    if thousands and not any(bracket in text for bracket in "([") and "\\{" not in text:  # (1,234) is a pair
        text = _GROUPED.sub(lambda found: found[0].replace(",", ""), text)
    result: list[str] = []
    size = False
    for token in _TOKEN.findall(text):
        if size and token == ".":  # \left.
            size = False
            continue
        size = token in _TYPESETTING and token != "$"
        token = _NAMES.get(token) or _SPELLING.get(token, token)
        if token.isspace() or token in _SPACES:
            token = " "
        elif token.startswith("\\text{"):
            token = f"\\text{{{' '.join(token[6:-1].split())}}}"
        if token not in _TYPESETTING and (token, *result[-1:]) != (" ", " "):
            result.append(token)
    return stripped(result)


def stripped(part: Tokens) -> list[str]:
    """Remove white space tokens at both ends."""
    part = list(part)
    start = 1 if part[:1] == [" "] else 0
    return part[start : len(part) - (part[-1:] == [" "] and len(part) > start)]


@dataclass
class _Open:
    """A command that still lacks arguments, or an open bracket with the token that closes it."""

    lacking: int
    is_argument: bool  # True for an argument of another command, which gets braces
    closing: str = ""


def normal(part: Tokens) -> list[str]:
    """Return tokens without white space, one for each letter of a product, and with braces around each argument."""
    queue = [letter for token in part if token != " " for letter in (token if token.isalpha() else [token])]
    out: list[str] = []
    stack: list[_Open] = []

    def argument_ends() -> None:
        while stack and stack[-1].lacking:
            stack[-1].lacking -= 1
            if stack[-1].lacking or not stack.pop().is_argument:
                return
            out.append("}")

    i = 0
    while i < len(queue):
        token, waiting = queue[i], bool(stack and stack[-1].lacking)
        command = out[-1] if waiting and out else ""
        i += 1
        if token in OPENING:
            is_argument = waiting and (token == "{" or (token == "(" and command in ("\\sqrt", "^", "_")))
            stack.append(_Open(0, is_argument, "}" if is_argument else ""))
            out.append("{" if is_argument else token)
        elif token in CLOSING:
            while stack and stack[-1].lacking:
                stack.pop()  # arguments are missing
            closed = stack.pop() if stack else _Open(0, is_argument=False)
            out.append(closed.closing or token)
            if closed.is_argument:
                argument_ends()
        elif token in _ARGUMENTS:
            if waiting:
                out.append("{")
            out.append(token)
            stack.append(_Open(_ARGUMENTS[token], waiting))
        elif waiting:
            sign = token in "+-" and command in ("^", "_")
            if sign and i < len(queue) and queue[i] not in OPENING and queue[i] not in _ARGUMENTS:  # e^-x
                token, i = token + queue[i], i + 1
            elif token.isdigit() and len(token) > 1 and command not in ("^", "_"):  # \frac12
                queue[i - 1 : i] = list(token)
                token = queue[i - 1]
            out += ["{", *([token[0], token[1:]] if token[0] in "+-" and len(token) > 1 else [token]), "}"]
            argument_ends()
        else:
            out.append(token)
    return out


def joined(part: Tokens, fold: bool = False) -> str:
    """Join `normal` tokens into text. fold: ignore the case of variables and words."""
    letters = {token for token in part if len(token) == 1}
    if fold and all(letter.swapcase() not in letters for letter in letters if letter.isalpha()):
        part = [token.lower() if len(token) == 1 or token.startswith("\\text{") else token for token in part]
    text = "".join(f"{token} " if token[-1].isalnum() else token for token in part)
    return text.rstrip()


def split(part: Tokens, separators: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Return the parts between separators outside brackets and environments, and the separators."""
    parts: list[list[str]] = [[]]
    separators_found: list[str] = []
    depth = 0
    for token in part:
        if token in separators and depth == 0:
            parts.append([])
            separators_found.append(token)
            continue
        depth += (token in OPENING or token.startswith("\\begin")) - (token in CLOSING or token.startswith("\\end"))
        parts[-1].append(token)
    return [stripped(each) for each in parts], separators_found


def nesting(part: Tokens) -> int:
    """Return the greatest depth of nested brackets."""
    return max(itertools.accumulate((token in OPENING) - (token in CLOSING) for token in part), default=0)


def bracketed(part: Tokens) -> bool:
    """Return True if the last token closes the first token's bracket."""
    if len(part) < 2 or part[0] not in OPENING or part[-1] not in CLOSING:
        return False
    depth = 0
    for token in part[:-1]:
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0:
            return False
    return depth == 1
