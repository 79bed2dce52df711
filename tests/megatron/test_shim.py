"""The shim's patches hold beside those of other libraries in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# vLLM replaces torch.cuda.Stream at import, after the shim and before the first mixture of experts is built.
TRAIN_BESIDE_VLLM = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from marsrl.trainer.learner.megatron import shim

shim.install()
import vllm.v1.worker.cpu.shm
from megatron_models import learner, micro_batches, save_model, sequences, step

policy = learner(save_model("qwen3_moe", Path(sys.argv[2])))
stats = step(policy, micro_batches(sequences(4), 2))
print("gradient norm", stats.grad_norm)
"""


@pytest.mark.slow
def test_a_mixture_of_experts_trains_where_vllm_was_imported(tmp_path: Path) -> None:
    words = [sys.executable, "-c", TRAIN_BESIDE_VLLM, str(Path(__file__).parent), str(tmp_path / "m")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split("gradient norm")[1]) > 0
    assert "CPU RNG state changed" not in done.stderr  # of the one generator that there is; a user could not act on it
