"""Settings that engines reject, each with the nearest one that works: shared by engines, dry run and planner.

Imports no vLLM and no Ray; torch only to count this host's GPUs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.config import RolloutConfig, VllmOptions, is_started_here
from marsrl.rollout.engines.protocol import Records
from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.weights.layout import FP8_BLOCK, VOCAB_MULTIPLE

_ALL2ALL = "allgather_reducescatter"  # vLLM's default


@dataclass(frozen=True, slots=True)
class RankHost:
    """A host of trainer ranks, which hold its first GPUs. name: the host name, as in Ray."""

    name: str
    num_gpus: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class TrainerHost:
    """The host of trainer rank 0, where engines run unless rollout.ray_address names a cluster.

    num_gpus: 0: engines run on CPUs. num_ranks: of the trainer on this host, which hold its first
    GPUs; 0 if nothing is trained. has_others: engines can run on other hosts. rank_hosts: all hosts of
    ranks, including this one; (): not known yet.
    """

    num_gpus: int
    num_ranks: int
    has_others: bool
    rank_hosts: tuple[RankHost, ...] = ()

    def gpus_for(self, rollouts: Sequence[RolloutConfig]) -> Sequence[int]:
        """Indices of the GPUs that a Ray started here may give to engines of all policies (rollouts: of each): those
        without a trainer rank; with placement colocated all of the trainer's. Engines with a KV cache of fixed size take
        the others too, if these are too few.
        """
        ranks, free = range(min(self.num_ranks, self.num_gpus)), range(self.num_ranks, self.num_gpus)
        if rollouts[0].placement == "colocated":
            return ranks or free
        have_sizes = all(each.vllm.kv_cache_mib is not None for each in rollouts)
        is_alone = rollouts[0].ray_address is None
        shares = have_sizes and is_alone and num_engine_gpus(rollouts) > len(free)
        return [*free, *ranks] if shares else free


def this_host(ray_address: str | None, *, trains: bool = True) -> TrainerHost:
    """This host, from PyTorch, torchrun's variables and the address; call it on trainer rank 0."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if trains else 0
    return TrainerHost(num_gpus, num_ranks, names_other_hosts(ray_address))


def names_other_hosts(ray_address: str | None) -> bool:
    """True if the address allows engines on other hosts; a cluster started on this one may have some too."""
    return ray_address is not None and (is_started_here(ray_address) or not is_this_host(ray_address))


def is_this_host(address: str) -> bool:
    """True if host:port (or ray://host:port, or Ray's word auto) is an address of this machine."""
    host = address.removeprefix("ray://").rpartition(":")[0].strip("[]")
    return not host or address_here(host) is not None  # auto: the cluster running here


def address_here(host: str) -> str | None:
    """The IP address of a name if it belongs to this host: one can bind to it."""
    try:
        for family, kind, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as own:
                own.bind(where)
                return str(where[0])
    except OSError:
        pass
    return None


def num_engine_gpus(rollouts: Sequence[RolloutConfig]) -> int:
    """Total number of GPUs used only by the engines of these policies."""
    return sum(each.engines * each.vllm.tensor_parallel for each in rollouts if each.placement == "disaggregated")


def refusals(rollouts: Sequence[RolloutConfig], host: TrainerHost, *, weight_files: str | None) -> tuple[str, ...]:
    """Sentences about settings that the start of the run would reject; empty: none.

    rollouts: of each policy with engines here; they differ at most in engines.
    weight_files: folder of the weight files for engines; None: the trainer's ranks send them.
    """
    if not rollouts:  # servers answer
        return ()
    found = (
        *(_not_on_several_gpus(each, len(rollouts), host) for each in rollouts),
        _lack_of_gpus(rollouts, host),
        _files_out_of_reach(rollouts, host, weight_files),
    )
    return tuple(dict.fromkeys(sentence for sentence in found if sentence is not None))


def why_not_cut(shape: ModelShape, vllm: VllmOptions) -> str | None:
    """Why an engine cannot shard this model over its GPUs, with the nearest number of GPUs that works; None: it can."""
    if vllm.expert_parallel and not shape.num_experts:
        return f"rollout.vllm.expert_parallel spreads experts, and a {shape.architecture} has none: set it to false"
    if (uneven := _uneven(shape, vllm.tensor_parallel, vllm.expert_parallel)) is None:
        if vllm.quantization and shape.num_experts and shape.hidden_size % FP8_BLOCK:
            return (
                f"rollout.vllm.quantization is {vllm.quantization}, and vLLM's experts in FP8 take a hidden size in multiples of "
                f"{FP8_BLOCK}, which is {shape.hidden_size} here: set it to null"
            )
        return None
    fitting = next(n for n in range(vllm.tensor_parallel - 1, 0, -1) if _uneven(shape, n, vllm.expert_parallel) is None)
    return (
        f"rollout.vllm.tensor_parallel is {vllm.tensor_parallel}, over which the model's {uneven} cannot be cut: set "
        f"rollout.vllm.tensor_parallel={fitting}"
    )


