"""Placement of a run: the host and GPU of every rank and engine, and the transport of weights from ranks to engines."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

from marsrl.rollout.config import RolloutConfig, is_started_here
from marsrl.rollout.engines.refusals import TrainerHost
from marsrl.rollout.pool.rebalance import outlook
from marsrl.trainer.config import RunConfig, SyncBackend


def with_backend(config: RunConfig, *, on_gpus: bool) -> RunConfig:
    """The config with sync.backend=auto resolved, equally on all ranks, from the settings and the presence of GPUs.

    Engines on the trainer's GPUs map its memory (ipc). Engines on GPUs of their own get each rank's part directly from its
    GPU (nccl), even on one host: files would be gathered by one rank, copied to the host's memory and read by every engine,
    moving the whole model over one GPU's link to the host each time. Without GPUs, with sync.directory, or for engines that round
    weights as they read them (rollout.vllm.quantization), files (shm).
    """
    if config.sync.backend != "auto":
        return config
    return config.model_copy(update={"sync": config.sync.model_copy(update={"backend": _backend(config, on_gpus)})})


def _backend(config: RunConfig, on_gpus: bool) -> SyncBackend:
    rollout = config.rollout
    has_files = config.sync.directory is not None or config.has_quantised
    if has_files or rollout.placement == "local" or not (on_gpus or config.sync.cpu_twin):
        return "shm"
    return "ipc" if rollout.placement == "colocated" else "nccl"


@dataclass(frozen=True, slots=True)
class Tenant:
    """`num` ranks, or engines of a policy, on one host, numbered from `first`, with `each` GPUs apiece.

    gpu: the first GPU; None: on the host's CPUs.
    """

    who: str
    first: int
    num: int
    each: int
    gpu: int | None

    def text(self, num_hosts: int = 1) -> str:
        """The tenant as text. num_hosts: number of consecutive hosts that look alike."""
        numbers = _range(self.first, self.num * num_hosts)
        who = f"{self.who}{'s' if self.num * num_hosts > 1 else ''} {numbers}"
        if self.gpu is None:
            return f"CPU: {who}"
        of_each = f", {self.each} GPUs each" if self.each > 1 else ""
        return f"GPU {_range(self.gpu, self.num * self.each)}: {who}{of_each}"


@dataclass
class Host:
    """A host and its tenants. name: "trainer host", "engine host", "this host". free: its GPUs for further engines."""

    name: str
    tenants: list[Tenant]
    free: list[int] = field(default_factory=list)


def placement(config: RunConfig, host: TrainerHost, world_size: int) -> list[Host]:
    """All hosts with their ranks and engines, trainer hosts first; Ray assigns a host's GPUs to its engines.

    Engine hosts that are not known yet are assumed to have as many GPUs as this one, or a slot each if it has none.
    """
    hosts, rollout, has_gpus = list[Host](), config.rollout, host.num_gpus > 0
    for first in range(0, world_size if host.num_ranks else 0, max(1, host.num_ranks)):
        num = min(host.num_ranks, world_size - first)
        hosts.append(Host("trainer host", [Tenant("rank", first, num, 1, 0 if has_gpus else None)]))
    hosts = hosts or [Host("this host", [])]
    of = config.served_rollouts
    starts_ray = rollout.ray_address is None or is_started_here(rollout.ray_address)
    if rollout.placement == "local" or not has_gpus:
        joins = rollout.placement != "local" and starts_ray and rollout.ray_address is not None
        for name, each in of.items():
            if joins:
                hosts += [Host("engine host", [Tenant(f"{name} engine", i, 1, 1, None)]) for i in range(each.engines)]
            else:
                gpus, first_gpu = (each.vllm.tensor_parallel, 0) if has_gpus else (1, None)
                hosts[0].tenants.append(Tenant(f"{name} engine", 0, each.engines, gpus, first_gpu))
        return hosts
    if starts_ray:
        hosts[0].free = sorted(host.gpus_for(tuple(of.values())))
    is_colocated = rollout.placement == "colocated"
    of_ranks = [each.tenants[0].num if each.tenants else host.num_gpus for each in hosts]
    for name, each in of.items():
        if is_colocated:  # every policy has an engine on each GPU
            for one, num in zip(hosts, of_ranks, strict=True):
                one.free = list(range(num))
        _add_engines(hosts, name, each, 0 if is_colocated or rollout.ray_address is None else host.num_gpus)
    return hosts


def _add_engines(hosts: list[Host], policy: str, rollout: RolloutConfig, more_gpus: int) -> None:
    """Put a policy's engines on free GPUs. more_gpus: of each further host."""
    each, left, at = rollout.vllm.tensor_parallel, rollout.engines, 0
    while left:
        if at == len(hosts):
            if more_gpus < each:
                return  # refused elsewhere (refusals.py)
            hosts.append(Host("engine host", [], list(range(more_gpus))))
        one = hosts[at]
        if num := min(left, len(one.free) // each):
            one.tenants.append(Tenant(f"{policy} engine", rollout.engines - left, num, each, one.free[0]))
            one.free = one.free[num * each :]
            left -= num
        at += 1


def placement_lines(config: RunConfig, host: TrainerHost, world_size: int) -> list[str]:
    """The placement as text: a line for each host, equal hosts merged, and the transport of weights."""

    def looks(place: tuple[int, Host]) -> tuple[object, ...]:
        i, one = place
        return i == 0, one.name, *((t.who, t.first - i * t.num, t.num, t.each, t.gpu) for t in one.tenants)

    lines, numbers = list[str](), Counter[str]()
    for _, group in groupby(enumerate(placement(config, host, world_size)), looks):
        alike = [one for _, one in group]
        first, num = alike[0], len(alike)
        name = f"{first.name}{'s' if num > 1 else ''} {_range(numbers[first.name] + 1, num)}"
        if not lines:
            name = f"{name} ({socket.gethostname()})" if first.name != "this host" else socket.gethostname()
        numbers[first.name] += num
        lines.append(f"{name}: {'; '.join(tenant.text(num) for tenant in first.tenants)}")
    if numbers["engine host"]:
        has = f"{host.num_gpus} GPUs" if host.num_gpus else "a slot"
        lines[-1] += f" (taken to have {has} each, and not known yet)"
    if config.rollout.rebalance:
        lines.append(f"rebalance: {rebalance_outlook(config, has_gpus=bool(host.num_gpus))}")
    changes = ", what has changed alone" if config.sync.delta else ""
    return [*lines, f"weights: sync.backend={config.sync.backend}, {_TRAVEL[config.sync.backend]}{changes}"]


def rebalance_outlook(config: RunConfig, *, has_gpus: bool) -> str:
    """Possible moves of rollout.rebalance, as text. has_gpus: an engine takes GPUs, otherwise a slot."""
    asked = {agent.policy for agent in config.agents.values()}
    of = {name: each for name, each in config.served_rollouts.items() if name in asked}
    takes = {name: {"GPU": each.vllm.tensor_parallel if has_gpus else 1.0} for name, each in of.items()}
    return outlook({name: each.engines for name, each in of.items()}, takes)


_TRAVEL: dict[SyncBackend, str] = {
    "auto": "not decided",
    "shm": "files that every engine reads",
    "nccl": "from each rank straight to the engines",
    "ipc": "from each rank to the engine on its GPU",
}


def _range(first: int, num: int) -> str:
    return f"{first}" if num == 1 else f"{first}-{first + num - 1}"
