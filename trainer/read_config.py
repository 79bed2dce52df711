"""YAML file + `key.sub=value` words -> a checked RunConfig, or one message that a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from marsrl.trainer.config import RunConfig

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DEFAULT_FOR_TASK = {"arithmetic": "cpu_default.yaml", "math": "math_default.yaml"}


class ConfigError(ValueError):
    """The config as a whole cannot be used; the text says which keys, what was found and what was expected."""


def read_config(path: str | Path | None, overrides: Sequence[str] = ()) -> tuple[RunConfig, str]:
    """The checked settings and the preset's name (the file's stem).

    Args:
        path: a YAML file; None takes the default of the task that `overrides` name (arithmetic: configs/cpu_default.yaml).
        overrides: words `key.sub=value`, later ones win; values are YAML.

    Raises:
        ConfigError: unreadable file, malformed word, unknown key, wrong type, or settings that contradict each other.
    """
    try:
        words = OmegaConf.from_dotlist(list(_checked_words(overrides)))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"command line: {error}") from error
    if path is None:
        path = default_config(str(OmegaConf.select(words, "task", default="arithmetic")))
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"--config {path}: no such file; presets here: {', '.join(sorted(p.name for p in CONFIGS.glob('*.yaml')))}"
        )
    try:
        base = OmegaConf.load(path)
        if not OmegaConf.is_dict(base):
            raise ConfigError(f"{path}: expected a mapping of settings at the top")
        merged: Any = OmegaConf.to_container(OmegaConf.merge(base, words), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        return RunConfig.model_validate(merged), path.stem
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def default_config(task: str) -> Path:
    """The preset that is meant when the user names a task but no file."""
    if task not in DEFAULT_FOR_TASK:
        raise ConfigError(f"task: {task!r} is not known; tasks: {', '.join(DEFAULT_FOR_TASK)}")
    return CONFIGS / DEFAULT_FOR_TASK[task]


def _checked_words(overrides: Sequence[str]) -> Sequence[str]:
    for word in overrides:
        key, equals, _ = word.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ConfigError(
                f"command line: {word!r} is not a setting; write key.sub=value (--help lists the options)"
            )
    return overrides


def explain(error: ValidationError) -> str:
    """One line a problem: the key as written, what is wrong with it, the nearest right key for an unknown one."""
    lines = []
    for problem in error.errors(include_url=False):
        where = [str(part) for part in problem["loc"]]
        key = ".".join(where)
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key; {_nearest(where)}")
        elif problem["type"] == "value_error":
            lines.append(str(problem["ctx"]["error"]) if "ctx" in problem else problem["msg"])
        else:
            lines.append(f"{key}: {problem['msg']} (found {problem['input']!r})")
    return "\n".join(lines)


def _nearest(where: Sequence[str]) -> str:
    """`did you mean x?` from the keys of the same section, else from the same key name anywhere in the tree."""
    model: type[BaseModel] | None = RunConfig
    parent: list[str] = []
    for part in where[:-1]:
        model = _section(model, part) if model else None
        parent.append(part)
    siblings = list(model.model_fields) if model else []
    everywhere = {path.rsplit(".", 1)[-1]: path for path in _all_keys(RunConfig)}
    if where[-1] in everywhere:
        return f"did you mean {everywhere[where[-1]]}?"
    near = difflib.get_close_matches(where[-1], siblings, n=1, cutoff=0.6)
    if near:
        return f"did you mean {'.'.join([*parent, near[0]])}?"
    near = difflib.get_close_matches(where[-1], everywhere, n=1, cutoff=0.75)
    if near:
        return f"did you mean {everywhere[near[0]]}?"
    return f"keys of {'.'.join(parent) or 'the config'}: {', '.join(siblings)}"


def _section(model: type[BaseModel], part: str) -> type[BaseModel] | None:
    """The model below one key; a mapping like `agents` counts its free names as transparent."""
    field = model.model_fields.get(part)
    if field is None:  # a free name inside a mapping
        return model
    candidates = [field.annotation, *get_args(field.annotation)]
    found = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    return found[0] if found else None


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        below = _section(model, name)
        if below is not None:
            free = "" if below is field.annotation else "<name>."
            keys += _all_keys(below, f"{prefix}{name}.{free}")
    return keys
