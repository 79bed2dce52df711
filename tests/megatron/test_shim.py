"""The shim's patches hold beside those of other libraries in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from marsrl.trainer.learner.megatron import shim

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


def test_what_is_asked_of_a_gpu_is_made_on_the_cpu_and_the_rest_of_torch_is_as_it_was() -> None:
    shim.install()
    gpu = torch.device("cuda", 0)
    made = [
        torch.tensor([1], device="cuda"),
        torch.zeros(2, device=gpu),
        torch.empty_like(torch.ones(2), device="cuda"),
    ]
    made += [torch.ones(2).to("cuda"), torch.ones(2).to(device=gpu), torch.ones(2).to("cuda", torch.int32)]
    assert [str(each.device) for each in made] == ["cpu"] * 6 and made[-1].dtype == torch.int32
    weight = torch.nn.Parameter(torch.ones(2))
    assert weight.cuda() is weight and weight.type() == "torch.FloatTensor"  # "torch.cuda." is for megatron's optimizer
    assert not torch.empty(2, pin_memory=True).is_pinned()
    with torch.device("meta"):
        assert torch.zeros(2).is_meta and torch.tensor([1]).is_meta
    assert torch.equal(torch.jit.script(like)(weight), torch.zeros(2))


def like(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)
