"""Read a config: preset < YAML file < `key.sub=value` words -> a checked RunConfig, or one actionable message."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from marsrl.rollout.agents.prompts import is_prompt_file
from marsrl.rollout.orchestrations.registry import ORCHESTRATIONS, agent_names, ignored_by
from marsrl.rollout.own_classes import is_in_memory, is_own
from marsrl.rollout.text import in_one_line
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.agreement import check_agreement
from marsrl.trainer.config.keys import all_keys, as_written, kinds_of, nearest
from marsrl.trainer.config.objective import IGNORED_OF_LOSS
from marsrl.trainer.config.origin import ConfigError, ConfigOrigin, Layer, layer_of_file, layer_of_words

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"  # The same in a checkout and an installed package.
DEFAULT_FOR_TASK = {
    "arithmetic": "cpu_default",
    "math": "math_default",
    "qa": "qa_default",
    "reasoning_gym": "math_default",
}
_PATHS = re.compile(
    r"task|orchestration|data\.(train|eval|demonstrations)|policies\.[^.]+\.(model|reference|adapter\.start)|(rollout|policies\.[^.]+)\.vllm\.draft_model|tools\.[^.]+\.(corpus|index|function|command)"
    r"|agents\.[^.]+\.prompt|external\.(function|environment|command|python)"
)


def read_config(
    path: str | Path | None, overrides: Sequence[str] = (), *, trains: bool = True, source: str = "command line"
) -> tuple[RunConfig, ConfigOrigin]:
    """Return the checked settings, and their layers.

    The layers are the task's preset, the preset that `preset` names, the file and the words; later ones win. Mappings are
    merged key by key, lists are replaced. `preset: none` inherits nothing. A layer that chooses an orchestration, an engine or
    a section's kind drops the settings that lower layers give for other choices (_of_other_choices). A policy that only a
    preset defines is dropped if no agent uses it: users who set a policy for every agent do not get the preset's policies as
    well.

    path: a YAML file or the name of a shipped preset; None: no file.
    overrides: words `key.sub=value`, later ones win; values are YAML.
    trains: False if nothing is trained, so that all policies may be frozen.
    source: name of the words' source, for messages.

    Raises ConfigError for an unreadable file, malformed word, unknown key, wrong type, or contradictory settings.
    """
    user_layers = [] if path is None else [_find(str(path))]
    user_layers += [layer_of_words(overrides, source)] if overrides else []
    origin = ConfigOrigin(user_layers)
    try:
        origin = ConfigOrigin([*_inherited(user_layers), *user_layers])
        merged: Any = OmegaConf.to_container(
            OmegaConf.merge(*(layer.settings for layer in origin.layers)), resolve=True
        )
    except OmegaConfBaseException as error:
        raise ConfigError(f"{origin}: {in_one_line(error)}") from error
    _make_paths_absolute(merged, origin.layers)
    _leave_out_other_choices(merged, origin)
    _leave_out_unused_policies(merged, user_layers)
    try:
        config = RunConfig.model_validate({**merged, "preset": "none"})
    except ValidationError as error:
        raise ConfigError(explain(error, origin)) from error
    with origin.places_in_errors():
        check_agreement(config, trains=trains)
    return config, origin


def models_given(config: RunConfig) -> dict[str, str]:
    """Return each policy's model directory, for commands without a warm start; ConfigError if one is not set."""
    models = {name: folder for name, policy in config.policies.items() if (folder := policy.directory) is not None}
    missing = [name for name in config.policies if name not in models]
    if missing:
        raise ConfigError(f"policies.{missing[0]}.model is not set: give the Hugging Face directory to evaluate")
    return models