def _uneven(shape: ModelShape, parts: int, spreads_experts: bool) -> str | None:
    """The first of its sizes that vLLM cannot split into so many parts."""
    vocabulary = -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    heads = shape.num_kv_heads
    sizes = {
        f"{shape.num_heads} attention heads": shape.num_heads % parts,
        f"{heads} key and value heads": heads % parts if parts <= heads else parts % heads,
        f"vocabulary of {vocabulary} rows": vocabulary % parts,
        f"{shape.num_experts} experts": spreads_experts and parts > shape.num_experts,
        f"MLP width of {shape.ffn_size}": not spreads_experts and shape.ffn_size % parts,
    }
    return next((size for size, rest in sizes.items() if rest), None)


def wider_than_a_host(tensor_parallel: int, gpus_of_host: int) -> str | None:
    """Why an engine over so many GPUs does not fit on a host with gpus_of_host; None: it does."""
    if tensor_parallel <= gpus_of_host:
        return None
    return (
        f"rollout.vllm.tensor_parallel is {tensor_parallel}, the GPUs of an engine are on one host, and a host has "
        f"{gpus_of_host}: set rollout.vllm.tensor_parallel={gpus_of_host} or less"
    )


def _not_on_several_gpus(rollout: RolloutConfig, num_policies: int, host: TrainerHost) -> str | None:
    """Why a policy's engines cannot span rollout.vllm.tensor_parallel GPUs each, whatever is free."""
    wide = rollout.vllm.tensor_parallel
    if wide == 1:
        return None
    asked = f"rollout.vllm.tensor_parallel is {wide}, and"
    if rollout.engine != "vllm":
        return (
            f"{asked} rollout.engine={rollout.engine} computes in one process: set rollout.vllm.tensor_parallel=1, or "
            "rollout.engine=vllm"
        )
    if not host.num_gpus:
        return None
    if rollout.placement == "colocated" and num_policies > 1:
        return (
            f"{asked} rollout.placement=colocated gives each of {num_policies} policies a share of one GPU: set "
            "rollout.vllm.tensor_parallel=1, or rollout.placement=disaggregated"
        )
    if rollout.placement == "local" and host.num_ranks > 1:
        return (
            f"{asked} rollout.placement=local takes the first {wide} GPUs of this host, which {host.num_ranks} trainer ranks "
            "hold: set rollout.vllm.tensor_parallel=1, or rollout.placement=disaggregated"
        )
    if rollout.ray_address is not None and host.has_others:
        return None  # engines run on hosts known to Ray, which the pool asks
    return wider_than_a_host(wide, host.num_gpus)


def vllm_refusals(options: VllmOptions, device: str, records: Records) -> tuple[str, ...]:
    """Sentences about options that vLLM does not support on "cpu" or "cuda". records: requested per token."""
    found, sampler = [], options.sampler_on(device)
    if options.quantization is not None and device == "cpu" and not _has_amx():
        found.append(
            f"rollout.vllm.quantization is {options.quantization}, and vLLM's FP8 kernels for CPUs need AMX, which this "
            "one lacks: set it to null"
        )
    if options.draft_tokens and (sampler == "marsrl" or device == "cpu"):
        why = (
            "on a CPU vLLM 0.32 runs V1, which fails at drafts beside top_p and top_k: set rollout.engine=local"
            if device == "cpu"
            else "rollout.vllm.sampler=marsrl draws one token at a time: set rollout.vllm.sampler=engine"
        )
        found.append(f"rollout.vllm.draft_tokens is {options.draft_tokens}, and {why}, or draft_tokens=0")
    if records.experts and (sampler == "marsrl" or device == "cpu"):
        why = (
            "rollout.vllm.sampler=marsrl draws in Model Runner V1: set rollout.vllm.sampler=engine"
            if device == "cuda"
            else "on a CPU vLLM runs V1: set rollout.engine=local"
        )
        found.append(
            f"trainer.router_replay=rollout needs the experts chosen in decoding, which vLLM 0.32 returns in its Model Runner V2 "
            f"alone, and {why}, or trainer.router_replay=recompute"
        )
    if records.kept_tokens and sampler == "engine" and device == "cpu":
        found.append(
            "loss.truncation=renormalise needs the tokens that top_p and top_k kept, which vLLM's own sampler tells in its Model "
            "Runner V2 alone, and on a CPU it runs V1: set rollout.vllm.sampler=marsrl"
        )
    return tuple(found)


