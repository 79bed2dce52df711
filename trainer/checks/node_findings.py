"""Findings of `marsrl doctor` about this host as a cluster node, and about a config on it; starts no engine."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from marsrl.rollout.config import is_started_here
from marsrl.rollout.engines.refusals import num_engine_gpus
from marsrl.rollout.environment import environment
from marsrl.rollout.weights.files import parent_of
from marsrl.trainer.checks.device import KERNEL_MODULE, driver_version
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config import RunConfig
from marsrl.trainer.plan.models import find_shape
from marsrl.trainer.plan.parameters import elements
from marsrl.trainer.plan.placement import with_backend


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. detail says the version, or the reason why not."""

    topic: str
    name: str
    is_used: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Ranks:
    """As torchrun would start them."""

    num_nodes: int
    per_node: int

    @classmethod
    def of(cls, config: RunConfig, num_nodes: int, per_node: int | None) -> Ranks:
        """per_node None: one for every GPU of this host that the config's engines leave; 1 without GPUs."""
        if per_node is None:
            num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 1
            alone = config.rollout.ray_address is None
            per_node = max(1, num_gpus - (num_engine_gpus(config.served_rollouts) if alone else 0))
            if config.rollout.placement == "local":
                per_node = 1
        return cls(num_nodes, per_node)


def gpu_findings() -> list[Finding]:
    """Driver, CUDA, NCCL and who reaches whose memory; nothing where PyTorch sees no GPU."""
    cuda: Any = torch.cuda
    if not cuda.is_available():
        return []
    num = cuda.device_count()
    cut_off = [
        f"{a}-{b}" for a in range(num) for b in range(a + 1, num)
        if not (cuda.can_device_access_peer(a, b) and cuda.can_device_access_peer(b, a))
    ]  # fmt: skip
    peers = "one GPU alone" if num == 1 else f"all {num} GPUs reach each other's memory"
    if cut_off:
        peers = f"no direct way between {', '.join(cut_off)}: NCCL goes through host memory there (nvidia-smi topo -m)"
    return [_driver(), *_libraries(), Finding("gpu", "peer access", not cut_off, peers)]


def _driver() -> Finding:
    version = driver_version()
    return Finding("gpu", "driver", version is not None, version or f"{KERNEL_MODULE} and nvidia-smi say no version")


def _libraries() -> list[Finding]:
    cuda: Any = torch.cuda
    capability = ".".join(map(str, cuda.get_device_capability(0)))
    memory = cuda.get_device_properties(0).total_memory / 2**30
    found = [
        Finding(
            "gpu",
            "CUDA",
            True,
            f"{torch.version.cuda} of torch; compute capability {capability}, {memory:.0f} GiB each",
        )
    ]
    try:
        nccl = ".".join(map(str, cuda.nccl.version()))
    except (AttributeError, RuntimeError) as error:
        return [
            *found,
            Finding("gpu", "NCCL", False, f"this torch has none ({error}): several ranks cannot talk to each other"),
        ]
    return [*found, Finding("gpu", "NCCL", True, nccl)]


def memory_findings(config: RunConfig) -> list[Finding]:
    """Room for the weights in files, where they travel so, and what shared memory there is."""
    parent = parent_of(config.sync.directory)
    usage = shutil.disk_usage(parent)
    room = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    config = with_backend(config, on_gpus=torch.cuda.is_available())
    if config.sync.backend != "shm":
        return [
            Finding("machine", str(parent), True, f"{room}; sync.backend={config.sync.backend} writes no weights there")
        ]
    if any(policy.model is None for policy in config.trained_policies.values()):
        return [Finding("machine", str(parent), True, f"{room}, for the small policies of a warm start")]
    needed = sum(
        2 * elements(find_shape(policy.model or "")).total * getattr(torch, config.engine_dtype(name)).itemsize
        for name, policy in config.trained_policies.items()
    )
    fits = needed <= usage.free
    detail = f"{room}; weights in files (sync.backend=shm) need {needed / 2**30:.1f} GiB, two versions"
    remedy = "" if fits else ": make room (docker run --shm-size), or set sync.directory to a larger folder"
    return [Finding("machine", str(parent), fits, detail + remedy)]


def ray_findings(config: RunConfig) -> list[Finding]:
    """Ray's token here, and what the cluster that the config names has."""
    if importlib.util.find_spec("ray") is None:
        return []  # said among the engines
    from marsrl.rollout.pool.ray_token import show_token, token_here

    found = [Finding("ray", "token", *token_here())]
    address = config.rollout.ray_address
    if address is None:
        return [
            *found,
            Finding(
                "ray", "cluster", True, "none is named (rollout.ray_address): a run starts one for this machine alone"
            ),
        ]
    if is_started_here(address):
        detail = f"rollout.ray_address={address}: the run starts it, other hosts run `marsrl join`"
        return [*found, Finding("ray", "cluster", True, detail)]
    show_token()
    from marsrl.rollout.pool.ray_connection import cluster_view

    try:
        view = cluster_view(address, config.rollout.ray_timeout_s)
    except RuntimeError as error:
        return [*found, Finding("ray", "cluster", False, str(error))]
    return [*found, Finding("ray", "cluster", True, view)]


def config_findings(config: RunConfig, ranks: Ranks) -> list[Finding]:
    """Outcome of a run with these settings on hosts like this one: its placement, or the refusal."""
    started = f"torchrun --nnodes {ranks.num_nodes} --nproc-per-node {ranks.per_node}"
    world_size = ranks.num_nodes * ranks.per_node
    with environment(LOCAL_WORLD_SIZE=str(ranks.per_node), WORLD_SIZE=str(world_size)):
        try:
            checked = preflight(config, world_size)
        except (ValueError, OSError) as error:
            return [Finding("config", started, False, f"refused: {error}")]
    lines = [Finding("config", started, True, "passes every check of a dry run"), *_backends(checked.config)]
    lines += [Finding("config", "placement", True, line) for line in checked.placement]
    return lines + [Finding("config", "warning", False, warning) for warning in checked.warnings]


def _backends(config: RunConfig) -> list[Finding]:
    """Expert kernels of the engines; the trainer's kernels have findings of their own."""
    if config.rollout.engine != "vllm":
        return [
            Finding("config", "engines", True, f"rollout.engine={config.rollout.engine}: kernels of ours, as above")
        ]
    from marsrl.rollout.engines.vllm.arguments import engine_arguments

    device, dtype = ("cuda" if torch.cuda.is_available() else "cpu"), "bfloat16"
    words = engine_arguments("", config.rollout.vllm, dtype=dtype, max_model_len=1, seed=0, sleeps=False, device=device)
    return [
        Finding("config", "engines", True, f"vLLM on {device}, experts by its {words.get('moe_backend', 'own choice')}")
    ]