def preset_names() -> list[str]:
    """Return the names of the shipped presets."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _find(name: str) -> Layer:
    """Return the file that --config names, or else the shipped preset of that name."""
    if Path(name).is_file():
        return layer_of_file(Path(name), name)
    if Path(name).name == name and name.removesuffix(".yaml") in preset_names():
        return _read_preset(name.removesuffix(".yaml"))
    if Path(name).is_dir():
        raise ConfigError(f"--config {name}: is a directory; name a YAML file in it, such as a run's config.yaml")
    raise ConfigError(f"--config {name}: no such file or preset; presets: {', '.join(preset_names())}")


def _read_preset(name: str) -> Layer:
    return layer_of_file(CONFIGS / f"{name}.yaml", f"preset {name}.yaml")


def _inherited(user_layers: Sequence[Layer]) -> list[Layer]:
    """Return the presets below the user's layers, lowest first.

    The task's default preset is left out if the user has named that preset.
    """
    named, layers = _last(user_layers, "preset"), list(user_layers)
    if named == "none":
        return []
    if named is not None:
        if named not in preset_names():
            message = f"preset: {named!r} is unknown; expected {', '.join(preset_names())}, or none"
            raise ConfigError(ConfigOrigin(user_layers).with_places(message))
        layers.insert(0, _read_preset(named))
    task = _last(layers, "task")
    if task is None and _last(layers, "orchestration") == "external":
        message = (
            "orchestration is external, but no task is set; set task=math with data.train=FILE, your own task "
            "(docs/own_task.md), or task=arithmetic for the built-in toy problems"
        )
        raise ConfigError(ConfigOrigin(user_layers).with_places(message))
    task = task or "arithmetic"
    task = "math" if is_own(task) else task
    if task not in DEFAULT_FOR_TASK:
        message = f"task: {task!r} is unknown; expected {', '.join(DEFAULT_FOR_TASK)}, or your own as FILE.py:CLASS"
        raise ConfigError(ConfigOrigin(user_layers).with_places(message))
    default = _read_preset(DEFAULT_FOR_TASK[task])
    if all(layer.file != default.file for layer in layers):
        layers.insert(0, default)
    return layers[: len(layers) - len(user_layers)]


def _last(layers: Sequence[Layer], key: str) -> str | None:
    """Return a top-level value from the last layer that sets it."""
    values = [layer.settings.get(key) for layer in layers]
    return next((str(value) for value in reversed(values) if value is not None), None)


def _make_paths_absolute(merged: dict[str, Any], layers: Sequence[Layer]) -> None:
    """Resolve paths: in a user's YAML file relative to the file, in a word to the working directory."""
    sources = {key: layer for layer in layers for key in layer.places}  # The last layer wins.
    for key, source in sources.items():
        above, _, name = key.rpartition(".")
        section = _section(merged, above) if above else merged
        if _PATHS.fullmatch(key) and name in section and not _is_shipped(source):
            folder = source.file.parent if source.file is not None else Path.cwd()
            section[name] = _absolute(section[name], name, folder)


def _absolute(value: Any, name: str, folder: Path) -> Any:
    """Return the path or paths of a setting called `name`, made absolute.

    Three kinds of values stay unchanged: malformed ones, which pydantic rejects; words that a key allows in place of a path; and
    names of models that are not on disk (Qwen3-8B for `marsrl plan`; Qwen/Qwen3-8B, which read_shape rejects with advice).
    """
    if isinstance(value, list):
        return [_absolute(item, name, folder) for item in value]
    if isinstance(value, dict):
        return {key: _absolute(item, name, folder) if key == "path" else item for key, item in value.items()}
    if not isinstance(value, str) or not value:
        return value
    is_class = name in ("task", "orchestration", "function", "environment")
    file, colon, kind = value.rpartition(":") if is_class else (value, "", "")
    path = f"{os.path.normpath(folder / Path(file).expanduser())}{colon}{kind}"
    is_of_a_hub = (
        re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", value) and not os.path.exists(path) and not os.path.exists(value)
    )
    is_word = (
        (is_class and (not is_own(value) or is_in_memory(value)))
        or (name == "command" and not os.path.isfile(path))
        or (name == "prompt" and not is_prompt_file(value))
        or (name == "reference" and value in ("none", "start", "past"))
        or (name in ("model", "reference") and is_of_a_hub)
        or (name == "python" and "/" not in value)
    )
    return value if is_word else path


def _leave_out_other_choices(merged: dict[str, Any], origin: ConfigOrigin) -> None:
    """Remove options of choices that a later layer replaces.

    A preset may choose one kind and set its options. If a later layer chooses another kind, the options of the first are removed
    unless that layer, or one after it, also sets them.
    """
    for choice, section, others in list(_of_other_choices(merged)):
        makers = [i for i, layer in enumerate(origin.layers) if choice in layer.places]
        settings = _section(merged, section)
        for key in others & settings.keys() if makers else ():
            if not any(f"{section}.{key}" in layer.places for layer in origin.layers[makers[-1] :]):
                del settings[key]


