"""FP8 weights that go straight into vLLM's layers of an H100 equal, byte for byte, those that vLLM's own code rounds.

fp8_worker.py builds and loads these layers without an H100. 60 s of CPU, in three processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import save_model

from marsrl.rollout.engines.protocol import EngineInfo
from marsrl.rollout.engines.vllm.worker_fp8 import quantised
from marsrl.trainer.weights.sync import DirectSync

ROOT = Path(__file__).resolve().parents[2]
CASES = ["moe", "dense", "moe+spread"]
SHARDS = [("0 of 1", case) for case in CASES[:2]] + [(f"{rank} of 2", case) for rank in (0, 1) for case in CASES]
SIZES: dict[str, Any] = {  # not multiples of a block: the rows of q, k and v, an expert's width, and half of that width
    "vocab_size": 160, "hidden_size": 128, "head_dim": 40, "intermediate_size": 320, "tie_word_embeddings": False,
    "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the findings of fp8_worker.py by shard and case: an engine of one GPU, and both halves of an engine of two GPUs."""
    folder, environment = tmp_path_factory.mktemp("fp8"), dict(os.environ)
    for number, suffix in enumerate(("", "_changed")):
        save_model("qwen3", folder / f"dense{suffix}", seed=number, **SIZES)
        save_model("qwen3_moe", folder / f"moe{suffix}", seed=number, num_experts=4, moe_intermediate_size=96, **SIZES)
    environment["TORCHDYNAMO_DISABLE"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(
        [*(str(ROOT / "tests" / each) for each in ("engines", "megatron", "plan")), environment.get("PYTHONPATH", "")]
    )
    results = {}
    for world in (1, 2):
        command = [sys.executable, "-W", "ignore", str(ROOT / "tests/engines/fp8_worker.py"), str(folder)]
        workers = [
            subprocess.Popen(
                [*command, str(rank), str(world), *CASES[: 1 + world]],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(world)
        ]  # fmt: skip
        for rank, worker in enumerate(workers):
            out, errors = worker.communicate()
            assert worker.returncode == 0, errors[-3000:]
            results[f"{rank} of {world}"] = json.loads(out.splitlines()[-1])
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "case"), SHARDS)
def test_sent_fp8_weights_equal_those_that_vllm_rounds(findings: dict[str, Any], shard: str, case: str) -> None:
    results = findings[shard][case]
    assert {f"Fp8PerBlockOnline{kind}Method" for kind in ("Linear", "MoE")[: 1 + case.startswith("moe")]} <= {
        *results["kernels"]
    }
    assert sum(name.endswith("_scale_inv") for name in results["changed"]) == 8  # two layers of four matrices or stacks
    # [differing bytes, differing checksums].
    assert [results[publish] for publish in ("0 nccl", "1 ipc", "2 nccl")] == [[[], []]] * 3
    assert results["moved"] == [] and results["why"] == ""  # captured graphs read the same memory


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "case"), SHARDS)
def test_every_sent_fp8_weight_and_scale_is_checked(findings: dict[str, Any], shard: str, case: str) -> None:
    flips = findings[shard][case]["flips"]
    assert len(flips) == 16
    # Checksums of the sent tensors change.
    assert flips == {name: [name.removesuffix("_scale_inv").replace(".routed_experts", "")] for name in flips}


@pytest.mark.slow
def test_kernels_that_change_the_weights_form_are_named(findings: dict[str, Any]) -> None:
    reasons = findings["0 of 1"]["moe"]["reasons"]
    linear, experts = "CutlassFp8BlockScaledMMKernel", "FLASHINFER_CUTLASS"
    for change, kernel in {"transpose": linear, "reverse_scales": linear, "swap": experts, "packed": linear}.items():
        assert reasons[change].startswith(f"vLLM's FP8 kernel {kernel} holds weights in a form of its own"), change
        assert reasons[change].endswith("or set rollout.vllm.quantization=null")


def test_an_engine_that_cannot_receive_weights_is_refused() -> None:
    class Engines:
        pool: Any

        def infos(self) -> list[EngineInfo]:
            return [
                EngineInfo("vllm", "LLM", "vllm", "0", "cuda", "bfloat16", why_no_receive=why) for why in ("", "packed")
            ]

    engines: Any = Engines()
    engines.pool = engines
    with pytest.raises(ValueError, match="sync.backend=nccl: engine 1 cannot receive weights: packed"):
        DirectSync(engines, torch.bfloat16, "nccl")


@pytest.mark.parametrize("shape", [(3, 200, 300), (5, 128, 256), (700, 130), (1, 384, 128)])
def test_strips_are_rounded_as_a_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    right = quantised(weight)
    monkeypatch.setattr("marsrl.rollout.engines.vllm.worker_fp8._AT_ONCE", 1)
    for whole, found in zip(right, quantised(weight), strict=True):
        assert whole.shape == found.shape and torch.equal(whole.view(torch.uint8), found.view(torch.uint8))
