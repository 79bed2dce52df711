"""Preset < YAML file < `key.sub=value` words -> a checked RunConfig, or one message that a person can act on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from marsrl.rollout.agents.prompts import is_prompt_file
from marsrl.rollout.orchestrations.registry import ORCHESTRATIONS, agent_names
from marsrl.rollout.own_classes import is_own
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.keys import as_written, kinds_of, nearest, sections_with_kinds
from marsrl.trainer.config.origin import ConfigError, ConfigOrigin, Layer, places_in_words, places_in_yaml

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"  # in a checkout, and in an installed package
DEFAULT_FOR_TASK = {"arithmetic": "cpu_default", "math": "math_default", "qa": "qa_default"}


def read_config(
    path: str | Path | None, overrides: Sequence[str] = (), *, trains: bool = True
) -> tuple[RunConfig, ConfigOrigin]:
    """The checked settings, and what they were made of.

    Layers, later ones win: the task's preset, the one that `preset` names, the file, the words. Mappings are merged key
    by key, a list is replaced. `preset: none` inherits nothing. A layer that names an `orchestration` leaves behind the
    agents of layers below which that team does not have, and one that names the `kind` of a section the keys of layers below
    which that kind does not have; one that names `rollout.engine` leaves the other engine's keys behind. A policy that only a
    preset names is left out where no agent has it: who gives policies of his own to all agents does not get the preset's beside
    them.

    Args:
        path: a YAML file or the name of a shipped preset; None: no file.
        overrides: words `key.sub=value`, later ones win; values are YAML.
        trains: False where nothing is trained, and every policy may be frozen.

    Raises:
        ConfigError: unreadable file, malformed word, unknown key, wrong type, or settings that contradict each other.
    """
    given = [] if path is None else [_find(str(path))]
    given += [_read_words(overrides)] if overrides else []
    origin = ConfigOrigin(given)
    try:
        origin = ConfigOrigin([*_inherited(given), *given])
        merged: Any = OmegaConf.to_container(
            OmegaConf.merge(*(layer.settings for layer in origin.layers)), resolve=True
        )
    except OmegaConfBaseException as error:
        raise ConfigError(f"{origin}: {error}") from error
    _find_paths(merged, origin.layers)
    _leave_out_agents_of_another_team(merged, origin.layers)
    _leave_out_keys_of_another_kind(merged, origin.layers)
    _leave_out_keys_of_the_other_engine(merged, origin.layers)
    _leave_out_unused_policies(merged, given)
    try:
        return RunConfig.model_validate({**merged, "preset": "none"}, context={"trains": trains}), origin
    except ValidationError as error:
        raise ConfigError(explain(error, origin)) from error


def models_given(config: RunConfig) -> dict[str, str]:
    """The directory of each policy, where nothing is warm-started: ConfigError names one without."""
    models = {name: policy.model for name, policy in config.policies.items() if policy.model is not None}
    missing = [name for name in config.policies if name not in models]
    if missing:
        raise ConfigError(f"policies.{missing[0]}.model is not set: give the Hugging Face directory to evaluate")
    return models


def preset_names() -> list[str]:
    """The shipped presets."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _find(name: str) -> Layer:
    """What --config means: a file that is there, else a shipped preset by its name."""
    if Path(name).is_file():
        return _read_file(Path(name), name)
    if Path(name).name == name and name.removesuffix(".yaml") in preset_names():
        return _read_preset(name.removesuffix(".yaml"))
    raise ConfigError(f"--config {name}: no such file; presets, to be given by name: {', '.join(preset_names())}")


def _read_preset(name: str) -> Layer:
    return _read_file(CONFIGS / f"{name}.yaml", f"preset {name}.yaml")


def _read_file(path: Path, label: str) -> Layer:
    try:
        settings = OmegaConf.load(path)
        places = places_in_yaml(path.read_text("utf-8"), label)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{label}: {error}") from error
    if not isinstance(settings, DictConfig):
        raise ConfigError(f"{label}: expected a mapping of settings at the top")
    return Layer(label, path.resolve(), settings, places)


