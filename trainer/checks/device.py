"""Reasons why a run or engine cannot have its device. A GPU that PyTorch does not see is an error: nothing falls back."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

Device = Literal["auto", "cuda", "cpu"]

KERNEL_MODULE = Path("/proc/driver/nvidia/version")  # exists in containers too, even in those without a GPU


def driver_version() -> str | None:
    """Version of the NVIDIA driver, such as 580.65.06; None if nvidia-smi reports none."""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.partition("\n")[0] or None


def why_not_device(asked: Device = "auto") -> str | None:
    """Reason why PyTorch cannot compute on the device asked for; None: it can.

    asked: auto is the CPU only if no GPU is available: without a driver, or with an empty CUDA_VISIBLE_DEVICES. If
        PyTorch sees no GPU, MARSRL_DEVICE=cpu overrides any value with cpu.
    """
    import torch

    if torch.cuda.is_available():
        if asked != "cpu":
            return None
        return "the CPU is asked for, and PyTorch sees a GPU, which it would use: hide it, CUDA_VISIBLE_DEVICES=-1"
    device = "cpu" if os.environ.get("MARSRL_DEVICE") == "cpu" else asked
    are_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    version, build = driver_version(), torch.version.cuda
    has_driver = version is not None or (build is not None and KERNEL_MODULE.exists())
    if device == "cpu" or (device == "auto" and (are_hidden or not has_driver)):
        return None
    reasons = []
    if are_hidden:
        reasons.append("CUDA_VISIBLE_DEVICES hides every GPU")
    if build is None:
        reasons.append(
            f"PyTorch {torch.__version__} is a build for CPUs (`MARSRL_DEVICE=cuda make install` replaces it by that for CUDA)"
        )
    if not has_driver:
        reasons.append("no NVIDIA driver is found; a container gets it with its GPUs (docker run --gpus all)")
    if not reasons:
        try:
            torch.cuda.init()
            reasons.append("torch.cuda.is_available() is False")
        except (RuntimeError, AssertionError) as error:
            reasons.append(str(error).partition("\n")[0])
    driver = f"an NVIDIA driver{f' ({version})' if version else ''} is here, and " if has_driver else ""
    return f"{driver}PyTorch sees no GPU: {'; '.join(reasons)}. If the CPU is meant, set MARSRL_DEVICE=cpu or run.device=cpu"
