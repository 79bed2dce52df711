"""Start, resume or refuse a run whose name is taken, and the settings that may differ on resume.

A run keeps a copy of each prompt file, so that it is resumed and evaluated with the prompts it began with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from marsrl.rollout.agents.prompts import digest_of, is_prompt_file
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.runs.directory import RunDirectory, write_atomically
from marsrl.trainer.runs.lock import why_held

Fingerprints = Mapping[str, Mapping[str, int | str]]
"""Fingerprints of training and evaluation problems, by setting (tasks/data.fingerprint)."""

OF_THE_START = ("run.resume", "run.name", "run.dir", "preset")  # select the run to resume, without changing it
_OF_RATES = ("lr", "warmup_steps", "decay", "final_lr_ratio")  # of an optimizer
_OF_CHECKPOINTS = ("frozen", "dtype", "base", "adapter", "optimizer.distributed")  # of a policy


def outlook(config: RunConfig, preset: str, data: Fingerprints) -> list[str]:
    """Describe, in sentences, the effect of starting with these settings. Writes nothing.

    Raises ValueError: the start would be refused; with the same text.
    """
    run = RunDirectory.find(config.run.dir, config.run.name, config.run.resume)
    if run is None:
        return [f"run: a new one, {config.run.dir}/{preset}-<UTC time>"]
    if not run.existed:
        return [f"run: a new one, {run.path}"]
    if reason := why_held(run):
        raise ValueError(reason)
    return resume_lines(run, config, data)


def resume_lines(run: RunDirectory, config: RunConfig, data: Fingerprints) -> list[str]:
    """The step from which an existing run resumes, and the settings that differ, in sentences.

    Raises ValueError: it cannot resume with these settings or problems; names the setting, the run's value and the given one.
    """
    if not run.has_begun:
        return [f"run: {run.path}, which a start has made and nothing has begun in: it begins at step 1"]
    where, step = _where(run, config)
    lines, saved = [where], saved_config(run)
    if saved is None:
        return [*lines, f"{run.config} is not of this version: what differs from it cannot be told"]
    config = with_kept_prompts(config)
    differs = differences(saved, config)
    refused = [*_refusals(saved, config), *_changed_prompts(run, saved, config)]
    if other_problems := [*_other_problems(run, data)]:
        refused += [*other_problems, f"settings that differ: {differs or 'none'}"]
    if refused:
        raise ValueError(
            f"run.resume={config.run.resume}: {run.path} cannot go on with other {'; '.join(refused)}; set it back, or start "
            "a run of another name"
        )
    lines += [f"differs from {run.config}: {differs}"] if differs else []
    return [*lines, *(f"warning: {each}" for each in _other_rates(run, step, config))]


def differences(saved: RunConfig, given: RunConfig) -> str:
    """The settings that differ, each with both values; empty if none does."""
    before, now = flat(saved.model_dump(mode="json")), flat(given.model_dump(mode="json"))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in OF_THE_START]
    return ", ".join(f"{key} {before.get(key, 'not set')} -> {now.get(key, 'not set')}" for key in keys)


def saved_config(run: RunDirectory) -> RunConfig | None:
    """The settings that the run began with; None if config.yaml is missing or of another version."""
    return settings_in(run.config)


def settings_to_resume(config: RunConfig) -> RunConfig | None:
    """The settings that the run began with that this config resumes; None if it resumes none."""
    if config.run.resume == "off":
        return None
    run = RunDirectory.find(config.run.dir, config.run.name, config.run.resume)
    return saved_config(run) if run is not None else None


def settings_in(file: Path) -> RunConfig | None:
    """The settings that a command has saved in this file; None if it is missing or of another version."""
    try:
        return RunConfig.model_validate(yaml.safe_load(file.read_bytes()), context={"trains": False})
    except (OSError, ValueError, yaml.YAMLError):  # pydantic's ValidationError is a ValueError
        return None


def as_it_began(run: RunDirectory, config: RunConfig) -> RunConfig:
    """The settings with the run's original warm start, because a resumed run has its weights in the checkpoints."""
    saved = saved_config(run) if config.run.resume != "off" else None
    if saved is None:
        return config
    seed = config.run.model_copy(update={"seed": saved.run.seed})
    return config.model_copy(update={"run": seed, "warm_start": saved.warm_start, "task_options": saved.task_options})


def _other_rates(run: RunDirectory, step: int, now: RunConfig) -> Iterator[str]:
    """Learning rates of the next step that differ from those by the settings of the last start.

    A decay is stretched to run.steps: more of them raise the rate of a run that has nearly ended.
    """
    file = run.configs[-1]
    last = settings_in(file)
    if last is None or not 0 < step < now.run.steps:
        return
    for name, policy in now.trained_policies.items():
        had, has = last.policies[name].optimizer, policy.optimizer
        before, after = had.lr_at(step, last.run.steps), has.lr_at(step, now.run.steps)
        if math.isclose(before, after, rel_tol=1e-9):
            continue
        changes = [("run.steps", last.run.steps, now.run.steps)]
        changes += [(f"policies.{name}.optimizer.{key}", getattr(had, key), getattr(has, key)) for key in _OF_RATES]
        causes = ", ".join(f"{key} {old} -> {new}" for key, old, new in changes if old != new)
        times = f", {after / before:.3g} times as much" if before else ""
        yield (
            f"step {step + 1} trains policies.{name} at a learning rate of {after:.3g}, and by {file.name} at {before:.3g}"
            f"{times} ({causes}); if it is not meant, set policies.{name}.optimizer.lr, or run.steps back"
        )