def _of_other_choices(merged: dict[str, Any]) -> Iterator[tuple[str, str, set[str]]]:
    """Yield (key of a choice, section, keys of that section that belong to other choices). Malformed values are skipped.

    The choices are orchestration (with its agents, and the settings that only some teams read), those of the loss, the kind of a
    section (with its keys), and rollout.engine (with its section).
    """
    if (agents := _team(merged.get("orchestration"))) is not None:
        others = {agent for other in ORCHESTRATIONS for agent in agent_names(other)}
        yield "orchestration", "agents", others - agents
        for section in ("rollout", "evaluate"):
            yield "orchestration", section, ignored_by(merged["orchestration"], section)
        for agent in _section(merged, "agents"):
            yield "orchestration", f"agents.{agent}", ignored_by(merged["orchestration"], "agents")
    for choice, value, ignored in IGNORED_OF_LOSS:
        if _section(merged, "loss").get(choice) == value:
            yield f"loss.{choice}", "loss", set(ignored)
    for name in all_keys():
        kinds = kinds_of(name)
        if (kind := kinds.get(str(_section(merged, name).get("kind")))) is not None:
            yield f"{name}.kind", name, {key for keys in kinds.values() for key in keys}.difference(kind)
    engine = str(_section(merged, "rollout").get("engine"))
    if engine in (names := {"vllm": "rollout.local", "local": "rollout.vllm"}):
        yield "rollout.engine", names[engine], set(_section(merged, names[engine]))


def _section(settings: Any, name: str) -> dict[str, Any]:
    """Return the mapping at this dotted name; empty if there is none."""
    for part in name.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings if isinstance(settings, dict) else {}


def _team(orchestration: Any) -> set[str] | None:
    """Return the names of the orchestration's agents; None if it is invalid, which later checks report."""
    try:
        return set(agent_names(orchestration)) if isinstance(orchestration, str) else None
    except ValueError:
        return None


def _is_shipped(layer: Layer) -> bool:
    return layer.file is not None and layer.file.parent == CONFIGS


def _leave_out_unused_policies(merged: dict[str, Any], user_layers: Sequence[Layer]) -> None:
    """Remove policies that no agent uses, directly or as a base, unless one of the user's layers defines them."""
    policies, agents = merged.get("policies"), merged.get("agents")
    if not isinstance(policies, dict) or not isinstance(agents, dict):
        return
    team = _team(merged.get("orchestration", "verifier_corrector"))
    used = {str(agent.get("policy", "main")) for agent in agents.values() if isinstance(agent, dict)}
    used |= {str(_section(agent, "teacher").get("policy")) for agent in agents.values()}
    used |= {"main"} if team is not None and not team <= set(agents) else set()  # An agent without settings uses main.
    used |= {str(base) for name in used if (base := (policies.get(name) or {}).get("base"))}
    written_layers = [layer for layer in user_layers if not _is_shipped(layer)]
    for name in list(policies):
        if name not in used and not any(f"policies.{name}" in layer.places for layer in written_layers):
            del policies[name]


def explain(error: ValidationError, origin: ConfigOrigin) -> str:
    """Return one line per problem: the key, the error, the nearest key for an unknown one, and where it was set."""
    lines = []
    for problem in error.errors(include_url=False):
        where = as_written(problem["loc"])
        key, origin_place = ".".join(where), origin.place(where)
        origin_note = f" ({origin_place})" if origin_place else ""
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key; {nearest(where)}{origin_note}")
        elif problem["type"] == "value_error":
            reason = str(problem["ctx"]["error"]) if "ctx" in problem else problem["msg"]
            if where and reason.startswith(f"{where[-1]} "):  # A field's validator knows only the last part of its key.
                reason = key + reason.removeprefix(where[-1])
            placed = origin.with_places(reason)
            lines.append(placed if placed != reason else f"{reason}{origin_note}")
        else:
            if problem["type"] in ("model_type", "dict_type"):
                lines.append(
                    f"{key}: found {problem['input']!r}, expected a section; set {key}.NAME=value{origin_note}"
                )
                continue
            quoted = problem["type"] == "string_type" and problem["input"] is not None
            hint = f"""; quote text, twice in a shell: {key}="'...'\"""" if quoted else ""
            lines.append(f"{key}: {problem['msg']} (found {problem['input']!r}{hint}){origin_note}")
    return "\n".join(dict.fromkeys(lines))  # Two validators report a wrong orchestration.
