"""Check that a run or engine can use its device. An installed GPU that PyTorch cannot see is an error: no fallback to the CPU."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path
from typing import Literal

Device = Literal["auto", "cuda", "cpu"]

KERNEL_MODULE = Path("/proc/driver/nvidia/version")  # Also exists in containers, even in those without a GPU.
CUDA_SET = "13.0"  # The CUDA version of constraints/cuda.txt.
OLDEST_DRIVER = {12: 525, 13: 580}  # CUDA major version -> driver: docs.nvidia.com/deploy/cuda-compatibility, table 1.


def driver_version() -> str | None:
    """Return the NVIDIA driver's version, such as 580.65.06; None if neither the kernel nor nvidia-smi reports one."""
    try:
        report = KERNEL_MODULE.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            report = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    version = re.search(r"\d+\.\d[\d.]*", report)
    return version.group() if version else None


def why_not_device(requested: Device = "auto") -> str | None:
    """Return why PyTorch cannot compute on the requested device; None if it can.

    requested: auto means the CPU only if no GPU is available (no driver, or an empty CUDA_VISIBLE_DEVICES). If PyTorch sees
        no GPU, MARSRL_DEVICE=cpu overrides any value with cpu.
    """
    import torch

    if torch.cuda.is_available():
        if requested != "cpu":
            return None
        return "the CPU is requested, but PyTorch sees a GPU and would use it; hide it with CUDA_VISIBLE_DEVICES=-1"
    device = "cpu" if os.environ.get("MARSRL_DEVICE") == "cpu" else requested
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
            f"PyTorch {torch.__version__} is a CPU build (`MARSRL_DEVICE=cuda make install` installs the CUDA build)"
        )
    cuda = build or CUDA_SET
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0)
    if not has_driver:
        reasons.append("no NVIDIA driver is found (in a container, pass the GPUs: docker run --gpus all)")
    elif version is not None and int(version.partition(".")[0]) < oldest:
        reasons.append(f"the NVIDIA driver is {version}, but CUDA {cuda} needs {oldest} or newer")
    if not reasons:
        reasons.append(_torch_error())
    driver = f"an NVIDIA driver{f' ({version})' if version else ''} is installed, but " if has_driver else ""
    return f"{driver}PyTorch sees no GPU: {'; '.join(reasons)}. To use the CPU, set MARSRL_DEVICE=cpu or run.device=cpu"


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _torch_error() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "torch.cuda.is_available() is False"
