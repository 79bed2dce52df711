"""Checks that this machine has what engines, optimizer and weight sync need for these settings."""

from __future__ import annotations

import importlib.util
import os

from marsrl.rollout.config import Settings, VllmOptions
from marsrl.rollout.engines.refusals import TrainerHost, adapter_refusals, refusals, vllm_refusals
from marsrl.rollout.engines.vllm.arguments import checked_extra
from marsrl.rollout.orchestrations.registry import ignored_by
from marsrl.trainer.checks.models import find_shape, taught_shape
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.objective import IGNORED_OF_LOSS
from marsrl.trainer.config.read import ConfigError
from marsrl.trainer.torchrun import is_rank_0


def why_not_backend(config: RunConfig, *, has_cuda: bool) -> str | None:
    """Return why sync.backend cannot run on this machine, or None. has_cuda: PyTorch sees a GPU."""
    sync = config.sync
    key = f"sync.backend={sync.backend}"
    if sync.delta and sync.backend != "nccl":
        return f"sync.delta=true sends changes over a network, and {key} uses none: set sync.delta=false"
    if sync.backend == "shm":
        return None
    if has_cuda:
        found = f"sync.cpu_twin is true, but PyTorch sees a GPU, and {key} can use it; set sync.cpu_twin=false"
        return found if sync.cpu_twin else None
    if not sync.cpu_twin:
        return (
            f"{key} needs CUDA, and PyTorch sees no CUDA device here; set sync.backend=auto, or sync.cpu_twin=true to send "
            f"the same buckets over {'gloo' if sync.backend == 'nccl' else 'shared memory'}"
        )
    if config.rollout.engine == "vllm":
        return (
            f"{key} writes into an engine's tensors, and vLLM on a CPU computes with packed copies of them; set "
            "sync.backend=shm and sync.cpu_twin=false, or rollout.engine=local"
        )
    return None


def slow_records(config: RunConfig, host: TrainerHost) -> list[str]:
    """Return warnings about agents without top_p and top_k: vLLM's sampler is slow to record their tokens (docs/credit.md)."""
    return [
        f"agents.{name} samples without top_p or top_k, but the engines of policies.{agent.policy} record the kept tokens "
        "at each position (loss.truncation=renormalise): vLLM's own sampler is slow at this; set top_p or top_k, or "
        "rollout.vllm.sampler=marsrl"
        for name, agent in config.agents.items()
        if agent.policy in (vllm := vllm_of(config))
        and config.records_of(agent.policy).kept_tokens
        and vllm[agent.policy].sampler_on(engines_device(host)) == "engine"
        and agent.top_p == 1
        and agent.top_k < 1
    ]


def stale_samples(config: RunConfig) -> list[str]:
    """Return a warning if the loss treats samples of older versions as samples of the current one (docs/numerics.md)."""
    rollout, loss, most = config.rollout, config.loss, config.versions_old
    if not most or loss.correction != "none" or loss.old_policy == "sais":
        return []
    causes = [f"rollout.overlap={rollout.overlap}"] if rollout.overlap else []
    causes += [f"rollout.segments={rollout.segments}"] if rollout.segments > 1 else []
    if config.waits_for_team:
        causes.append("rollout.pipeline=agentic with credit over all of a problem's samples")
    old = "the weights at the step's start" if loss.old_policy == "recompute" else "the present weights"
    return [
        f"{' and '.join(causes)}: a token can be about {most} version{'s' * (most > 1)} old when it is trained, but "
        f"loss.old_policy={loss.old_policy} with loss.correction=none treats it as sampled by {old}: set loss.correction=tis (or "
        "icepop, sequence_mask), or loss.old_policy=sais; rollout/staleness_max and train_rollout/k3 measure the difference"
    ]


def check_machine(config: RunConfig, host: TrainerHost) -> None:
    """Check that this machine supports the configured engines and weight files; if vLLM is installed, check its options."""
    import torch

    has_cuda, sync = torch.cuda.is_available(), config.sync
    if config.rollout.placement == "colocated" and config.rollout.engine == "vllm" and not has_cuda:
        raise ConfigError(
            "rollout.placement=colocated: vLLM has no sleep mode on a CPU (there is no device memory to free); set "
            "rollout.placement=disaggregated, or rollout.engine=local, whose sleep moves nothing on a CPU"
        )
    if is_rank_0():  # other ranks may be on other hosts, with other GPUs and folders
        if sync.directory is not None and not os.access(sync.directory, os.W_OK | os.X_OK):
            raise ConfigError(f"sync.directory is {sync.directory}, which is not a writable folder; create it")
        if found := refusals_of(config, host):
            raise ConfigError("; ".join(found))
    if importlib.util.find_spec("vllm") is not None:  # otherwise the engines' hosts check vLLM's options
        for vllm in vllm_of(config).values():
            checked_extra(vllm.extra)