def _where(run: RunDirectory, config: RunConfig) -> tuple[str, int]:
    """Return a sentence that says where the run goes on, and the step after which it does."""
    try:
        latest = run.latest_checkpoint()
    except RuntimeError as error:
        if config.run.resume == "auto":
            raise ValueError(f"{error}; run.resume=previous takes the newest whole one") from error
        newest = max(run.steps_on_disk(), default=0)  # whether it is whole is known once its files are read
        return f"run: {run.path} goes back to its newest whole checkpoint ({error})", newest
    if latest is None:
        return f"run: {run.path} has no checkpoint yet: it begins again at step 1", 0
    left = config.run.steps - latest.step
    rest = f"{left} of {config.run.steps} steps are left" if left > 0 else "nothing is left to train"
    return f"run: {run.path} goes on after step {latest.step}; run.steps is {config.run.steps}: {rest}", latest.step


def _refusals(saved: RunConfig, now: RunConfig) -> Iterator[str]:
    """Changed settings that are incompatible with the checkpoint, each with both values."""
    for key in ("task", "orchestration"):
        if getattr(saved, key) != getattr(now, key):
            yield _both(key, getattr(saved, key), getattr(now, key))
    if saved.policies.keys() != now.policies.keys():
        yield _both("policies", ", ".join(saved.policies), ", ".join(now.policies))
        return
    for name, policy in now.policies.items():
        before = saved.policies[name]
        for key in _OF_CHECKPOINTS if not (before.frozen and policy.frozen) else ():
            had, given = map(attrgetter(key), (before, policy))
            if key == "adapter":
                had, given = (each and each.model_copy(update={"start": None}) for each in (had, given))
            if had != given:
                yield _both(f"policies.{name}.{key}", had, given)
        if not policy.frozen and (found := _other_shape(before, policy)):
            yield f"policies.{name}.model ({found})"
    for name, agent in now.agents.items():
        if name in saved.agents and saved.agents[name].policy != agent.policy:
            yield _both(f"agents.{name}.policy", saved.agents[name].policy, agent.policy)


def _other_problems(run: RunDirectory, given: Fingerprints) -> Iterator[str]:
    """Problems that differ from the run's: problems are drawn by index, and evaluations are compared."""
    try:
        began = json.loads(run.data.read_bytes())
    except FileNotFoundError:
        return  # a run of an earlier version
    for key in {**began, **given}:
        before, now = (each.get(key, {"problems": 0, "sum": ""}) for each in (began, given))
        if before["problems"] != now["problems"]:
            yield f"{key} (it has {before['problems']:,} problems, given are {now['problems']:,})"
        elif before["sum"] != now["sum"]:
            yield f"{key} (other questions or answers than it began with, or in another order)"


def _both(key: str, before: object, now: object) -> str:
    return f"{key} (it has {before}, given is {now})"


def _other_shape(before: PolicyConfig, now: PolicyConfig) -> str:
    """Differences between the models' shapes; empty if equal, or if the first model no longer exists."""
    if before.model == now.model:
        first, other = (each.shape or "cpu_default" for each in (before, now))
        return "" if first == other else f"it has the shape {first}, given is {other}"
    if before.model is None or now.model is None:
        return f"it has {before.model or 'the warm-started one'}, given is {now.model or 'none'}"
    try:
        held = asdict(read_shape(before.model))
    except (ValueError, OSError):
        return ""
    given = asdict(read_shape(now.model))
    return ", ".join(
        f"{key}: it has {held[key]}, {now.model} has {given[key]}" for key in held if held[key] != given[key]
    )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def with_kept_prompts(config: RunConfig) -> RunConfig:
    """The config with prompt files named as a run keeps them, prompts/<name>-<digest>.yaml, beside its config.yaml."""
    agents = {
        name: agent.model_copy(update={"prompt": _kept_name(agent.prompt)}) if is_prompt_file(agent.prompt) else agent
        for name, agent in config.agents.items()
    }
    return config.model_copy(update={"agents": agents})


def keep_settings(run: RunDirectory, config: RunConfig, made_of: str) -> None:
    """Write config.yaml (RunDirectory.write_config), with copies of the prompt files beside it; existing copies stay."""
    for agent in config.agents.values():
        if is_prompt_file(agent.prompt):
            write_atomically(run.path / _kept_name(agent.prompt), Path(agent.prompt).read_bytes())
    run.write_config(with_kept_prompts(config).model_dump(mode="json"), made_of)


def _changed_prompts(run: RunDirectory, saved: RunConfig, now: RunConfig) -> Iterator[str]:
    """Prompt files whose contents differ from those that the run began with; both configs from with_kept_prompts."""
    agents: dict[str, list[str]] = {}
    for name, agent in now.agents.items():
        before = saved.agents[name].prompt if name in saved.agents else None
        if not is_prompt_file(before) or not is_prompt_file(agent.prompt):
            continue
        stem, other = (kept_name.rpartition("-")[0] for kept_name in (before, agent.prompt))
        if before != agent.prompt and stem == other:
            agents.setdefault(before, []).append(f"agents.{name}.prompt")
    for before, keys in agents.items():
        yield (
            f"{', '.join(keys)} (the file has changed; what it began with is {run.path / before}, and a file of another name "
            "counts as another prompt)"
        )


def _kept_name(prompt: str) -> str:
    digest, stem = digest_of(prompt), Path(prompt).stem
    return f"prompts/{stem.removesuffix(f'-{digest}')}-{digest}.yaml"
