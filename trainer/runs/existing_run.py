"""Decide whether a run with an existing name starts, resumes or is refused, and which settings may differ on resume.

A run keeps a copy of each prompt file, so that it is resumed and evaluated with its original prompts.
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

# Settings that select the run to resume; the run itself does not depend on them.
OF_THE_START = ("run.resume", "run.name", "run.dir", "preset")
_OF_RATES = ("lr", "warmup_steps", "decay", "final_lr_ratio")  # Keys of policies.<name>.optimizer.
_OF_CHECKPOINTS = ("frozen", "dtype", "base", "adapter", "optimizer.distributed")  # Keys of policies.<name>.


def outlook(config: RunConfig, preset: str, data: Fingerprints) -> list[str]:
    """Describe, in sentences, the effect of starting with these settings. Writes nothing.

    Raises ValueError if the start would be refused, with the same message.
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
    """Return sentences about the step from which an existing run resumes, and the settings that differ.

    Raises ValueError if the run cannot resume with these settings or problems: the message gives each old and new value.
    """
    if not run.has_begun:
        return [f"run: {run.path}, left by a failed start: begins at step 1"]
    where, step = _where(run, config)
    lines, saved = [where], saved_config(run)
    if saved is None:
        return [*lines, f"{run.config} is of another version, so changed settings cannot be listed"]
    config = with_kept_prompts(config)
    differs = differences(saved, config)
    refused = [*_refusals(saved, config), *_changed_prompts(run, saved, config)]
    if other_problems := [*_other_problems(run, data)]:
        refused += [*other_problems, f"settings that differ: {differs or 'none'}"]
    if refused:
        raise ValueError(
            f"run.resume={config.run.resume}: {run.path} cannot resume with a changed {'; '.join(refused)}; undo this or start "
            "another run"
        )
    lines += [f"differs from {run.config}: {differs}"] if differs else []
    return [*lines, *(f"warning: {rate}" for rate in _other_rates(run, step, config))]


def differences(saved: RunConfig, given: RunConfig) -> str:
    """Return the settings that differ, each with both values; "" if none does."""
    before, after = flat(saved.model_dump(mode="json")), flat(given.model_dump(mode="json"))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key) and key not in OF_THE_START]
    return ", ".join(f"{key} {before.get(key, 'not set')} -> {after.get(key, 'not set')}" for key in keys)


def saved_config(run: RunDirectory) -> RunConfig | None:
    """Return the run's first settings; None if config.yaml is missing or of another version."""
    return settings_in(run.config)


def settings_to_resume(config: RunConfig) -> RunConfig | None:
    """Return the first settings of the run that this config resumes; None if it resumes none."""
    if config.run.resume == "off":
        return None
    run = RunDirectory.find(config.run.dir, config.run.name, config.run.resume)
    return saved_config(run) if run is not None else None


def settings_in(file: Path) -> RunConfig | None:
    """Return the settings that a command saved in this file; None if it is missing or of another version."""
    try:
        return RunConfig.model_validate(yaml.safe_load(file.read_bytes()))
    except (OSError, ValueError, yaml.YAMLError):  # pydantic's ValidationError is a ValueError.
        return None


def as_it_began(run: RunDirectory, config: RunConfig) -> RunConfig:
    """Return the settings with the seed, warm_start and task_options of the run's first start.

    The weights of its warm start depend on these.
    """
    saved = saved_config(run) if config.run.resume != "off" else None
    if saved is None:
        return config
    seed = config.run.model_copy(update={"seed": saved.run.seed})
    return config.model_copy(update={"run": seed, "warm_start": saved.warm_start, "task_options": saved.task_options})


def _other_rates(run: RunDirectory, step: int, now: RunConfig) -> Iterator[str]:
    """Yield a sentence for each policy whose next learning rate the new settings change.

    The rates are compared with those of the run's last start. A decay ends at run.steps, so more steps raise the learning rate
    of a run that has nearly ended.
    """
    file = run.configs[-1]
    last = settings_in(file)
    if last is None or not 0 < step < now.run.steps:
        return
    for name, policy in now.trained_policies.items():
        if name not in last.policies:
            continue  # An added adapter has a schedule of its own.
        old_optimizer, new_optimizer = last.policies[name].optimizer, policy.optimizer
        before, after = old_optimizer.lr_at(step, last.run.steps), new_optimizer.lr_at(step, now.run.steps)
        if math.isclose(before, after, rel_tol=1e-9):
            continue
        changes = [("run.steps", last.run.steps, now.run.steps)]
        changes += [
            (f"policies.{name}.optimizer.{key}", getattr(old_optimizer, key), getattr(new_optimizer, key))
            for key in _OF_RATES
        ]
        causes = ", ".join(f"{key} {old} -> {new}" for key, old, new in changes if old != new)
        times = f", {after / before:.3g} times as much" if before else ""
        yield (
            f"step {step + 1} trains policies.{name} at a learning rate of {after:.3g}; under {file.name} it was {before:.3g}"
            f"{times} ({causes}); if this is not intended, change policies.{name}.optimizer.lr, or set run.steps back"
        )


