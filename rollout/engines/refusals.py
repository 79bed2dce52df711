"""Settings that engines reject, each with the nearest supported value; used by engines, dry run and planner.

Imports no vLLM and no Ray, and torch only to query this host's hardware.
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
    """A host of trainer ranks, which use its first GPUs. name: the host name, as in Ray."""

    name: str
    num_gpus: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class TrainerHost:
    """Host of trainer rank 0, where engines run unless rollout.ray_address names a cluster.

    num_gpus: number of GPUs; 0 if engines run on CPUs. num_ranks: number of trainer ranks on this host, which use its first GPUs;
    0 without training.
    has_others: True if engines can run on other hosts. rank_hosts: all hosts with ranks, including this one; (): not known yet.
    """

    num_gpus: int
    num_ranks: int
    has_others: bool
    rank_hosts: tuple[RankHost, ...] = ()

    def gpus_for(self, rollouts: Sequence[RolloutConfig]) -> Sequence[int]:
        """Return indices of the GPUs that a Ray cluster started here may give to engines. rollouts: one per policy.

        With placement colocated these are the GPUs of the trainer's ranks, otherwise the GPUs without a rank. If too few GPUs are
        without a rank, engines whose KV cache has a fixed size also use the GPUs of ranks.
        """
        ranks, free = range(min(self.num_ranks, self.num_gpus)), range(self.num_ranks, self.num_gpus)
        if rollouts[0].placement == "colocated":
            return ranks or free
        have_sizes = all(each.vllm.kv_cache_mib is not None for each in rollouts)
        is_alone = rollouts[0].ray_address is None
        shares = have_sizes and is_alone and num_engine_gpus(rollouts) > len(free)
        return [*free, *ranks] if shares else free


def this_host(ray_address: str | None, *, trains: bool = True) -> TrainerHost:
    """Describe this host, from PyTorch, torchrun's variables and the address; call it on trainer rank 0."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if trains else 0
    return TrainerHost(num_gpus, num_ranks, names_other_hosts(ray_address))


def names_other_hosts(ray_address: str | None) -> bool:
    """Return True if engines may run on other hosts: the address names one, or lets other hosts join this one's cluster."""
    return ray_address is not None and (is_started_here(ray_address) or not is_this_host(ray_address))


def is_this_host(address: str) -> bool:
    """Return True if host:port (or ray://host:port, or Ray's `auto`) is an address of this machine."""
    host = address.removeprefix("ray://").rpartition(":")[0].strip("[]")
    return not host or address_here(host) is not None  # no host: Ray's `auto`, the cluster on this machine


def address_here(host: str) -> str | None:
    """Return the IP address of `host` if it is this host (a socket can bind to it), else None."""
    try:
        for family, kind, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as own:
                own.bind(where)
                return str(where[0])
    except OSError:
        pass
    return None


def num_engine_gpus(rollouts: Sequence[RolloutConfig]) -> int:
    """Return the number of GPUs used only by these policies' engines."""
    return sum(each.engines * each.vllm.tensor_parallel for each in rollouts if each.placement == "disaggregated")


def refusals(rollouts: Sequence[RolloutConfig], host: TrainerHost, *, weight_files: str | None) -> tuple[str, ...]:
    """Return messages about settings that the run would reject at its start; empty if there are none.

    rollouts: rollout settings of each policy with engines here; only `engines` and `vllm` may differ.
    weight_files: folder of the weight files for engines; None: the trainer's ranks send the weights.
    """
    if not rollouts:  # all policies are behind servers
        return ()
    sentences = (
        *(_not_on_several_gpus(each, len(rollouts), host) for each in rollouts),
        _lack_of_gpus(rollouts, host),
        _files_out_of_reach(rollouts, host, weight_files),
    )
    return tuple(dict.fromkeys(sentence for sentence in sentences if sentence is not None))


def why_not_cut(shape: ModelShape, vllm: VllmOptions) -> str | None:
    """Explain why an engine cannot shard this model over its GPUs, and name the nearest working number; None if it can."""
    if vllm.expert_parallel and not shape.num_experts:
        return f"rollout.vllm.expert_parallel=true spreads experts, but {shape.architecture} has none; set it to false"
    if (uneven := _uneven(shape, vllm.tensor_parallel, vllm.expert_parallel)) is None:
        if vllm.quantization and shape.num_experts and shape.hidden_size % FP8_BLOCK:
            return (
                f"rollout.vllm.quantization is {vllm.quantization}, for which vLLM's experts need a hidden size in multiples "
                f"of {FP8_BLOCK}, but the model's is {shape.hidden_size}; set rollout.vllm.quantization to null"
            )
        return None
    fitting = next(n for n in range(vllm.tensor_parallel - 1, 0, -1) if _uneven(shape, n, vllm.expert_parallel) is None)
    return (
        f"rollout.vllm.tensor_parallel is {vllm.tensor_parallel}, which does not divide the model's {uneven}; set "
        f"rollout.vllm.tensor_parallel={fitting}"
    )


