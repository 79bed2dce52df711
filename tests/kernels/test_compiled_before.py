"""A kernel that one process has compiled is found by the next one: what benchmarks/fill_cache.py counts on."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, triton
from ahead_of_time import compiled_launches
from marsrl.kernels.rms_norm.triton_impl import TritonRmsNorm
found = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))
rows = torch.empty(int(sys.argv[2]), 2048, dtype=torch.bfloat16, device="meta")
with compiled_launches(90):
    TritonRmsNorm().forward(rows, torch.empty(2048, dtype=torch.bfloat16, device="meta"), 1e-6, 0.0)
print(found)
"""


def launch(cache, num_rows):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    words = [sys.executable, "-c", CODE, str(Path(__file__).parent), str(num_rows)]
    return subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def test_a_kernel_of_one_process_is_found_by_the_next(tmp_path):
    assert launch(tmp_path, 4096) == "[('forward_rows', False)]"
    compiled = sorted(tmp_path.rglob("*.cubin"))
    assert launch(tmp_path, 4096 * 16) == "[('forward_rows', True)]"  # other tensors, other rows, the same kernel
    assert sorted(tmp_path.rglob("*.cubin")) == compiled and len(compiled) == 1
