"""`marsrl init --from-run`: a run's settings as a short config file over its presets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.origin import ConfigError
from marsrl.trainer.config.read import DEFAULT_FOR_TASK, preset_names, read_config

_PRESETS = re.compile(r"preset ([\w.-]+)\.yaml|configs/([\w.-]+)\.yaml")
_OF_ONE_RUN = ("name", "resume")


def write_settings_of(run: Path, out: Path) -> Path:
    """Write `out`, a config file that reproduces the run's settings except run.name and run.resume.

    The file has the task, the preset named in config.yaml, and the settings that differ from that preset. If today's presets
    cannot reproduce the run, the file has `preset: none` and the settings that differ from the defaults.

    Raises ConfigError if the settings are of another version, or `out` exists.
    """
    source = run / "config.yaml"
    if out.exists():
        raise ConfigError(f"{out} exists; give the path of a new file")
    settings = _settings(read_config(source)[0])
    comment = source.read_text("utf-8").partition("\n")[0]
    named = [first or second for first, second in _PRESETS.findall(comment)]
    presets = [name for name in reversed(named) if name in preset_names() and name not in DEFAULT_FOR_TASK.values()]
    text = f"# settings of run {run.name}, over its presets\n"
    for preset in ([{"preset": presets[0]}] if presets else [{}]) + [{"preset": "none"}]:
        changed = _changed(settings, preset)
        if changed is None:
            continue
        out.write_text(text + yaml.safe_dump({**preset, **changed}, sort_keys=False, allow_unicode=False), "ascii")
        if _settings(read_config(out)[0]) == settings:
            return out
    raise AssertionError(f"{source}: no file reproduces these settings")


def _settings(config: RunConfig) -> dict[str, Any]:
    whole = config.model_dump(mode="json")
    whole.pop("preset")
    whole["run"] = {key: value for key, value in whole["run"].items() if key not in _OF_ONE_RUN}
    return whole


def _changed(settings: dict[str, Any], preset: dict[str, str]) -> dict[str, Any] | None:
    """Return the settings that differ from the preset with the same task and team; None if that preset rejects them."""
    team = {key: settings[key] for key in ("task", "orchestration")}
    try:
        base, _ = read_config(None, [f"{key}={value}" for key, value in {**preset, **team}.items()], trains=False)
    except ConfigError:
        return None
    return {**team, **_difference(settings, _settings(base))}


def _difference(settings: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    differs: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            if below := _difference(value, base[key]):
                differs[key] = below
        elif key not in base or value != base[key]:
            differs[key] = value
    return differs