def _uneven(shape: ModelShape, parts: int, spreads_experts: bool) -> str | None:
    """Return the first of the model's sizes that vLLM cannot split into this many parts."""
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
    """Explain why an engine over tensor_parallel GPUs does not fit on a host with gpus_of_host; None if it does."""
    if tensor_parallel <= gpus_of_host:
        return None
    return (
        f"rollout.vllm.tensor_parallel is {tensor_parallel}, but an engine's GPUs must be on one host, and hosts have "
        f"{gpus_of_host}; set rollout.vllm.tensor_parallel={gpus_of_host} or less"
    )


def _not_on_several_gpus(rollout: RolloutConfig, num_policies: int, host: TrainerHost) -> str | None:
    """Explain why engines cannot span rollout.vllm.tensor_parallel GPUs, even if all are free; None if they can."""
    wide = rollout.vllm.tensor_parallel
    if wide == 1:
        return None
    start = f"rollout.vllm.tensor_parallel is {wide}, and"
    if rollout.engine != "vllm":
        return (
            f"{start} rollout.engine={rollout.engine} computes in one process; set rollout.vllm.tensor_parallel=1, or "
            "rollout.engine=vllm"
        )
    if not host.num_gpus:
        return None
    if rollout.placement == "colocated" and num_policies > 1:
        return (
            f"{start} rollout.placement=colocated gives each of {num_policies} policies a share of one GPU; set "
            "rollout.vllm.tensor_parallel=1, or rollout.placement=disaggregated"
        )
    if rollout.placement == "local" and host.num_ranks > 1:
        return (
            f"{start} rollout.placement=local uses the first {wide} GPUs of this host, which {host.num_ranks} trainer ranks "
            "hold; set rollout.vllm.tensor_parallel=1, or rollout.placement=disaggregated"
        )
    if rollout.ray_address is not None and host.has_others:
        return None  # engines run on hosts known to Ray, which the pool queries
    return wider_than_a_host(wide, host.num_gpus)


def vllm_refusals(options: VllmOptions, device: str, records: Records) -> tuple[str, ...]:
    """Return messages about options that vLLM does not support on "cpu" or "cuda". records: data recorded for each token."""
    reasons, sampler = [], options.sampler_on(device)
    if options.quantization is not None and device == "cpu" and not _has_amx():
        reasons.append(
            f"rollout.vllm.quantization is {options.quantization}, but vLLM's FP8 kernels for CPUs need AMX, which this "
            "CPU lacks; set it to null"
        )
    if options.draft_tokens and (sampler == "marsrl" or device == "cpu"):
        why = (
            "on a CPU vLLM 0.32 uses Model Runner V1, which fails on drafts with top_p and top_k; set rollout.engine=local"
            if device == "cpu"
            else "rollout.vllm.sampler=marsrl draws one token at a time; set rollout.vllm.sampler=engine"
        )
        reasons.append(f"rollout.vllm.draft_tokens is {options.draft_tokens}, but {why}, or draft_tokens=0")
    if records.experts and (sampler == "marsrl" or device == "cpu"):
        why = (
            "rollout.vllm.sampler=marsrl needs Model Runner V1; set rollout.vllm.sampler=engine"
            if device == "cuda"
            else "on a CPU vLLM uses Model Runner V1; set rollout.engine=local"
        )
        reasons.append(
            "trainer.router_replay=rollout needs the experts chosen in decoding, which vLLM 0.32 returns only in its Model "
            f"Runner V2, but {why}, or trainer.router_replay=recompute"
        )
    if records.kept_tokens and sampler == "engine" and device == "cpu":
        reasons.append(
            "loss.truncation=renormalise needs the tokens that top_p and top_k kept, which vLLM's own sampler returns only in "
            "its Model Runner V2, but on a CPU it uses V1; set rollout.vllm.sampler=marsrl"
        )
    return tuple(reasons)