def refusals_of(config: RunConfig, host: TrainerHost) -> tuple[str, ...]:
    """Return the reasons why engines or trainer on this host reject these settings."""
    by_files = config.sync.backend == "shm" or bool(config.pools_of_adapters)
    files = (config.sync.directory or "/dev/shm") if by_files else None
    reasons = list(refusals(tuple(config.served_rollouts.values()), host, weight_files=files))
    for name, vllm in vllm_of(config).items():
        reasons += vllm_refusals(vllm, engines_device(host), config.records_of(name))
    for pool in dict.fromkeys(config.pools_of_adapters.values()):
        policy, rollout, dtype = config.policies[pool], config.rollout_of(pool), config.engine_dtype(pool)
        adapters = {name: adapter for name in config.policies_in(pool) if (adapter := config.policies[name].adapter)}
        shape = taught_shape(config, policy) if policy.model is None else find_shape(policy.model)
        if shape is not None:
            reasons += adapter_refusals(rollout, engines_device(host), dtype, shape, adapters)
    return tuple(dict.fromkeys(reasons))


def vllm_of(config: RunConfig) -> dict[str, VllmOptions]:
    """Return the vLLM options of each policy that vLLM serves."""
    if config.rollout.engine != "vllm":
        return {}
    return {name: config.rollout_of(name).vllm for name, each in config.policies.items() if each.openai is None}


def engines_device(host: TrainerHost) -> str:
    """Return the device of the engines: GPUs if rank 0 sees one, else the CPU."""
    return "cuda" if host.num_gpus else "cpu"


def ignored_settings(config: RunConfig) -> list[str]:
    """Return warnings about settings that differ from their defaults, but have no effect with the other settings."""
    rollout, team = config.rollout, config.orchestration
    sections: dict[str, Settings] = {"rollout.local": rollout.local}
    if rollout.engine == "local":
        sections = {f"policies.{name}.vllm": each.vllm for name, each in config.policies.items() if each.vllm}
        sections["rollout.vllm"] = rollout.vllm
    by_engine = [
        f"{section}.{key}"
        for section, given in sections.items()
        for key in sorted(given.model_dump(exclude_defaults=True))
    ]
    of_team: dict[str, tuple[Settings, set[str]]] = {
        name: (getattr(config, name), ignored_by(team, name)) for name in ("rollout", "evaluate")
    }
    of_team |= {f"agents.{name}": (agent, ignored_by(team, "agents")) for name, agent in config.agents.items()}
    by_team = [
        f"{section}.{key}"
        for section, (given, keys) in of_team.items()
        for key in sorted(keys & given.model_dump(exclude_defaults=True).keys())
    ]
    causes = {f"rollout.engine is {rollout.engine}": by_engine, f"orchestration is {team}": by_team}
    if config.loss.kl == "none":
        policies = config.policies.items()
        causes["loss.kl is none"] = [
            f"policies.{name}.reference" for name, each in policies if each.reference != "none"
        ]
    given_loss = config.loss.model_dump(exclude_defaults=True).keys()
    for choice, value, keys in IGNORED_OF_LOSS:
        if getattr(config.loss, choice) == value:
            causes[f"loss.{choice} is {value}"] = [f"loss.{key}" for key in sorted(keys & given_loss)]
    return [f"{cause}, which ignores {', '.join(ignored)}" for cause, ignored in causes.items() if ignored]


def why_not_offloaded(config: RunConfig) -> str | None:
    """Return why a trained policy cannot be offloaded on this machine, or None."""
    import torch

    for name, policy in config.trained_policies.items():
        offloads = policy.optimizer.offload or policy.recompute == "full_offload"
        if offloads and not torch.cuda.is_available():
            return (
                f"policies.{name} has optimizer.offload=true or recompute=full_offload, but PyTorch sees no CUDA device; "
                "set optimizer.offload=false and recompute=full"
            )
    return None
