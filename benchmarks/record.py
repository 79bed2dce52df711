"""What a number is worth without: the device and its state, the versions, the commit."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from marsrl.trainer.machine import commit, device_name

LIBRARIES = (
    "torch", "triton", "numpy", "liger-kernel", "cut-cross-entropy", "quack-kernels", "verl", "flash-attn",
    "transformer-engine", "megatron-core",
)  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """clocks: as the driver or the kernel tells them, at the moment of asking. load: of the machine, 1 minute."""

    device: str
    clocks: str
    threads: int
    load: float
    versions: dict[str, str]
    commit: str | None


def surroundings(device: str) -> Surroundings:
    """Of this process, now."""
    is_cuda = device == "cuda"
    return Surroundings(
        device=torch.cuda.get_device_name() if is_cuda else device_name(),
        clocks=_gpu_clocks() if is_cuda else _cpu_clocks(),
        threads=torch.get_num_threads(),
        load=float(Path("/proc/loadavg").read_text().split()[0]),
        versions={"python": platform.python_version(), "cuda": str(torch.version.cuda), **_versions()},
        commit=commit(),
    )


def _versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "missing"
    return found


def _cpu_clocks() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return ", ".join(line.partition(":")[2].strip() for line in lines if line.startswith("cpu MHz")) + " MHz"


def _gpu_clocks() -> str:
    query = "clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,persistence_mode"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    return done.stdout.strip().replace("\n", " | ")
