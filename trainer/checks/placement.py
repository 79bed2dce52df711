"""Placement of a run: GPUs of its ranks and engines, and the transport of weights from ranks to engines."""

from __future__ import annotations

from collections.abc import Sequence

from marsrl.rollout.config import is_started_here
from marsrl.rollout.engines.refusals import TrainerHost
from marsrl.rollout.pool.rebalance import outlook
from marsrl.trainer.config import RunConfig, SyncBackend


def with_backend(config: RunConfig, *, on_gpus: bool) -> RunConfig:
    """Return the config with sync.backend=auto resolved, with the same result on all ranks.

    ipc: for engines on the trainer's GPUs, which map the trainer's memory.
    nccl: for engines on GPUs of their own, even on the trainer's host. Each rank sends its shards directly from its GPU; with
        files, the whole model would cross the link between one GPU and its host in every publish.
    shm: for machines without GPUs, rollout.placement=local, or a sync.directory. The weights travel as files.

    on_gpus: True if the machine has GPUs.
    """
    if config.sync.backend != "auto":
        return config
    rollout, backend = config.rollout, "ipc" if config.rollout.placement == "colocated" else "nccl"
    if config.sync.directory is not None or rollout.placement == "local" or not (on_gpus or config.sync.cpu_twin):
        backend = "shm"
    return config.model_copy(update={"sync": config.sync.model_copy(update={"backend": backend})})


def placement_lines(config: RunConfig, host: TrainerHost, world_size: int) -> list[str]:
    """Return the placement as text: the ranks, each policy's engines, and the transport of weights.

    Engines get the GPUs of this host that no rank uses, policy by policy; Ray places the remaining engines on other hosts.
    """
    rollout, served, has_gpus = config.rollout, config.served_rollouts, host.num_gpus > 0
    lines = []
    if host.num_ranks:
        here = min(host.num_ranks, world_size)
        each_host = f", {here} a host" if world_size > here else ""
        lines.append(f"ranks: {world_size}{each_host}, on {_gpus(range(here)) if has_gpus else 'CPUs'}")
    is_ours = rollout.ray_address is None or is_started_here(rollout.ray_address)
    free = sorted(host.gpus_for(tuple(served.values()))) if served and has_gpus and is_ours else []
    for name, pool in served.items():
        size, where = pool.vllm.tensor_parallel, list[str]()
        if rollout.placement == "local":
            where = ["in this process"]
        elif rollout.placement == "colocated":
            where = ["one on each of these GPUs"]
        else:
            num_here = min(pool.engines, len(free) // size)
            if num_here:
                where.append(f"{num_here} on {_gpus(free[: num_here * size])} of this host")
                free = free[num_here * size :]
            if num_here < pool.engines:
                where_else = "this host's CPUs" if rollout.ray_address is None else "hosts of the Ray cluster"
                where.append(f"{pool.engines - num_here} on {where_else}")
        per_engine = f" of {size} GPUs" if size > 1 else ""
        lines.append(f"engines of {name}: {pool.engines}{per_engine}, {', '.join(where)}")
    if rollout.rebalance:
        lines.append(f"rebalance: {rebalance_outlook(config, has_gpus=has_gpus)}")
    changes = ", only changes" if config.sync.delta else ""
    return [*lines, f"weights: sync.backend={config.sync.backend}, {_TRAVEL[config.sync.backend]}{changes}"]


def rebalance_outlook(config: RunConfig, *, has_gpus: bool) -> str:
    """Return the moves of engines that rollout.rebalance could make, as text.

    has_gpus: True if each engine takes tensor_parallel GPUs; False: on CPUs, where any engine can replace any other.
    """
    policies_asked = {agent.policy for agent in config.agents.values()}
    pools = {name: pool for name, pool in config.served_rollouts.items() if name in policies_asked}
    takes = {name: {"GPU": pool.vllm.tensor_parallel if has_gpus else 1.0} for name, pool in pools.items()}
    return outlook({name: pool.engines for name, pool in pools.items()}, takes)


_TRAVEL: dict[SyncBackend, str] = {
    "auto": "not decided",
    "shm": "files that every engine reads",
    "nccl": "from each rank straight to the engines",
    "ipc": "from each rank to the engine on its GPU",
}


def _gpus(numbers: Sequence[int]) -> str:
    return f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPUs {numbers[0]}-{numbers[-1]}"
