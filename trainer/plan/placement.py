"""Where everything of a run is: which host and GPU has which rank or engine, and how weights get from the ones to the others."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

from marsrl.rollout.config import RolloutConfig, is_started_here
from marsrl.rollout.engines.refusals import TrainerHost
from marsrl.rollout.pool.rebalance import outlook
from marsrl.trainer.config import RunConfig, SyncBackend


def with_backend(config: RunConfig, *, on_gpus: bool) -> RunConfig:
    """The config with sync.backend=auto decided, in one way on all ranks: by the settings and whether there are GPUs.

    Engines on the trainer's GPUs map its memory (ipc). Engines on GPUs of their own get each rank's part straight from its
    GPU (nccl), on one host too: files there would be gathered by one rank, copied to the host's memory and read from
    there by every engine, the whole model over one GPU's link to the host each time. Without GPUs, and where
    sync.directory asks for them, files (shm).
    """
    if config.sync.backend != "auto":
        return config
    return config.model_copy(update={"sync": config.sync.model_copy(update={"backend": _backend(config, on_gpus)})})


def _backend(config: RunConfig, on_gpus: bool) -> SyncBackend:
    rollout = config.rollout
    if config.sync.directory is not None or rollout.placement == "local" or not (on_gpus or config.sync.cpu_twin):
        return "shm"
    return "ipc" if rollout.placement == "colocated" else "nccl"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who has a part of a host: `num` ranks, or engines of a policy, from number `first` on, `each` GPUs apiece.

    gpu: the first GPU; None: on the host's CPUs.
    """

    who: str
    first: int
    num: int
    each: int
    gpu: int | None

    def text(self, num_hosts: int = 1) -> str:
        """num_hosts: hosts in a row that look like this one."""
        numbers = _range(self.first, self.num * num_hosts)
        who = f"{self.who}{'s' if self.num * num_hosts > 1 else ''} {numbers}"
        if self.gpu is None:
            return f"CPU: {who}"
        of_each = f", {self.each} GPUs each" if self.each > 1 else ""
        return f"GPU {_range(self.gpu, self.num * self.each)}: {who}{of_each}"


@dataclass(frozen=True, slots=True)
class Host:
    """A host and who is on it. name: "trainer host", "engine host"."""

    name: str
    tenants: tuple[Tenant, ...]

    def is_followed_by(self, other: Host, distance: int) -> bool:
        """Whether the other one is the same, `distance` hosts further on."""
        on = tuple(replace(each, first=each.first + distance * each.num) for each in self.tenants)
        return self.name == other.name and on == other.tenants


def placement(config: RunConfig, host: TrainerHost, world_size: int) -> list[Host]:
    """Who is where, trainer hosts first, rank 0's first of all; which engine gets which of its GPUs is Ray's choice.

    Hosts of engines that are not known yet are taken to have as many GPUs as this one, and a slot each where it has none.
    """
    hosts = []
    for first in range(0, world_size if host.num_ranks else 0, max(1, host.num_ranks)):
        num = min(host.num_ranks, world_size - first)
        hosts.append(Host("trainer host", (Tenant("rank", first, num, 1, 0 if host.num_gpus else None),)))
    hosts = hosts or [Host("this host", ())]
    rollout = config.rollout
    of = {name: config.rollout_of(name) for name, policy in config.policies.items() if policy.openai is None}
    is_local, has_gpus = rollout.placement == "local", host.num_gpus > 0
    if not is_local and not has_gpus and rollout.ray_address is not None and is_started_here(rollout.ray_address):
        slots = [Tenant(f"{name} engine", i, 1, 1, None) for name, each in of.items() for i in range(each.engines)]
        return hosts + [Host("engine host", (tenant,)) for tenant in slots]
    if is_local or not has_gpus:
        tenants = [
            Tenant(
                f"{name} engine", 0, each.engines, each.vllm.tensor_parallel if has_gpus else 1, 0 if has_gpus else None
            )
            for name, each in of.items()
        ]
        return [replace(hosts[0], tenants=(*hosts[0].tenants, *tenants)), *hosts[1:]]
    if rollout.placement == "colocated":
        rooms = [list(range(each.tenants[0].num if each.tenants else host.num_gpus)) for each in hosts]
        for name, each in of.items():  # every policy has an engine on each GPU
            hosts, _ = _filled(hosts, [list(room) for room in rooms], name, each, 0)
        return hosts
    rooms = [[] for _ in hosts]
    if rollout.ray_address is None or is_started_here(rollout.ray_address):
        rooms[0] = sorted(host.gpus_for(tuple(of.values())))
    for name, each in of.items():
        hosts, rooms = _filled(hosts, rooms, name, each, host.num_gpus if rollout.ray_address is not None else 0)
    return hosts


def _filled(
    hosts: list[Host], rooms: list[list[int]], policy: str, rollout: RolloutConfig, more_gpus: int
) -> tuple[list[Host], list[list[int]]]:
    """The hosts with a policy's engines on them, and what is left of their free GPUs. more_gpus: of each further host."""
    each, left, at, hosts, rooms = rollout.vllm.tensor_parallel, rollout.engines, 0, [*hosts], [*rooms]
    while left:
        if at == len(hosts):
            if more_gpus < each:
                break  # refused elsewhere (refusals.py)
            hosts.append(Host("engine host", ()))
            rooms.append(list(range(more_gpus)))
        if num := min(left, len(rooms[at]) // each):
            tenant = Tenant(f"{policy} engine", rollout.engines - left, num, each, rooms[at][0])
            hosts[at] = replace(hosts[at], tenants=(*hosts[at].tenants, tenant))
            rooms[at] = rooms[at][num * each :]
            left -= num
        at += 1
    return hosts, rooms


def placement_lines(config: RunConfig, host: TrainerHost, world_size: int) -> list[str]:
    """For people: a line a host, hosts that look alike in one; then how weights travel."""
    hosts, lines, rollout = placement(config, host, world_size), list[str](), config.rollout
    numbers = {"trainer host": 0, "engine host": 0, "this host": 0}
    while hosts:
        first = hosts[0]
        alike = 1
        while alike < len(hosts) and first.is_followed_by(hosts[alike], alike) and lines:
            alike += 1
        number = numbers[first.name] + 1
        numbers[first.name] += alike
        name = f"{first.name}{'s' if alike > 1 else ''} {_range(number, alike)}"
        if not lines:
            name = f"{first.name} 1 ({socket.gethostname()})" if first.name != "this host" else socket.gethostname()
        lines.append(f"{name}: {'; '.join(tenant.text(alike) for tenant in first.tenants)}")
        hosts = hosts[alike:]
    if numbers["engine host"]:
        has = f"{host.num_gpus} GPUs" if host.num_gpus else "a slot"
        lines[-1] += f" (taken to have {has} each, and not known yet)"
    if rollout.rebalance:
        lines.append(f"rebalance: {rebalance_outlook(config, has_gpus=bool(host.num_gpus))}")
    return [*lines, f"weights: sync.backend={config.sync.backend}, {_TRAVEL[config.sync.backend]}"]


def rebalance_outlook(config: RunConfig, *, has_gpus: bool) -> str:
    """What rollout.rebalance can move, in words. has_gpus: an engine takes some, else a slot."""
    asked = {agent.policy for agent in config.agents.values()}
    of = {
        name: config.rollout_of(name) for name, each in config.policies.items() if each.openai is None and name in asked
    }
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
