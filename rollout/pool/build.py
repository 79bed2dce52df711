"""Construction of a policy's engines from RolloutConfig, in this process or in Ray actors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from marsrl.rollout.config import SILENCE_S, OpenAIOptions, RolloutConfig, is_started_here
from marsrl.rollout.engines.build import build_engine, environment_of
from marsrl.rollout.engines.protocol import EngineSpec
from marsrl.rollout.engines.refusals import TrainerHost, this_host
from marsrl.rollout.imports import check_installed
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas

_AHEAD = 0.5
"""Extra requests per actor, as a share of its slots, to hide latency: they fill slots while results and new requests are in
transit."""


def make_pool(
    policy: str,
    spec: EngineSpec,
    config: RolloutConfig,
    *,
    served: Sequence[RolloutConfig] = (),
    host: TrainerHost | None = None,
    silence_s: float = SILENCE_S,
    own_host: str | None = None,
) -> EnginePool:
    """Build the engines of one policy as configured.

    policy: name under `policies`, for messages.
    spec: engine settings that do not come from the config (see `with_settings`).
    config: rollout settings, including this policy's own engines and vllm settings.
    served: configs of all policies with engines here; default: this one. With rollout.placement=colocated they
        share every GPU.
    host: this host; None: detected.
    silence_s: time without an answer after which an engine's process counts as lost (run.silence_s).
    own_host: address at which the engines' hosts reach this process (sync.host); None: detected.

    Raises:
        ValueError: vllm or ray is configured but not installed.
        RuntimeError: the Ray cluster is unreachable.
    """
    if config.engine == "vllm":
        check_installed(
            "rollout.engine=vllm", "vllm", otherwise="on a CPU as constraints/cpu.txt says, or set rollout.engine=local"
        )
    if config.placement != "local":
        check_installed(f"rollout.placement={config.placement}", "ray", otherwise="set rollout.placement=local")
    spec = with_settings(spec, config)
    if config.placement == "local":
        os.environ.update(environment_of(spec))
        engines = LocalReplicas([build_engine(spec) for _ in range(config.engines)])
        return EnginePool(engines, policy, slots=config.slots, deadline_s=config.deadline_s)
    from marsrl.rollout.pool.ray_actors import RayReplicas
    from marsrl.rollout.pool.ray_connection import RayCluster

    host, served = host or this_host(config.ray_address), served or (config,)
    is_shared = config.placement == "colocated"
    with ExitStack() as stack:
        cluster = RayCluster(
            address=config.ray_address,
            timeout_s=config.ray_timeout_s,
            object_store_mib=config.object_store_mib,
            gpus=host.gpus_for(served),
            own_host=own_host,
        )
        stack.callback(cluster.close)
        takes = _takes(config, spec, len(served))
        cluster.check_owners(host.rank_hosts, is_shared=is_shared)
        cluster.await_place(f"the engines of policy {policy}", takes, config.engines, config.join_s)
        pool = EnginePool(
            RayReplicas(cluster, spec, config, takes=takes, silence_s=silence_s),
            policy,
            slots=round(config.slots * (1 + _AHEAD)),
            deadline_s=config.deadline_s,
            attempts=config.max_request_attempts,
            most_restarts=config.max_engine_restarts,
            sleeps=is_shared,
            host=cluster.host,
        )
        stack.callback(pool.close)
        pool.start()
        stack.pop_all()
    return pool


def with_settings(spec: EngineSpec, config: RolloutConfig) -> EngineSpec:
    """Complete the spec with settings of the config and this host."""
    import torch

    return replace(
        spec,
        threads=config.threads or max(1, (os.cpu_count() or 1) // config.engines),
        device="cuda" if torch.cuda.is_available() else "cpu",
        vllm=config.vllm,
        local=config.local,
        sleeps=config.placement == "colocated",
    )


def _takes(config: RolloutConfig, spec: EngineSpec, num_policies: int) -> dict[str, float]:
    """Return the resources that Ray reserves per engine. On CPUs: none, or the engine's threads if other hosts may join."""
    from marsrl.rollout.pool.ray_connection import CPU, GPU

    if spec.device == "cuda":
        shares = num_policies if config.placement == "colocated" else 1
        return {GPU: config.vllm.tensor_parallel / shares}
    if config.ray_address is not None and is_started_here(config.ray_address):
        return {CPU: float(spec.threads)}
    return {}


def make_openai_pool(
    policy: str, tokenizer_dir: str, options: OpenAIOptions, *, deadline_s: float | None, max_model_len: int
) -> EnginePool:
    """Build one engine in this process that calls a frozen policy's server, whatever the placement of other engines.

    Raises ValueError: the variable named by options.api_key_env is unset, or the directory has no tokenizer.
    """
    from marsrl.rollout.agents.render import ChatRenderer
    from marsrl.rollout.engines.openai_engine import OpenAIEngine

    most = None if options.api == "chat" else max_model_len  # with api=chat, only the server knows the number of tokens
    engine = OpenAIEngine(options, ChatRenderer(tokenizer_dir), max_model_len=most)
    return EnginePool(LocalReplicas([engine]), policy, slots=options.concurrency, deadline_s=deadline_s)
