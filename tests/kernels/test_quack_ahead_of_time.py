"""CuTe DSL compiles, for Hopper, the matrix product that QuACK computes for the head; needs no GPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from ahead_of_time import disassembled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("quack") is None, reason="quack is not installed; constraints/cuda.txt has it"),
]
# Compiles the product for 4,224 rows of Qwen3's head. The DSL asks a GPU only for its number of active clusters, which the class
# Hopper returns here.
COMPILE = """
import cutlass.utils, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from quack.epilogue.frontend import EpiMod

class Hopper:
    def __init__(self, *_): pass
    def get_max_active_clusters(self, cluster_size): return 132 // cluster_size

cutlass.utils.HardwareInfo = Hopper
gemm = EpiMod.gemm
EpiMod.gemm = lambda self, *tensors, **words: gemm(self, *tensors, **words, _launch=False)
from marsrl.kernels.linear_policy_loss.quack_head import gemms

with FakeTensorMode():
    def new(*shape, dtype=torch.float32): return torch.empty(*shape, dtype=dtype, device="cuda")
    rows, columns, size, bf16 = 4224, 151936, 2048, torch.bfloat16
    hidden, weight = new(rows, size, dtype=bf16), new(columns, size, dtype=bf16)
    out, parts = new(rows, columns, dtype=bf16), [new(rows, columns // gemms.TILE) for _ in range(2)]
    gemms.exponentials(hidden, weight, new(rows), new(rows), new(rows, dtype=torch.int64), out, *parts, new(rows))
"""


def test_the_product_compiles_without_spills(tmp_path):
    hopper = {"CUTE_DSL_ARCH": "sm_90a", "QUACK_ARCH": "90", "QUACK_CACHE_ENABLED": "0"}
    kept = {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILE], env={**os.environ, **hopper, **kept}, check=True)
    (cubin,) = tmp_path.glob("*.cubin")
    resources, assembly = disassembled(cubin.read_bytes())
    used = {name: int(value) for name, value in re.findall(r"\b(STACK|LOCAL):(\d+)", resources)}
    assert used == {"STACK": 0, "LOCAL": 0}
    assert "HGMMA" in assembly and "USETMAXREG" in assembly  # warps with different numbers of registers
