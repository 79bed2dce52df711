"""Reasons why a run or engine cannot have its device. A GPU that PyTorch does not see is an error: nothing falls back."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path
from typing import Literal

Device = Literal["auto", "cuda", "cpu"]

KERNEL_MODULE = Path("/proc/driver/nvidia/version")  # exists in containers too, even in those without a GPU
CUDA_SET = "13.0"  # of constraints/cuda.txt
OLDEST_DRIVER = {12: 525, 13: 580}  # by CUDA's major version: docs.nvidia.com/deploy/cuda-compatibility, table 1


def driver_version() -> str | None:
    """Version of the NVIDIA driver, such as 580.65.06; None if neither the kernel nor nvidia-smi reports one."""
    try:
        said = KERNEL_MODULE.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    found = re.search(r"\d+\.\d[\d.]*", said)
    return found.group() if found else None


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
    has_driver = _has_libcuda() or (version is not None and (build is not None or not KERNEL_MODULE.exists()))
    if device == "cpu" or (device == "auto" and (are_hidden or not has_driver)):
        return None
    reasons = []
    if are_hidden:
        reasons.append("CUDA_VISIBLE_DEVICES hides every GPU")
    if build is None:
        reasons.append(
            f"PyTorch {torch.__version__} is a build for CPUs (`MARSRL_DEVICE=cuda make install` replaces it by that for CUDA)"
        )
    cuda = build or CUDA_SET
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0)
    if not has_driver:
        reasons.append("no NVIDIA driver is found; a container gets it with its GPUs (docker run --gpus all)")
    elif version is not None and int(version.partition(".")[0]) < oldest:
        reasons.append(f"the NVIDIA driver is {version}, and CUDA {cuda} needs {oldest} or newer")
    if not reasons:
        reasons.append(_words_of_torch())
    driver = f"an NVIDIA driver{f' ({version})' if version else ''} is here, and " if has_driver else ""
    return f"{driver}PyTorch sees no GPU: {'; '.join(reasons)}. If the CPU is meant, set MARSRL_DEVICE=cpu or run.device=cpu"


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _words_of_torch() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "torch.cuda.is_available() is False"
