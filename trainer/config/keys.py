"""Catalog of all settings, read from the pydantic models: type, default and meaning of each key, and the nearest known key."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from marsrl.trainer.config import RunConfig

_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_FAR = 65_536  # Larger upper bounds only catch typos and are not shown.
_PLAIN = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}

Schema = Mapping[str, Any]
"""JSON schema of a pydantic model, or of one of its fields."""


@dataclass(frozen=True, slots=True)
class Key:
    """A setting or a section.

    name: dotted key, with `<name>` for names chosen by the user.
    kind: the type as text.
    default: the default as text; "" for a section, and for a setting without a default.
    meaning: the setting's description.
    below: names of a section's pydantic models; several if the section has kinds (its key `kind` selects one of them).
    free: True if the user chooses the section's keys.
    """

    name: str
    kind: str
    default: str
    meaning: str
    below: tuple[str, ...] = ()
    free: bool = False


@functools.cache
def _whole() -> Schema:
    return RunConfig.model_json_schema()


@functools.cache
def all_keys() -> dict[str, Key]:
    """Return all settings and sections by name, in model order, a section before its keys."""
    return {key.name: key for key in _keys_of(_whole(), "")}


def _keys_of(model: Schema, prefix: str) -> Iterator[Key]:
    others = {"<name>": model["additionalProperties"]} if model["additionalProperties"] else {}
    for name, field in {**model["properties"], **others}.items():
        below = tuple(_models(field))
        is_free = bool(below) and field.get("type") == "object"
        about = "".join(_model(model).get("description", "").split("\n\n")[0] for model in below[:1])
        meaning = field.get("description", about)
        default = "" if below or name in model.get("required", ()) else _default(field)
        yield Key(prefix + name, _words(field), default, meaning.replace("\n", " "), below, is_free)
        inside = f"{prefix}{name}.{'<name>.' if is_free else ''}"
        yield from _of_kinds({_kind(child): list(_keys_of(_model(child), inside)) for child in below})


def _model(name: str) -> Schema:
    model: Schema = _whole()["$defs"][name]
    return model


def _models(field: Schema) -> list[str]:
    """Return the names of the pydantic models in a field's type; several if the section has kinds."""
    if "$ref" in field:
        return [field["$ref"].rpartition("/")[2]]
    parts = [*field.get("anyOf", ()), *field.get("oneOf", ()), field.get("items"), _values(field)]
    return [model for part in parts if isinstance(part, Mapping) for model in _models(part)]


def _values(field: Schema) -> Any:
    """Return the schema of a mapping's values, whether its keys are free or must match a pattern; None for other fields."""
    return next(iter(field.get("patternProperties", {}).values()), field.get("additionalProperties"))


def _kind(model: str) -> str:
    """Return the value of `kind` that selects the pydantic model; "" if the section has no kinds."""
    return str(_model(model)["properties"].get("kind", {}).get("const", ""))


def _of_kinds(keys_of: Mapping[str, Sequence[Key]]) -> Iterator[Key]:
    """Merge the keys of a section's kinds, and yield each key once. keys_of: {kind: its keys}.

    The meaning of a key names the kinds that have it, unless all do. If its default depends on the kind, all defaults are listed.
    """
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
    """Return the catalog's name for a key that a user wrote: agents.solver.top_p -> agents.<name>.top_p."""
    name = ""
    for part in where:
        # The section has fixed and free keys.
        is_extra = f"{name}.<name>" in all_keys() and f"{name}.{part}" not in all_keys()
        is_named = is_extra or (name in all_keys() and all_keys()[name].free)
        name = f"{name}.{'<name>' if is_named else part}".lstrip(".")
    return name


def kinds_of(name: str) -> dict[str, Collection[str]]:
    """Return the keys of each kind of a section; {} for a section without kinds."""
    models = all_keys()[name].below if name in all_keys() else ()
    kinds = {_kind(model): _model(model)["properties"].keys() for model in models}
    return kinds if len(models) > 1 and all(kinds) else {}


OTHER_NAMES = {
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_completion_length"), "max_response_tokens"),
    "max_prompt_length": "max_input_tokens",
    "learning_rate": "lr",
    "num_generations": "group_size",
}
"""Name of a setting in another trainer or engine -> its name here; docs/coming_from.md lists more."""


_REMOVED = {
    "tools.python.strict": "without a complete sandbox by bubblewrap the tool is refused (docs/python.md)",
    "policies.<name>.price": "multiply the token counts (cost/<agent>/input_tokens, cached_tokens, output_tokens) by your prices",
}
"""Settings that earlier versions had, and what replaces each."""


def nearest(where: Sequence[str]) -> str:
    """Return `did you mean x?` with the nearest key of the same section, else of the whole tree."""
    if as_key(where) in _REMOVED:
        return f"it was removed: {_REMOVED[as_key(where)]}"
    *parent, last = where
    last = OTHER_NAMES.get(last, last)
    section = as_key(parent)
    siblings = [name.rpartition(".")[2] for name in all_keys() if name.rpartition(".")[0] == section]
    if parent and not siblings:
        return nearest(parent)
    if having := [kind for kind, keys in kinds_of(section).items() if last in keys]:
        return f"{'.'.join(parent)} has this key only if its kind is {' or '.join(having)}"
    named: dict[str, list[str]] = {}
    for name in sorted(all_keys(), key=lambda name: name.count(".")):
        named.setdefault(name.rpartition(".")[2], []).append(name)
    if last not in named:
        last = next(iter(difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)), last)
    if last in siblings:
        return f"did you mean {'.'.join([*parent, last])}?"
    if near := difflib.get_close_matches(last, named, n=1, cutoff=0.75):
        inside = [name for name in named[near[0]] if parent and name.startswith(f"{section}.")]
        below = [".".join([*parent, name[len(section) + 1 :]]) for name in inside]
        return f"did you mean {' or '.join((below or named[near[0]])[:3])}?"
    return f"keys of {'.'.join(parent) or 'the config'}: {', '.join(siblings)}"


def as_written(location: Sequence[str | int]) -> list[str]:
    """Return a key as the user writes it, without pydantic's kind (`index` in tools.search.index.corpus)."""
    where: list[str] = []
    kinds: Collection[str] = ()
    for part in map(str, location):
        if part in kinds:
            kinds = ()
        else:
            where.append(part)
            kinds = kinds_of(as_key(where))
    return where


def _words(field: Any) -> str:
    """Describe a field's type in YAML terms."""
    if field is True or "$ref" in field:
        return "section"
    if options := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_words, options)))
    if "enum" in field or "const" in field:
        return " or ".join(map(str, field.get("enum") or [field["const"]]))
    if field["type"] == "object":
        return f"mapping of name to {_words(_values(field))}"
    if field["type"] == "array":
        return f"{len(field['prefixItems'])} numbers" if "prefixItems" in field else f"list of {_words(field['items'])}"
    bounds = [f"{sign} {field[name]:g}" for name, sign in _BOUNDS.items() if field.get(name, _FAR) < _FAR]
    return f"{_PLAIN[field['type']]} {' and '.join(bounds)}".rstrip()


def _default(field: Schema) -> str:
    # The schema omits the defaults of default_factory, which are empty.
    value = field.get("default", [] if field.get("type") == "array" else {})
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