def _has_amx() -> bool:
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def adapter_refusals(
    rollout: RolloutConfig, device: str, dtype: str, shape: ModelShape, adapters: Mapping[str, AdapterConfig]
) -> tuple[str, ...]:
    """Return messages about adapters that a pool's engines cannot serve on "cpu" or "cuda". rollout: the pool's settings."""
    expert_adapters = [name for name, each in adapters.items() if "experts" in each.targets and shape.num_experts]
    reasons, vllm = [], rollout.vllm
    if rollout.engine != "vllm" or not adapters:
        return ()
    if vllm.draft_tokens:
        reasons.append(
            f"rollout.vllm.draft_tokens is {vllm.draft_tokens}, which is untested with adapters ({', '.join(adapters)}); "
            "set it to 0"
        )
    if device == "cuda" and dtype == "float32":
        reasons.append(
            f"vLLM's kernels for adapters ({', '.join(adapters)}) do not support float32 on GPUs; set rollout.vllm.dtype or "
            "the policy's dtype to bfloat16, or rollout.engine=local"
        )
    if expert_adapters and device == "cuda":
        backend = vllm.extra.get("all2all_backend", _ALL2ALL)
        if vllm.expert_parallel and backend != _ALL2ALL:
            reasons.append(
                f"rollout.vllm.extra.all2all_backend is {backend}, but with adapters of spread experts vLLM supports only "
                f"{_ALL2ALL}; "
                f"set that, or rollout.vllm.expert_parallel=false"
            )
    if device == "cpu" and shape.num_experts:
        if expert_adapters:
            reasons.append(
                f"policies.{expert_adapters[0]}.adapter.targets has experts, whose adapters vLLM 0.32 supports only on GPUs; set "
                "rollout.engine=local, or remove experts (attention works)"
            )
        elif vllm.tensor_parallel > 1:
            reasons.append(
                f"rollout.vllm.tensor_parallel is {vllm.tensor_parallel}, but with adapters vLLM's experts on a CPU compute in "
                "one process; set rollout.vllm.tensor_parallel=1, or rollout.engine=local"
            )
    return tuple(reasons)


def _lack_of_gpus(rollouts: Sequence[RolloutConfig], host: TrainerHost) -> str | None:
    """Explain why a Ray cluster started here lacks GPUs without a trainer rank; None if it has enough."""
    rollout, num_policies = rollouts[0], len(rollouts)
    if rollout.placement == "local" or not host.num_gpus or rollout.ray_address:
        return None
    gpus, wide = len(host.gpus_for(rollouts)), rollout.vllm.tensor_parallel
    if rollout.placement == "colocated":
        # engines of several policies share a GPU
        if rollout.engines * wide <= gpus:
            return None
        per_engine = f" x rollout.vllm.tensor_parallel={wide}" if wide > 1 else ""
        fitting = f"rollout.engines={gpus // wide}" if gpus >= wide else f"rollout.vllm.tensor_parallel={gpus}"
        return (
            f"rollout.placement=colocated puts an engine of every policy on each trainer rank's GPU, but rollout.engines is "
            f"{rollout.engines}{per_engine}, and this host has {gpus} such GPU(s); set {fitting}"
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
    counts = {(pool.engines, pool.vllm.tensor_parallel) for pool in rollouts}
    request = f"rollout.engines={rollout.engines} with {num_policies} policy(s)"
    request += f" and rollout.vllm.tensor_parallel={wide}" if wide > 1 else ""
    if len(counts) > 1:
        numbers = [(pool.engines, pool.vllm.tensor_parallel) for pool in rollouts]
        words = [f"{engines} x {gpus_of_one}" if gpus_of_one > 1 else f"{engines}" for engines, gpus_of_one in numbers]
        request = f"policies.<name>.engines ({' + '.join(words)})"
        near = "lower them"
    return (
        f"{request} needs {needed} GPU(s) without a trainer rank, but this host has {host.num_gpus}, of which "
        f"{min(host.num_ranks, host.num_gpus)} have ranks; {near}, or set rollout.ray_address to a larger "
        "cluster"
    )


def _files_out_of_reach(rollouts: Sequence[RolloutConfig], host: TrainerHost, weight_files: str | None) -> str | None:
    """Explain why engines on other hosts cannot read weight files in this host's memory; None if no engine has to.

    Applies if the address names other hosts, or if this host has too few GPUs for a cluster's engines.
    """
    rollout = rollouts[0]
    if weight_files is None or rollout.placement == "local" or rollout.ray_address is None:
        return None
    lacks_gpus = host.num_gpus > 0 and num_engine_gpus(rollouts) > len(host.gpus_for(rollouts))
    if not host.has_others and not lacks_gpus:
        return None
    if not Path(weight_files).resolve().is_relative_to("/dev/shm"):
        return None
    return (
        f"sync.backend=shm, which adapters always use, writes weights to {weight_files} on trainer rank 0's host, "
        f"which engines on the other hosts of rollout.ray_address={rollout.ray_address} cannot read; set sync.directory to a "
        "folder that all hosts share, or send weights over the network (sync.backend=auto on GPUs; on CPUs "
        "rollout.engine=local with sync.cpu_twin=true)"
    )
