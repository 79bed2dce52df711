"""Compile Triton kernels for GPUs that this machine does not have, and inspect the result.

with compile_well(90, ["attention_forward"]) as reports:  # kernels are specialised as in a real launch
    TritonAttention().forward(q, ...)  # q etc. on device="meta": any size, no memory, nothing runs
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGETS = (80, 90)  # A100, H100
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # most shared memory per program (CUDA C++ guide, compute capabilities)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Report:
    """One compiled kernel. spill_bytes: local memory per thread, for values that do not fit in registers."""

    kernel: str
    target: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_hmma: int  # tensor-core instructions of sm_80; sm_90 uses them for small tiles or float32
    num_hgmma: int  # warpgroup tensor-core instructions of sm_90
    num_wide_loads: int  # loads of 128 bits per thread from global memory
    num_wide_stores: int
    narrow_products: tuple[tuple[str, str], ...]  # pairs of variables that are multiplied in 32 bits


# Products that may be computed in 32 bits: {kernel: names of one factor}. They are indices of programs, or of elements in a
# chunk's tables. A table has 4 numbers per row and piece of the vocabulary; a chunk has at most 16384 rows.
SMALL_TABLES = {
    "row_partials": {"num_rows"},
    "finish_rows": {"stride"},
    "join_pieces": {"stride"},
    "gradient_rows": {"rows_of_program"},
    "matrix_gradients": {"num_in_tiles"},
}
ATTENTION = ["attention_forward", "attention_query_gradient", "attention_key_gradients"]
# Bytes of spilled registers that are allowed per thread. ptxas puts one double of exact_exp on the stack, although only 40
# registers are in use. Attention spills a few addresses while its sums fill 255 registers; smaller tiles would not spill, but
# read more memory.
ALLOWED_SPILLS = {"row_gradients": 8, "prepare_rows": 8, **dict.fromkeys(ATTENTION, 96)}
# Kernels that multiply 16-bit (or tf32) tiles on tensor cores. All others use none.
PRODUCTS = {"rows_times_matrices", "matrix_gradients", "decode_split", *ATTENTION}


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of any size that needs no device and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return floats(*shape, dtype=torch.int64)


@contextmanager
def compiled_launches(target: int) -> Iterator[list[Report]]:
    """Inside the block, compile launched kernels for the target instead of running them; yield the list of their reports."""
    reports: list[Report] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        reports.append(read_report(compiled, target))
        return compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", _AbsentDevice(target))
        patch.setattr(JITFunction, "run", compile_only)
        yield reports


def read_report(compiled: CompiledKernel, target: int) -> Report:
    resources, assembly = disassembled(compiled.asm["cubin"])
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", resources)}
    metadata = compiled.metadata
    return Report(
        kernel=metadata.name,
        target=target,
        registers=used["REG"],
        spill_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=metadata.shared,
        num_hmma=len(re.findall(r"\bHMMA", assembly)),
        num_hgmma=len(re.findall(r"\bHGMMA", assembly)),
        num_wide_loads=len(re.findall(r"\bLDG[.\w]*\.128", assembly)),
        num_wide_stores=len(re.findall(r"\bSTG[.\w]*\.128", assembly)),
        narrow_products=narrow_products(compiled.asm["ttir"]),
    )


def narrow_products(intermediate: str) -> tuple[tuple[str, str], ...]:
    """Return the names of each pair of numbers that a kernel multiplies in 32 bits.

    Such a product may overflow: a row's index times the row stride can exceed 2^31. Pairs with a
    number made only of constants and ranges are left out.
    """
    values = {}
    for line in intermediate.splitlines():
        if found := re.match(r"\s*%([\w-]+)(?::\d+)? = ([\w.]+)(.*)", line):
            name, operation, rest = found.groups()
            values[name] = operation, re.findall(r"%([\w-]+)", rest.split(" : ")[0]), rest

    @cache
    def is_constant(name: str) -> bool:
        operation, operands, _ = values.get(name, ("", [], ""))
        if operation in ("arith.remsi", "arith.remui"):
            return is_constant(operands[1])
        computes = operation.startswith(
            ("arith.", "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans")
        )
        return operation in ("arith.constant", "tt.make_range") or (
            computes and bool(operands) and all(map(is_constant, operands))
        )

    def source(name: str) -> str:
        while name in values and values[name][0] in ("tt.splat", "tt.expand_dims", "tt.broadcast"):
            name = values[name][1][0]
        return re.sub(r"_\d+$", "", name)

    products = [
        (operands[0], operands[1])
        for operation, operands, rest in values.values()
        if operation == "arith.muli" and re.search(r" : (tensor<[\dx]+x)?i32\b", rest)
    ]
    return tuple((source(a), source(b)) for a, b in products if not is_constant(a) and not is_constant(b))


@contextmanager
def compile_well(target: int, kernels: list[str], *, is_wide: bool = False) -> Iterator[list[Report]]:
    """Check that exactly these kernels are launched in the block.

    Each must fit the GPU, use its tensor cores where expected, and address more than 2^31 elements. is_wide: each must also load
    and store 128 bits at a time.
    """
    with compiled_launches(target) as reports:
        yield reports
    names = [report.kernel for report in reports]
    assert names == kernels, names
    for report in reports:
        assert report.spill_bytes <= ALLOWED_SPILLS.get(report.kernel, 0), f"spills: {report}"
        small = SMALL_TABLES.get(report.kernel, set())
        narrow = [pair for pair in report.narrow_products if not small & set(pair)]
        assert not narrow, f"{report.kernel} multiplies in 32 bits, beyond 2^31 for large tensors: {narrow}"
        assert report.shared_bytes <= SHARED_BYTES[target], f"too much shared memory: {report}"
        has_products = report.kernel in PRODUCTS
        assert (report.num_hmma + report.num_hgmma > 0) == has_products, f"tensor cores: {report}"
        # Two query heads per key head fill a tile of 16 rows, too few for a warpgroup.
        if target >= 90 and has_products and report.kernel != "decode_split":
            assert report.num_hgmma > 0, f"no warpgroup instruction: {report}"
        assert not is_wide or (report.num_wide_loads and report.num_wide_stores), report


@functools.cache  # ops launch a kernel repeatedly, and the disassembler can take as long as the compiler
def disassembled(cubin: bytes) -> tuple[str, str]:
    """Return (resources of the kernel, its instructions)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        # -ndf skips the analysis of branch targets, which takes a quarter of the time.
        return _output_of("cuobjdump", "-res-usage", path), _output_of("nvdisasm", "-c", "-ndf", path)


def _output_of(tool: str, *arguments: Any) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


class _AbsentDevice:
    """The part of a GPU's driver that Triton needs to compile a launch.

    The device number is `target`, so that each target has its own cache.
    """

    def __init__(self, target: int) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return self.target

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")
