"""Small mistakes in a Python source, one at a time, each as a changed syntax tree: what a test beside it should notice.

Left alone is what no test judges: docstrings, annotations, decorators, assertions, and the texts of messages (everything
in a `raise`, every f-string). zip's strict=True is an assertion, too.
"""

from __future__ import annotations

import ast
import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}  # fmt: skip
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}
_DROPPED_METHODS = {"clamp", "copy", "double", "long", "lower", "rstrip", "strip"}  # x.clamp(max=1) -> x
_SKIPPED_KEYWORDS = {"strict"}
_SKIPPED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "bases"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake. text: the source line that it begins in; before, after: the code that changes, on one line."""

    line: int
    text: str
    before: str
    after: str
    _place: tuple[ast.AST, str, int | None] = field(repr=False)  # parent, field, index in the field's list
    _new: ast.AST = field(repr=False)

    def code(self, tree: ast.Module, file: str) -> CodeType:
        """The module with this mistake; `tree` is what `mutants` was given and is the same again afterwards."""
        old = _put(self._place, self._new)
        try:
            return compile(tree, file, "exec", dont_inherit=True)
        finally:
            _put(self._place, old)


def mutants(tree: ast.Module, source: str, only: Sequence[str] = ()) -> list[Mutant]:
    """Every mistake in the order of the source. only: names of functions and classes outside of which nothing changes."""
    lines = source.splitlines()
    roots = [node for node in ast.walk(tree) if getattr(node, "name", None) in only] if only else [tree]
    found = []
    for place, node, new in (each for root in roots for each in _walk(root)):
        ast.copy_location(new, node)
        ast.fix_missing_locations(new)
        line = node.lineno  # type: ignore[attr-defined]
        before, after = (" ".join(ast.unparse(each).split()) for each in (node, new))
        found.append(Mutant(line, lines[line - 1].strip(), before, after, place, new))
    return found


def sample(found: Sequence[Mutant], limit: int, seed: int) -> list[Mutant]:
    """`limit` of them at most, spread evenly over the source: one of each of `limit` equal parts."""
    if len(found) <= limit:
        return list(found)
    rng = random.Random(seed)
    bounds = [len(found) * i // limit for i in range(limit + 1)]
    return [found[rng.randrange(start, end)] for start, end in itertools.pairwise(bounds)]


def _put(place: tuple[ast.AST, str, int | None], new: ast.AST) -> ast.AST:
    """Put a node into its place and return the one that was there."""
    parent, field, index = place
    if index is None:
        old = getattr(parent, field)
        setattr(parent, field, new)
    else:
        old = getattr(parent, field)[index]
        getattr(parent, field)[index] = new
    return old


def _walk(parent: ast.AST, function: str = "") -> Iterator[tuple[tuple[ast.AST, str, int | None], ast.AST, ast.AST]]:
    """(place, node, what takes its place) of every mistake below a node."""
    function = parent.name if isinstance(parent, ast.FunctionDef) else function
    for name, value in ast.iter_fields(parent):
        if name in _SKIPPED_FIELDS:
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or isinstance(node, _SKIPPED) or _is_unjudged(node):
                continue
            for new in _variants(node, parent, name, function):
                yield (parent, name, index), node, new
            yield from _walk(node, function)


def _is_unjudged(node: ast.AST) -> bool:
    """A docstring or `...`; an assertion of zip; what only a type checker reads."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.keyword):
        return node.arg in _SKIPPED_KEYWORDS
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"


def _variants(node: ast.AST, parent: ast.AST, field: str, function: str) -> Iterator[ast.AST]:
    """What one node may become."""
    if isinstance(node, ast.expr) and field == "test":  # of if, while, a if b else c
        yield ast.Constant(False)
        if not isinstance(parent, ast.While):
            yield ast.Constant(True)
    elif isinstance(parent, ast.comprehension) and field == "ifs":
        yield ast.Constant(True)
    if isinstance(node, ast.Constant):
        yield from _other_constants(node.value)
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield _changed(node, ops=[*node.ops[:i], _COMPARISONS[type(op)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BoolOp):
        yield _changed(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        for i in range(len(node.values)):
            left = [*node.values[:i], *node.values[i + 1 :]]
            yield left[0] if len(left) == 1 else _changed(node, values=left)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.BinOp):
        yield _changed(node, op=_OPERATORS[type(node.op)]())
        if isinstance(node.op, ast.Add):
            yield from (node.left, node.right)
    elif isinstance(node, ast.AugAssign):
        yield _changed(node, op=_OPERATORS[type(node.op)]())
        yield ast.Assign([node.target], node.value)
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)
    elif isinstance(node, ast.Slice):
        for bound in ("lower", "upper"):
            value = getattr(node, bound)
            if value is not None:
                yield _changed(node, **{bound: None})
                if not isinstance(value, ast.Constant):
                    yield _changed(node, **{bound: ast.BinOp(value, ast.Add(), ast.Constant(1))})
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Break | ast.Continue):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()
    elif _can_be_left_out(node, function):
        yield ast.Pass()


def _can_be_left_out(node: ast.AST, function: str) -> bool:
    """A statement that does something, and without which what follows can still run."""
    if isinstance(node, ast.Assign):
        return function != "__init__" and not _sets_a_name(node.targets[0])
    return isinstance(node, ast.Delete) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))


def _sets_a_name(target: ast.expr) -> bool:
    return (
        any(_sets_a_name(each) for each in target.elts)
        if isinstance(target, ast.Tuple)
        else isinstance(target, ast.Name)
    )


def _other_constants(value: object) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value + 1)
    elif isinstance(value, str):
        yield ast.Constant(value + "?")


def _other_calls(node: ast.Call) -> Iterator[ast.AST]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _FUNCTIONS:
        keywords = [] if _FUNCTIONS[name] == "list" else node.keywords
        yield _changed(node, func=ast.Name(_FUNCTIONS[name], ast.Load()), keywords=keywords)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _DROPPED_METHODS:
        yield node.func.value
    called = name or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
    if called and called[0].islower():  # of a class most are required: an error, whatever the tests look at
        for i, keyword in enumerate(node.keywords):
            if keyword.arg not in _SKIPPED_KEYWORDS:
                yield _changed(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