def _read_words(words: Sequence[str]) -> Layer:
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ConfigError(
                f"command line: {word!r} is not a setting; write key.sub=value (--help lists the options)"
            )
    try:
        settings = OmegaConf.from_dotlist(list(words))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"command line: {error}") from error
    return Layer("command line", None, settings, places_in_words(settings, "command line"))


def _inherited(given: Sequence[Layer]) -> list[Layer]:
    """The presets below what the user gives, lowest first; one that he gives himself is not there twice."""
    named, layers = _last(given, "preset"), list(given)
    if named == "none":
        return []
    if named is not None:
        if named not in preset_names():
            message = f"preset: {named!r} is none of the shipped presets; they are {', '.join(preset_names())}, or none"
            raise ConfigError(ConfigOrigin(given).with_places(message))
        layers.insert(0, _read_preset(named))
    task = _last(layers, "task") or "arithmetic"
    task = "math" if is_own(task) else task
    if task not in DEFAULT_FOR_TASK:
        message = f"task: {task!r} is not known; tasks: {', '.join(DEFAULT_FOR_TASK)}, and your own as FILE.py:CLASS"
        raise ConfigError(ConfigOrigin(given).with_places(message))
    default = _read_preset(DEFAULT_FOR_TASK[task])
    if all(layer.file != default.file for layer in layers):
        layers.insert(0, default)
    return layers[: len(layers) - len(given)]


def _last(layers: Sequence[Layer], key: str) -> str | None:
    """A value at the top as the last layer that gives one gives it."""
    values = [layer.settings.get(key) for layer in layers]
    return next((str(value) for value in reversed(values) if value is not None), None)


def _find_paths(merged: dict[str, Any], layers: Sequence[Layer]) -> None:
    """Make paths of what a run reads absolute: of a user's YAML file relative to it, of a word to the working directory.

    Left as they are: malformed values, for the models to refuse, and the names of models that are nowhere here (Qwen3-8B of
    `marsrl plan`; Qwen/Qwen3-8B, of which read_shape says how to get it).
    """

    def found(path: Any, key: str) -> Any:
        givers = [layer for layer in layers if key in layer.places]
        if not isinstance(path, str) or not path or not givers or _is_shipped(givers[-1]):
            return path
        folder = givers[-1].file.parent if givers[-1].file is not None else Path.cwd()
        return os.path.normpath(folder / Path(path).expanduser())

    for key in ("task", "orchestration"):
        if isinstance(name := merged.get(key), str) and is_own(name):
            file, _, kind = name.rpartition(":")
            merged[key] = f"{found(file, key)}:{kind}"
    data = merged.get("data")
    for key in ("train", "eval"):
        files = data.get(key) if isinstance(data, dict) else None
        if isinstance(data, dict) and isinstance(files, list):
            data[key] = [
                {k: found(value, f"data.{key}") if k == "path" else value for k, value in file.items()}
                if isinstance(file, dict)
                else found(file, f"data.{key}")
                for file in files
            ]
        elif isinstance(data, dict) and files is not None:
            data[key] = found(files, f"data.{key}")
    sections = (("policies", ("model", "reference")), ("tools", ("corpus", "index")), ("agents", ("prompt",)))
    for section, keys in sections:
        below = merged.get(section)
        for name, settings in below.items() if isinstance(below, dict) else ():
            for key in keys:
                path = settings.get(key) if isinstance(settings, dict) else None
                absolute = found(path, f"{section}.{name}.{key}")
                is_word = (
                    path in ("none", "start") if key == "reference" else key == "prompt" and not is_prompt_file(path)
                )
                if isinstance(path, str) and not is_word and not (section == "policies" and _is_a_name(path, absolute)):
                    settings[key] = absolute


def _is_a_name(model: str, path: str) -> bool:
    """Is `model` no path, as far as can be seen: OWNER/NAME or NAME, and no such directory?"""
    is_there = os.path.exists(path) or os.path.exists(model)
    return not is_there and re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", str(model)) is not None


