"""The CUDA set's Triton interprets every op once, and compiles the head's kernels for an H100.

`make test-triton` runs all tests, and compiles all kernels for both GPUs. `make test-all` downloads that Triton to build/.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "import sys, pytest, triton; assert triton.__version__ == sys.argv[1]; sys.exit(pytest.main(sys.argv[2:]))"


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests, chosen",
    [
        ("interpreter/test_every_op.py", "despite_defaults"),  # every op, forward and backward, in one memory layout
        ("test_fused_head_ahead_of_time.py", "not 80"),
    ],
)
def test_kernels_work_with_the_triton_of_the_cuda_set(tests: str, chosen: str) -> None:
    (other,) = re.findall(r"^triton==(\S+)", (ROOT / "constraints/cuda.txt").read_text(), re.MULTILINE)
    if other == version("triton"):
        pytest.skip(f"Triton {other} is the one that all tests run with here")
    folder = ROOT / f"build/triton-{other}"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: make build/triton-{other}")
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "TRITON_INTERPRET": "1" if tests.startswith("interpreter") else "0",
    }
    # Our replacement for parts of Megatron, which other tests of this process import, has set it.
    environment.pop("TORCHDYNAMO_DISABLE", None)
    words = [sys.executable, "-c", SCRIPT, other, f"tests/kernels/{tests}", "-q", "-k", chosen]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
