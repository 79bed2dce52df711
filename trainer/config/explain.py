"""`marsrl config`: the settings that result, what one key means, every key as a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.keys import Key, as_key, every_key, key_names, nearest
from marsrl.trainer.config.origin import ConfigError, ConfigOrigin

_PAGES = {
    "agents": "own_team",
    "agents.<name>.parser": "prompts",
    "agents.<name>.pick": "concepts",
    "agents.<name>.prompt": "prompts",
    "credit": "credit",
    "curate": "curate",
    "data": "data",
    "judge": "judge",
    "loss": "credit",
    "mpt": "credit",
    "orchestration": "own_team",
    "policies": "concepts",
    "policies.<name>.frozen": "frozen_policies",
    "policies.<name>.layout": "parallelism",
    "policies.<name>.model": "quickstart",
    "rollout": "concepts",
    "rollout.engines": "clusters",
    "rollout.join_s": "clusters",
    "rollout.placement": "clusters",
    "rollout.ray_address": "clusters",
    "rollout.silence_s": "faults",
    "run": "quickstart",
    "run.resume": "faults",
    "sync": "weight_sync",
    "task": "own_task",
    "tools": "tools",
    "tools.python": "python",
    "trainer": "troubleshooting",
    "trainer.router_replay": "numerics",
    "warm_start": "cpu_default",
}
HEAD = """# Settings

Every key, from the models that check it (`marsrl config --markdown` prints this page). A setting is a line of a YAML file
given with `--config`, or a word `key.sub=value`; later words win. `<name>` is a name of yours: of a policy, of an agent, of
a judge. `marsrl config` prints what results from a file and words, `marsrl config --origin` with where each value was given,
and `marsrl config --explain rollout.segments` what one key means.
"""


def page_of(name: str) -> str:
    """The page of docs/ that helps with a key (agents.<name>.top_p), or else the list of all keys."""
    parts = name.split(".")
    ends = range(len(parts), 0, -1)
    page = next((_PAGES[k] for end in ends if (k := ".".join(parts[:end])) in _PAGES), "config")
    return f"docs/{page}.md"


def help_line(message: str) -> str:
    """What to read about the first setting that an error's text begins with; "" where it begins with none."""
    first = re.match(r"[\w.]*", message)[0].rstrip(".")  # type: ignore[index]  # it matches the empty text, too
    name = as_key(first.split("."))
    if name not in key_names() or "docs/" in message:
        return ""
    return f"\n(more: {page_of(name)}, marsrl config --explain {first})"


def as_yaml(config: RunConfig, origin: ConfigOrigin | None = None) -> str:
    """The settings as a file that gives the same again; with an origin each line ends with where its value was given."""
    return "\n".join(_lines(config.model_dump(mode="json"), (), origin)) + "\n"


def _lines(settings: dict[str, Any], above: tuple[str, ...], origin: ConfigOrigin | None) -> Iterator[str]:
    indent = "  " * len(above)
    for name, value in settings.items():
        where = (*above, name)
        if isinstance(value, dict) and value:
            yield f"{indent}{_scalar(name)}:"
            yield from _lines(value, where, origin)
            continue
        comment = f"  # {_given(origin, '.'.join(where))}" if origin is not None else ""
        yield f"{indent}{_scalar(name)}: {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    """On one line, with what a terminal would obey escaped."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=False)
    return text.removesuffix("...\n").rstrip("\n")


def _given(origin: ConfigOrigin, key: str) -> str:
    return origin.places.get(key, "default")


def explained(name: str, config: RunConfig, origin: ConfigOrigin) -> str:
    """What a key or a section is, and what it is in these settings.

    Raises:
        ConfigError: there is no such key; the message names the nearest.
    """
    where = name.split(".")
    generic = as_key(where)
    keys = {key.name: key for key in every_key()}
    settings = config.model_dump(mode="json")
    found, value = keys.get(generic), _value(settings, where)
    is_option = generic.split(".")[0] in ("task_options", "orchestration_options") and value is not None
    if generic.endswith(".<name>") and value is not None:  # policies.main: a section that the user has named
        found = Key(generic, "section", "", keys[generic.removesuffix(".<name>")].meaning)
    elif is_option:
        found = keys[where[0]]
    if found is None:
        raise ConfigError(f"{name}: unknown key; {nearest(where)}")
    lines = [f"{name}: {found.kind}{f', default {found.default}' if found.default else ''}"]
    lines += [f"  {found.meaning}"] if found.meaning else []
    below = [key for key in keys.values() if key.name.rpartition(".")[0] == generic]
    if below and isinstance(value, dict) and not found.free:
        shown = [(key.name.rpartition(".")[2], key.meaning) for key in below]
        lines += [
            f"  {short}: {_short(value[short])}  # {meaning}".removesuffix("  # ")
            for short, meaning in shown
            if short in value  # else of another kind of the section
        ]
    elif isinstance(value, dict) and value:
        lines += [f"  {each}" for each in _lines(value, (), None)]
    elif not isinstance(_value(settings, where[:-1]), dict):
        lines += [f"  here: none, as {'.'.join(where[:-1])} is not set"]
    else:
        lines += [f"  here: {_scalar(value)} ({_given(origin, name)})"]
    return "\n".join([*lines, f"  more: {page_of(generic)}"])


def _short(value: Any) -> str:
    return "{...}" if isinstance(value, dict) and value else _scalar(value)


def _value(settings: Any, where: list[str]) -> Any:
    for part in where:
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings


def as_markdown() -> str:
    """docs/config.md: a table a section."""
    tables: dict[str, list[Key]] = {}
    about: dict[str, str] = {}
    for key in every_key():
        if key.below:
            about[f"{key.name}.<name>" if key.free else key.name] = key.meaning
        if key.kind != "section":
            tables.setdefault(key.name.rpartition(".")[0], []).append(key)
    lines = [HEAD]
    for section, keys in tables.items():
        lines += [f"## {f'`{section}`' if section else 'At the top'}\n"]
        lines += [f"{_cell(about[section])}.\n"] if about.get(section) else []
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in keys:
            cells = (f"`{key.name}`", _cell(key.kind), _cell(key.default), _cell(key.meaning))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _cell(text: str) -> str:
    """Outside its backticks, what Markdown would read as markup is escaped."""
    pieces = text.rstrip(".").replace("|", "\\|").split("`")
    pieces[::2] = [piece.replace("<", "\\<").replace("*", "\\*").replace("[", "\\[") for piece in pieces[::2]]
    return "`".join(pieces)