def _leave_out_keys_of_the_other_engine(merged: dict[str, Any], layers: Sequence[Layer]) -> None:
    """Take out keys of rollout.vllm that only layers below `rollout.engine: local` give, and the other way round."""
    rollout = merged.get("rollout")
    givers = [i for i, layer in enumerate(layers) if "rollout.engine" in layer.places]
    other = {"vllm": "local", "local": "vllm"}.get(str(rollout.get("engine"))) if isinstance(rollout, dict) else None
    if other is None or not givers or not isinstance(rollout, dict) or not isinstance(rollout.get(other), dict):
        return
    rollout[other] = {
        key: value
        for key, value in rollout[other].items()
        if any(f"rollout.{other}.{key}" in layer.places for layer in layers[givers[-1] :])
    }


def _leave_out_agents_of_another_team(merged: dict[str, Any], layers: Sequence[Layer]) -> None:
    """Take out another orchestration's agents where no layer names them that gives the orchestration, or one above."""
    givers = [i for i, layer in enumerate(layers) if "orchestration" in layer.settings]
    agents, name = merged.get("agents"), merged.get("orchestration")
    if not givers or not isinstance(agents, dict) or not isinstance(name, str):
        return
    try:
        mine = set(agent_names(name))
    except ValueError:  # it is refused when the settings are checked
        return
    others = {agent for other in ORCHESTRATIONS for agent in agent_names(other)} - mine
    own = {agent for layer in layers[givers[-1] :] for agent in agents if f"agents.{agent}" in layer.places}
    merged["agents"] = {agent: settings for agent, settings in agents.items() if agent not in others - own}


def _leave_out_keys_of_another_kind(merged: dict[str, Any], layers: Sequence[Layer]) -> None:
    """Take out of a section that has kinds what its kind does not have, where only layers below the one that names it give it."""
    for where in sections_with_kinds():
        section: Any = merged
        for part in where:
            section = section.get(part) if isinstance(section, dict) else None
        name = ".".join(where)
        givers = [i for i, layer in enumerate(layers) if f"{name}.kind" in layer.places]
        kinds = kinds_of(where)
        kind = kinds.get(str(section.get("kind"))) if isinstance(section, dict) else None
        if kind is None or not givers:  # what is malformed is left to the models
            continue
        own = {key for layer in layers[givers[-1] :] for key in section if f"{name}.{key}" in layer.places}
        others = {key for each in kinds.values() for key in each.model_fields} - kind.model_fields.keys()
        for key in section.keys() & others - own:
            del section[key]


def _is_shipped(layer: Layer) -> bool:
    return layer.file is not None and layer.file.parent == CONFIGS


def _leave_out_unused_policies(merged: dict[str, Any], given: Sequence[Layer]) -> None:
    """Take the policies out that no layer of the user names, a shipped preset being none, and no agent has.

    What is malformed is left to the models.
    """
    policies, agents = merged.get("policies"), merged.get("agents")
    if isinstance(policies, dict) and isinstance(agents, dict):
        used = {str(agent.get("policy", "main")) for agent in agents.values() if isinstance(agent, dict)}
        used |= set() if _names_every_agent(merged) else {"main"}
        own = {
            name
            for name in policies
            if any(f"policies.{name}" in layer.places for layer in given if not _is_shipped(layer))
        }
        merged["policies"] = {name: policy for name, policy in policies.items() if name in used | own}


def _names_every_agent(merged: dict[str, Any]) -> bool:
    """Are the settings of all agents given, so that none has the default policy?"""
    try:
        return set(agent_names(str(merged.get("orchestration", "verifier_corrector")))) <= set(merged["agents"])
    except ValueError:  # it is refused when the settings are checked
        return True


def explain(error: ValidationError, origin: ConfigOrigin) -> str:
    """One line a problem: the key, what is wrong with it, the nearest right key for an unknown one, where it was given."""
    lines = []
    for problem in error.errors(include_url=False):
        where = as_written(problem["loc"])
        key, place = ".".join(where), origin.place(where)
        given = f" ({place})" if place else ""
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key; {nearest(where)}{given}")
        elif problem["type"] == "value_error":
            reason = str(problem["ctx"]["error"]) if "ctx" in problem else problem["msg"]
            placed = origin.with_places(reason)
            lines.append(placed if placed != reason else f"{reason}{given}")
        else:
            lines.append(f"{key}: {problem['msg']} (found {problem['input']!r}){given}")
    return "\n".join(lines)