def _where(run: RunDirectory, config: RunConfig) -> tuple[str, int]:
    """Return a sentence about where the run resumes, and the last finished step."""
    try:
        latest = run.latest_checkpoint()
    except RuntimeError as error:
        if config.run.resume == "auto":
            raise ValueError(f"{error}; run.resume=previous resumes from the newest intact one") from error
        newest = max(run.steps_on_disk(), default=0)  # The checkpoint may be damaged; its files are read later.
        return f"run: {run.path} goes back to its newest intact checkpoint ({error})", newest
    if latest is None:
        return f"run: {run.path} has no checkpoint yet: begins again at step 1", 0
    steps_left = config.run.steps - latest.step
    remaining = f"{steps_left} of {config.run.steps} steps are left" if steps_left > 0 else "no steps are left"
    return (
        f"run: {run.path} resumes after step {latest.step}; run.steps is {config.run.steps}: {remaining}",
        latest.step,
    )


def _refusals(saved: RunConfig, now: RunConfig) -> Iterator[str]:
    """Yield changed settings that are incompatible with the checkpoint, each with both values.

    Adapters of a base may be added and removed, and agents may then change to an added adapter, or from a removed one.
    """
    for key in ("task", "orchestration"):
        if getattr(saved, key) != getattr(now, key):
            yield _both(key, getattr(saved, key), getattr(now, key))
    added = {name: policy for name, policy in now.policies.items() if name not in saved.policies}
    removed = {name: policy for name, policy in saved.policies.items() if name not in now.policies}
    if any(policy.base is None for policy in (*added.values(), *removed.values())):
        yield _both("policies", ", ".join(saved.policies), ", ".join(now.policies))
        return
    for name, policy in now.policies.items():
        if name in added:
            continue
        before = saved.policies[name]
        for key in _OF_CHECKPOINTS if not (before.frozen and policy.frozen) else ():
            old_value, new_value = map(attrgetter(key), (before, policy))
            if key == "adapter":
                old_value, new_value = (
                    value and value.model_copy(update={"start": None}) for value in (old_value, new_value)
                )
            if old_value != new_value:
                yield _both(f"policies.{name}.{key}", old_value, new_value)
        if policy.reference == "past" != before.reference:
            yield _both(f"policies.{name}.reference", before.reference, policy.reference)
        if not policy.frozen and (shape_differences := _other_shape(before, policy)):
            yield f"policies.{name}.model ({shape_differences})"
    for name, agent in now.agents.items():
        before_policy = saved.agents[name].policy if name in saved.agents else agent.policy
        if before_policy != agent.policy and before_policy not in removed and agent.policy not in added:
            yield _both(f"agents.{name}.policy", before_policy, agent.policy)


def _other_problems(run: RunDirectory, given: Fingerprints) -> Iterator[str]:
    """Yield data settings whose problems have changed.

    A run cannot resume with other problems: it samples problems by index, and compares evaluations on them.
    """
    try:
        began = json.loads(run.data.read_bytes())
    except FileNotFoundError:
        return  # A run of an earlier version has no fingerprints.
    for key in {**began, **given}:
        before, after = (fingerprints.get(key, {"problems": 0, "sum": ""}) for fingerprints in (began, given))
        if before["problems"] != after["problems"]:
            yield f"{key} (the run has {before['problems']:,} problems, now {after['problems']:,})"
        elif before["sum"] != after["sum"]:
            yield f"{key} (questions, answers or their order changed)"


def _both(key: str, before: object, now: object) -> str:
    return f"{key} (the run has {before}, now {now})"


def _other_shape(before: PolicyConfig, now: PolicyConfig) -> str:
    """Return the differences between the models' shapes; "" if equal, or if the first model no longer exists."""
    if before.model == now.model:
        old_shape, new_shape = (policy.shape or "cpu_default" for policy in (before, now))
        return "" if old_shape == new_shape else f"the run has the shape {old_shape}, now {new_shape}"
    if before.model is None or now.model is None:
        return f"the run has {before.model or 'the warm-started model'}, now {now.model or 'none'}"
    try:
        old_settings = asdict(read_shape(before.model))
    except (ValueError, OSError):
        return ""
    new_settings = asdict(read_shape(now.model))
    return ", ".join(
        f"{key}: the run has {old_settings[key]}, {now.model} has {new_settings[key]}"
        for key in old_settings
        if old_settings[key] != new_settings[key]
    )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings into {dotted key: value}."""
    flattened: dict[str, Any] = {}
    for key, value in settings.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flattened


def with_kept_prompts(config: RunConfig) -> RunConfig:
    """Return the config with prompt files named as a run keeps them: prompts/<name>-<digest>.yaml beside config.yaml."""
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
    """Yield prompt files whose contents changed since the run began; both configs come from with_kept_prompts."""
    agents: dict[str, list[str]] = {}
    for name, agent in now.agents.items():
        before = saved.agents[name].prompt if name in saved.agents else None
        if not is_prompt_file(before) or not is_prompt_file(agent.prompt):
            continue
        old_stem, new_stem = (kept_name.rpartition("-")[0] for kept_name in (before, agent.prompt))
        if before != agent.prompt and old_stem == new_stem:
            agents.setdefault(before, []).append(f"agents.{name}.prompt")
    for before, keys in agents.items():
        yield (
            f"{', '.join(keys)} (the file has changed; the original is {run.path / before}, and a file with another name "
            "counts as another prompt)"
        )


def _kept_name(prompt: str) -> str:
    digest, stem = digest_of(prompt), Path(prompt).stem
    return f"prompts/{stem.removesuffix(f'-{digest}')}-{digest}.yaml"
