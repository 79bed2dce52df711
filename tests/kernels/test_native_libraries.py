"""The built libraries: what they export, what they need, and what a machine without a driver is told."""

import re
import shutil
import subprocess

import pytest
import torch
from ahead_of_time import TOOLS

from marsrl.kernels import cuda_library, library, linear_logprob
from marsrl.kernels.dispatch import explain

CPU, CUDA = library.FOLDER / "marsrl_cpu.so", library.FOLDER / "marsrl_cuda.so"
needs_cuda_library = pytest.mark.skipif(
    not CUDA.exists() and shutil.which("nvcc") is None, reason="no nvcc here, so no marsrl_cuda.so was built"
)


@pytest.mark.parametrize("path", [CPU, pytest.param(CUDA, marks=needs_cuda_library)], ids=lambda path: path.name)
def test_only_our_functions_are_exported_and_all_that_python_calls(path):
    lines = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in lines.splitlines()}
    called = library._CPU_FUNCTIONS if path == CPU else cuda_library._CUDA_FUNCTIONS
    assert exported == {*called, "marsrl_abi_version"}


@needs_cuda_library
def test_the_cuda_library_needs_neither_toolkit_nor_torch():
    needed = subprocess.run(["readelf", "-d", CUDA], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"NEEDED.*(cuda|torch|python)", needed)


@needs_cuda_library
def test_a_library_of_another_version_is_refused_on_either_side(monkeypatch):
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    for path, functions in ((CPU, library._CPU_FUNCTIONS), (CUDA, cuda_library._CUDA_FUNCTIONS)):
        assert "build it again" in library.open_library(path, functions)


@needs_cuda_library
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a driver")
def test_without_a_driver_the_library_loads_and_says_what_lacks(monkeypatch):
    cause = r"cudaErrorInsufficientDriver \(35\): .*; install an NVIDIA driver"
    assert cuda_library.cuda_library().marsrl_abi_version() == library.ABI_VERSION
    reasons = {each.op: each.reasons["cuda"] for each in explain() if "cuda" in each.reasons}
    assert set(reasons) == {"linear_logprob", "linear_policy_loss", "policy_loss"}
    assert all(re.search(cause, reason) for reason in reasons.values())
    hidden, weight, targets = torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([1])
    monkeypatch.setenv("MARSRL_KERNELS", "cuda")
    with pytest.raises(RuntimeError, match="MARSRL_KERNELS=cuda cannot serve this call of linear_logprob: .*" + cause):
        linear_logprob(hidden, weight, targets)
    monkeypatch.setattr(cuda_library, "stream_of", lambda tensor: 0)
    monkeypatch.setattr(cuda_library, "_why_no_device", lambda: None)
    monkeypatch.setattr(cuda_library, "_can_read", lambda tensor: True)
    with pytest.raises(RuntimeError, match="csrc/cuda: row_logprobs could not be launched: " + cause):
        linear_logprob(hidden, weight, targets)


# Registers a thread that let two blocks of 512 threads share a multiprocessor: 65536 / 1024.
MAX_REGISTERS = 64


@needs_cuda_library
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_no_cuda_kernel_spills_and_two_blocks_share_a_multiprocessor(target):
    output = subprocess.run([TOOLS / "cuobjdump", "-res-usage", CUDA], capture_output=True, text=True, check=True)
    found, arch = {}, ""
    for line in (output.stdout + output.stderr).splitlines():
        if match := re.search(r"arch = (\S+)", line):
            arch = match[1]
        elif match := re.search(r"Function (\S+):", line):
            name = match[1]
        elif (match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line)) and arch == target:
            found[name] = tuple(map(int, match.groups()))
    for kernel in ("row_logprobs", "row_partials", "row_gradients", "policy_terms", "place_kept"):
        assert any(kernel in name for name in found), f"{kernel} is not there for {target}: {sorted(found)}"
    for name, (registers, stack, shared, local) in found.items():
        assert stack == local == 0, f"{name} needs {stack} + {local} bytes of local memory"
        assert registers <= MAX_REGISTERS and shared <= 48 * 1024, f"{name}: {registers} registers, {shared} bytes"
