"""All settings, read from the models: each key's type, default and meaning, and the nearest to an unknown key."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from marsrl.rollout.config import Settings
from marsrl.trainer.config import RunConfig

_BOUNDS = (
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Ge, "ge", ">="),
    (annotated_types.Lt, "lt", "<"),
    (annotated_types.Le, "le", "<="),
)
_FAR = 65_536  # larger upper bounds only catch typing errors
_OR_NULL = " or null"
_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Key:
    """A setting or a section of them.

    name: dotted, with `<name>` for the user's names; kind: its type as text; default: as text, "" if required or a section;
    below: the models of a section, several if it has kinds; free: True if its keys are names chosen by the user.
    """

    name: str
    kind: str
    default: str
    meaning: str
    below: tuple[type[BaseModel], ...] = ()
    free: bool = False


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every setting and section by name, in the order of the models, a section before its keys."""
    return {key.name: key for key in _keys_of(RunConfig, "")}


def _keys_of(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in _fields(model):
        below = tuple(_held(field.annotation))
        is_free = bool(below) and get_origin(field.annotation) is dict
        meaning = (field.description or (_first_line(below[0]) if below else "")).replace("\n", " ")
        yield Key(prefix + name, _type(field), "" if below else _default(field), meaning, below, is_free)
        inside = f"{prefix}{name}.{'<name>.' if is_free else ''}"
        yield from _of_kinds({_kind(each): list(_keys_of(each, inside)) for each in below})


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a model by name and, if it allows other keys, their type as <name>."""
    yield from model.model_fields.items()
    if model.model_config.get("extra") == "allow":
        others = get_type_hints(model, include_extras=True)["__pydantic_extra__"]
        yield "<name>", FieldInfo.from_annotation(get_args(others)[1])


def _kind(model: type[BaseModel]) -> str:
    """Value of `kind` that selects the model; "" for a model without kinds."""
    return str(get_args(model.model_fields["kind"].annotation)[0]) if "kind" in model.model_fields else ""


def _of_kinds(keys_of: Mapping[str, Sequence[Key]]) -> Iterator[Key]:
    """Each key once, with the kinds that have it unless all do, and with defaults by kind if they differ."""
    for name in dict.fromkeys(key.name for keys in keys_of.values() for key in keys):
        having = {kind: key for kind, keys in keys_of.items() for key in keys if key.name == name}
        first = next(iter(having.values()))
        defaults = [f"{key.default} ({kind})" for kind, key in having.items()]
        is_one = len({key.default for key in having.values()} - {""}) < 2
        yield replace(
            first,
            kind=" or ".join(dict.fromkeys(key.kind for key in having.values())),
            default=first.default if is_one else ", ".join(defaults),
            meaning=first.meaning if len(having) == len(keys_of) else f"{', '.join(having)}: {first.meaning}",
        )


def as_key(where: Sequence[str]) -> str:
    """The model's name of a key that a user writes: agents.solver.top_p -> agents.<name>.top_p."""
    name = ""
    for part in where:
        is_own = f"{name}.<name>" in all_keys() and f"{name}.{part}" not in all_keys()  # beside keys with fixed names
        is_named = is_own or (name in all_keys() and all_keys()[name].free)
        name = f"{name}.{'<name>' if is_named else part}".lstrip(".")
    return name


def kinds_of(name: str) -> dict[str, type[BaseModel]]:
    """The models of a section with several kinds, by kind; {} for any other."""
    models = all_keys()[name].below if name in all_keys() else ()
    return {_kind(model): model for model in models} if len(models) > 1 and all(map(_kind, models)) else {}


def nearest(where: Sequence[str]) -> str:
    """`did you mean x?` from the keys of the same section, else from the same key name anywhere in the tree."""
    *parent, last = where
    section = as_key(parent)
    siblings = [name.rpartition(".")[2] for name in all_keys() if name.rpartition(".")[0] == section]
    if parent and not siblings:
        return nearest(parent)
    if having := [kind for kind, model in kinds_of(section).items() if last in model.model_fields]:
        return f"{'.'.join(parent)} has it where its kind is {' or '.join(having)}"
    everywhere = {name.rpartition(".")[2]: name for name in all_keys()}
    if last in everywhere:
        return f"did you mean {everywhere[last]}?"
    if near := difflib.get_close_matches(last, siblings, n=1, cutoff=0.6):
        return f"did you mean {'.'.join([*parent, near[0]])}?"
    if near := difflib.get_close_matches(last, everywhere, n=1, cutoff=0.75):
        return f"did you mean {everywhere[near[0]]}?"
    return f"keys of {'.'.join(parent) or 'the config'}: {', '.join(siblings)}"


def as_written(place: Sequence[str | int]) -> list[str]:
    """A key as the user writes it, without the kind that pydantic inserts for a section with several
    (tools.search.index.corpus)."""
    where: list[str] = []
    kinds: Collection[str] = ()
    for part in map(str, place):
        if part in kinds:
            kinds = ()
        else:
            where.append(part)
            kinds = kinds_of(as_key(where))
    return where


def _held(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation: itself, an optional one, a mapping's values, or the kinds of a section."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _held(part)]


def _first_line(model: type[BaseModel]) -> str:
    own = model.__doc__ if model.__doc__ and model.__doc__ != Settings.__doc__ else ""
    return inspect.cleandoc(own).split("\n\n")[0] if own else ""


def _type(field: FieldInfo) -> str:
    words = _words(field.annotation)
    return words.removesuffix(_OR_NULL) + _bounds(field.metadata) + (_OR_NULL if words.endswith(_OR_NULL) else "")


def _words(annotation: Any) -> str:
    """A type in terms of YAML."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return f"{_words(parts[0])}{_bounds(FieldInfo.from_annotation(annotation).metadata)}"
    if origin is Literal:
        return " or ".join(str(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(part) for part in parts))
    if origin is dict:
        return f"mapping of name to {_words(parts[1])}"
    if origin in (list, tuple):
        return f"list of {_words(parts[0])}" if origin is list or Ellipsis in parts else f"{len(parts)} numbers"
    return _PLAIN.get(annotation, "section")


def _bounds(metadata: Sequence[Any]) -> str:
    bounds = [
        (sign, getattr(each, name)) for kind, name, sign in _BOUNDS for each in metadata if isinstance(each, kind)
    ]
    found = [f"{sign} {bound:g}" for sign, bound in bounds if bound < _FAR]
    return f" {' and '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return ""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple):
        return str(list(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
