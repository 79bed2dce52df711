"""Identity of a team or policy: part of every saved answer's key, which keeps answers of different teams apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marsrl.rollout.agents.prompts import digest_of, is_prompt_file
from marsrl.rollout.config import VllmOptions
from marsrl.trainer.config import PolicyConfig, RunConfig


def policy_identity(policy: PolicyConfig) -> dict[str, Any]:
    """Return the identity of a policy: name or path of the model, dtype, adapter and server."""
    served = {"base_url", "model", "prompt"}
    if policy.openai is not None:
        served |= {"api", "extra_body"} & policy.openai.model_dump(exclude_defaults=True).keys()
    told = policy.model_dump(mode="json", include={"model": True, "dtype": True, "engine": True, "openai": served})
    return told if policy.adapter is None else told | {"adapter": policy.adapter.model_dump(mode="json")}


def team_identity(config: RunConfig) -> dict[str, Any]:
    """Return the identity of a team: agents, policies, and the settings that answers depend on."""
    include = {"task", "task_options", "orchestration", "orchestration_options", "agents", "tools", "evaluate"}
    team = config.model_dump(mode="json", include=include)
    for agent in team["agents"].values():
        if is_prompt_file(agent["prompt"]):
            agent["prompt"] = digest_of(agent["prompt"])
    if config.external is not None:
        played, command = config.external.function or config.external.environment, config.external.command
        file = played.rpartition(":")[0] if played else ""
        team["program"] = [played, command, digest_of(file) if file else None]
    return {
        **team,
        "policies": {name: policy_identity(policy) for name, policy in config.policies.items()},
        "vllm": {name: _numbers(config.rollout_of(name).vllm) for name in config.policies},
        "max_response_tokens": config.rollout.max_response_tokens,
        "max_turns": config.rollout.max_turns,
        "seed": config.run.seed,
    }


def _numbers(vllm: VllmOptions) -> dict[str, Any]:
    """Return the vLLM settings that change the distribution from which vLLM samples."""
    return vllm.model_dump(mode="json", include={"dtype", "kv_cache_dtype", "quantization", "extra"})


def evaluation_identity(config: RunConfig) -> dict[str, Any]:
    """Return the identity of an evaluated team, which depends on models' files, but not on numbers of problems or draws."""
    team = team_identity(config)
    for counted in ("num_problems", "repeat", "fixed_inputs"):
        del team["evaluate"][counted]
    folders = {name: policy.model for name, policy in config.policies.items()}
    folders |= {f"{name}.adapter": each.adapter.start for name, each in config.policies.items() if each.adapter}
    files = {name: _files(folder) for name, folder in folders.items() if folder is not None}
    judge = None if config.judge is None else config.judge.model_dump(mode="json")
    taught = {name: policy.shape for name, policy in config.policies.items() if policy.directory is None}
    warm_start = config.warm_start.model_dump(mode="json") if taught else None
    return {**team, "files": files, "taught": taught, "warm_start": warm_start, "judge": judge}


def _files(model: str) -> list[tuple[str, int, int]]:
    """Return (name, size in bytes, time of the last change in ns) of each file of a model."""
    found = [(path, path.stat()) for path in sorted(Path(model).iterdir()) if path.is_file()]
    return [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in found]