def _has_amx() -> bool:
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def adapter_refusals(
    rollout: RolloutConfig, device: str, dtype: str, shape: ModelShape, adapters: Mapping[str, AdapterConfig]
) -> tuple[str, ...]:
    """Sentences about adapters that a pool's engines cannot serve on "cpu" or "cuda". rollout: the pool's settings."""
    of_experts = [name for name, each in adapters.items() if "experts" in each.targets and shape.num_experts]
    found, vllm = [], rollout.vllm
    if rollout.engine != "vllm" or not adapters:
        return ()
    if vllm.draft_tokens:
        found.append(
            f"rollout.vllm.draft_tokens is {vllm.draft_tokens}, and drafts beside adapters ({', '.join(adapters)}) have not been "
            "tried: set it to 0"
        )
    if device == "cuda" and dtype == "float32":
        found.append(
            f"vLLM's kernels for adapters ({', '.join(adapters)}) refuse float32 on GPUs: set rollout.vllm.dtype or the policy's "
            "dtype to bfloat16, or rollout.engine=local"
        )
    if of_experts and device == "cuda":
        backend = vllm.extra.get("all2all_backend", _ALL2ALL)
        if vllm.expert_parallel and backend != _ALL2ALL:
            found.append(
                f"rollout.vllm.extra.all2all_backend is {backend}, and vLLM serves adapters of spread experts with {_ALL2ALL} "
                f"alone: set that, or rollout.vllm.expert_parallel=false"
            )
    if device == "cpu" and shape.num_experts:
        if of_experts:
            found.append(
                f"policies.{of_experts[0]}.adapter.targets has experts, whose adapters vLLM 0.32 computes on GPUs alone: set "
                "rollout.engine=local, or leave experts out (attention works)"
            )
        elif vllm.tensor_parallel > 1:
            found.append(
                f"rollout.vllm.tensor_parallel is {vllm.tensor_parallel}, and beside adapters vLLM's experts on a CPU compute in "
                "one process: set rollout.vllm.tensor_parallel=1, or rollout.engine=local"
            )
    return tuple(found)


def _lack_of_gpus(rollouts: Sequence[RolloutConfig], host: TrainerHost) -> str | None:
    """Refusals of a Ray started here with too few GPUs beside those of trainer ranks."""
    rollout, num_policies = rollouts[0], len(rollouts)
    if rollout.placement == "local" or not host.num_gpus or rollout.ray_address:
        return None
    gpus, wide = len(host.gpus_for(rollouts)), rollout.vllm.tensor_parallel
    if rollout.placement == "colocated":
        # engines of several policies share a GPU
        if rollout.engines * wide <= gpus:
            return None
        of_each = f" x rollout.vllm.tensor_parallel={wide}" if wide > 1 else ""
        fitting = f"rollout.engines={gpus // wide}" if gpus >= wide else f"rollout.vllm.tensor_parallel={gpus}"
        return (
            f"rollout.placement=colocated puts an engine of every policy on each trainer rank's GPU: rollout.engines is "
            f"{rollout.engines}{of_each}, and this host has {gpus} such GPU(s); set {fitting}"
        )
    needed = num_engine_gpus(rollouts)
    if needed <= gpus:
        return None
    near = f"start {host.num_gpus - needed} rank(s) here (torchrun --nproc-per-node {host.num_gpus - needed})"
    if gpus >= num_policies * wide:
        near = f"set rollout.engines={gpus // (num_policies * wide)}"
    elif wide > 1 and gpus >= num_policies:
        near = f"set rollout.engines=1 and rollout.vllm.tensor_parallel={gpus // num_policies}"
    elif needed >= host.num_gpus:
        near = f"set rollout.placement={'local' if host.num_ranks == 1 and rollout.engines == 1 else 'colocated'}"
    counts = {(each.engines, each.vllm.tensor_parallel) for each in rollouts}
    asked = f"rollout.engines={rollout.engines} with {num_policies} policy(s)"
    asked += f" and rollout.vllm.tensor_parallel={wide}" if wide > 1 else ""
    if len(counts) > 1:
        numbers = [(each.engines, each.vllm.tensor_parallel) for each in rollouts]
        words = [f"{engines} x {gpus_of_one}" if gpus_of_one > 1 else f"{engines}" for engines, gpus_of_one in numbers]
        asked = f"policies.<name>.engines ({' + '.join(words)})"
        near = "lower them"
    return (
        f"{asked} needs {needed} GPU(s) without a trainer rank; this host has {host.num_gpus}, and "
        f"{min(host.num_ranks, host.num_gpus)} rank(s) hold the first of them: {near}, or rollout.ray_address to a cluster with "
        "more"
    )


def _files_out_of_reach(rollouts: Sequence[RolloutConfig], host: TrainerHost, weight_files: str | None) -> str | None:
    """Refusals of files in this host's memory, unseen by engines on other hosts: if the address names these, or if this one
    has too few GPUs for a cluster's engines."""
    rollout = rollouts[0]
    if weight_files is None or rollout.placement == "local" or rollout.ray_address is None:
        return None
    lacks_gpus = host.num_gpus > 0 and num_engine_gpus(rollouts) > len(host.gpus_for(rollouts))
    if not host.has_others and not lacks_gpus:
        return None
    if not Path(weight_files).resolve().is_relative_to("/dev/shm"):
        return None
    return (
        f"sync.backend=shm, as adapters and FP8 weights in any case, writes weights to {weight_files} of trainer rank 0's host, "
        f"which engines on the other hosts of rollout.ray_address={rollout.ray_address} do not see: set sync.directory to a "
        "folder that all hosts share, or send weights over the network (sync.backend=auto on GPUs; on CPUs "
        "rollout.engine=local with sync.cpu_twin=true)"
    )
