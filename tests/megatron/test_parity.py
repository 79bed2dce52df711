"""Programs that train in processes of their own: `make parity` on a few of its layouts, and a program that imports vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PARITY = Path(__file__).parents[2] / "benchmarks" / "parity.py"


@pytest.mark.slow
def test_four_ranks_train_as_one_and_as_transformers(tmp_path: Path) -> None:
    report = tmp_path / "lines.json"
    layouts = ["dp4, overlapped", "cp2 pp2", "tp2 cp2 ep2", "shared prefixes, ep2 pp2 dp2"]  # in the order of the table
    command = [sys.executable, str(PARITY), "--json", str(report), "--only", *layouts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    lines = json.loads(report.read_text("utf-8"))
    families = [f"as above, a {kind} model" for kind in ("dense", "llama", "mistral")]
    adapters = [f"adapters, {kind}, one rank" for kind in ("moe", "dense")]
    kinds = ("dense", "dense", "moe", "moe")
    of_adapters = [f"adapters, {kind}, {layout}" for kind, layout in zip(kinds, layouts, strict=True)]
    names = ["one rank against transformers", *families, *adapters, *layouts, *of_adapters]
    assert [line["layout"] for line in lines] == names
    assert all(line["is_ok"] for line in lines)
    assert sum(line.endswith("  ok") for line in done.stdout.splitlines()) == len(lines)


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
    # The shim silences this warning of Megatron: a CPU has one random generator, so it changes even where only a GPU's should.
    assert "CPU RNG state changed" not in done.stderr
