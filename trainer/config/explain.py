"""Output of `marsrl config`: the resulting settings, the meaning of one key, and a page of all keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.keys import Key, all_keys, as_key, nearest
from marsrl.trainer.config.origin import ConfigError, ConfigOrigin

HEAD = """# Settings

All keys. Set them in a YAML file given with `--config`, or as arguments `key.sub=value`; later arguments win.
`<name>` is a name that you choose, of a policy or an agent. `marsrl config` prints the resulting settings, `marsrl config
--origin` also where each value was set, `marsrl config --explain rollout.segments` the meaning of one key, and
`marsrl config --markdown` this page.
"""


def page_of(name: str) -> str:
    """Return the docs page of a key (agents.<name>.top_p): the page named in the text of the key or of its nearest section."""
    parts = name.split(".")
    around = (all_keys().get(".".join(parts[:end])) for end in range(len(parts), 0, -1))
    named = (re.search(r"docs/\w+\.md", key.meaning) for key in around if key is not None)
    return next((page[0] for page in named if page is not None), "docs/concepts.md")


def help_line(message: str) -> str:
    """Return the page and command that explain the setting at the start of an error; "" if the error starts with no setting."""
    first = re.match(r"[\w.]*", message)[0].rstrip(".")  # type: ignore[index]  # the pattern always matches
    name = as_key(first.split("."))
    if name not in all_keys() or "docs/" in message:
        return ""
    return f"\n(more: {page_of(name)}, marsrl config --explain {first})"


def refusal(error: ValueError | OSError) -> str:
    """Return the text that a command prints, after its name, about settings or files that it cannot use."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return f"{error}{help_line(str(error))}"


def as_yaml(config: RunConfig, origin: ConfigOrigin | None = None) -> str:
    """Return the settings as YAML that reproduces them; with an origin, each line ends with where its value was set."""
    return "\n".join(_lines(config.model_dump(mode="json"), (), origin)) + "\n"


def _lines(settings: dict[str, Any], above: tuple[str, ...], origin: ConfigOrigin | None) -> Iterator[str]:
    indent = "  " * len(above)
    for name, value in settings.items():
        where = (*above, name)
        if isinstance(value, dict) and value:
            yield f"{indent}{_scalar(name)}:"
            yield from _lines(value, where, origin)
            continue
        comment = f"  # {origin.places.get('.'.join(where), 'default')}" if origin is not None else ""
        yield f"{indent}{_scalar(name)}: {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    """Return the value on one line, with terminal control characters escaped."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=False)
    return text.removesuffix("...\n").rstrip("\n")


def explained(name: str, config: RunConfig, origin: ConfigOrigin) -> str:
    """Return type, default and meaning of a key or section, and its value in these settings.

    Raises ConfigError for an unknown key; the message suggests the nearest one.
    """
    where = name.split(".")
    generic = as_key(where)
    settings = config.model_dump(mode="json")
    key, value = all_keys().get(generic), _value(settings, where)
    is_option = generic.split(".")[0] in ("task_options", "orchestration_options") and value is not None
    if generic.endswith(".<name>") and value is not None:  # policies.main: a section named by the user
        key = Key(generic, "section", "", all_keys()[generic.removesuffix(".<name>")].meaning)
    elif is_option:
        key = all_keys()[where[0]]
    if key is None:
        raise ConfigError(f"{name}: unknown key; {nearest(where)}")
    lines = [f"{name}: {key.kind}{f', default {key.default}' if key.default else ''}"]
    lines += [f"  {key.meaning}"] if key.meaning else []
    below = [child for child in all_keys().values() if child.name.rpartition(".")[0] == generic]
    if below and isinstance(value, dict):
        shown = [(child.name.rpartition(".")[2], child.meaning) for child in below]
        lines += [
            f"  {short}: {_short(value[short])}  # {meaning}".removesuffix("  # ")
            for short, meaning in shown
            if short in value  # A section with kinds has only the keys of its own kind.
        ]
    elif isinstance(value, dict) and value:
        lines += [f"  {line}" for line in _lines(value, (), None)]
    elif not isinstance(_value(settings, where[:-1]), dict):
        lines += [f"  here: none, because {'.'.join(where[:-1])} is not set"]
    else:
        lines += [f"  here: {_scalar(value)} ({origin.places.get(name, 'default')})"]
    return "\n".join([*lines, f"  more: {page_of(generic)}"])


def _short(value: Any) -> str:
    return "{...}" if isinstance(value, dict) and value else _scalar(value)


def _value(settings: Any, where: list[str]) -> Any:
    for part in where:
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings


def as_markdown() -> str:
    """Return a page of all keys, a table per section; a section with the same keys as an earlier one refers to that section."""
    sections: dict[str, list[Key]] = {}
    for key in all_keys().values():
        if key.kind != "section":
            sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    lines, first = [HEAD], dict[tuple[str, ...], str]()
    for name, keys in sections.items():
        lines += [f"## {f'`{name}`' if name else 'At the top'}\n"]
        section = all_keys().get(name.removesuffix(".<name>"))
        if section is not None and section.meaning:
            lines += [f"{_cell(section.meaning)}.\n"]
        earlier = name if section is None else first.setdefault(section.below, name)
        if earlier != name:
            anchor = re.sub(r"[^\w-]", "", earlier).lower()  # Heading anchor as GitHub and mkdocs build it.
            lines += [f"As in [`{earlier}`](#{anchor}): {', '.join(f'`{key.name}`' for key in keys)}.\n"]
            continue
        rows = [" | ".join(map(_cell, (key.kind, key.default, key.meaning))) for key in keys]
        table = [f"| `{key.name}` | {row} |" for key, row in zip(keys, rows, strict=True)]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|", *table, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _cell(text: str) -> str:
    """Escape Markdown markup outside of backticks."""
    pieces = text.rstrip(".").replace("|", "\\|").split("`")
    pieces[::2] = [piece.replace("<", "\\<").replace("*", "\\*").replace("[", "\\[") for piece in pieces[::2]]
    return "`".join(pieces)
