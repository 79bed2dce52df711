"""Weights are sent straight from the trainer's shards to the engines', by two gloo ranks to two engines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import direct_worker
import pytest
import torch
from direct_worker import BUCKET
from megatron_models import save_model
from rank_pair import RankPair
from safetensors.torch import load_file, save_file

from marsrl.rollout.weights.layout import EngineShard, fuse

STRIDE = 40  # every 40th number of each tensor changes
CASES: dict[str, tuple[str, dict[str, int], str, str]] = {
    "tp2_ep2_halves": ("qwen3_moe", {"tensor": 2, "expert": 2}, "float32", "float32"),
    "ep2_bfloat16": ("qwen3_moe", {"expert": 2}, "float32", "bfloat16"),
    "pp2_tied": ("qwen3", {"pipeline": 2}, "float32", "float32"),
    "tp2_with_biases": ("qwen2", {"tensor": 2}, "bfloat16", "bfloat16"),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPair) -> tuple[Path, dict[str, Any]]:
    """Run direct_worker; return the folder of tensors that its Halves received, and findings by case."""
    folder = tmp_path_factory.mktemp("direct")
    # With 160, each rank's half of a matrix exceeds a bucket, in bfloat16 too.
    changes = {"qwen2": {"intermediate_size": 160}}
    kinds = {case[0] for case in CASES.values()}
    models = {kind: str(save_model(kind, folder / kind, **changes.get(kind, {}))) for kind in kinds}
    for path in map(Path, models.values()):
        shutil.copytree(path, f"{path}_changed")
        tensors = load_file(path / "model.safetensors")
        for tensor in tensors.values():
            tensor.view(-1)[::STRIDE] *= 1.5
        save_file(tensors, Path(f"{path}_changed") / "model.safetensors", metadata={"format": "pt"})
    cases = {name: (models[kind], *rest) for name, (kind, *rest) in CASES.items()}
    findings = two_ranks.run(Path(direct_worker.__file__), {"folder": str(folder), "cases": cases})
    return folder, findings


@pytest.fixture(params=CASES)
def findings(request: pytest.FixtureRequest, done: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """Findings of direct_worker in one case, by kind of sync: shm (files), nccl, ipc and changes."""
    report: dict[str, Any] = done[1][request.param]
    return report


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_direct_sync_equals_file_sync_and_names_a_changed_bit(findings: dict[str, Any], kind: str) -> None:
    assert findings[kind]["held"] == findings["shm"]["held"]
    assert findings[kind]["held"][0] == findings[kind]["held"][1]
    assert findings["ipc"]["asleep"] == findings["shm"]["asleep"] == findings["shm"]["held"]  # trainer.sleep
    assert findings[kind]["bytes"] == findings["shm"]["bytes"] > 9 * BUCKET
    assert findings[kind]["probe"] == findings["shm"]["probe"]
    name, error = findings[kind]["spoiled"]
    assert "version 9: engine 1 does not hold what was sent: 1 of" in error and f"first {name} (checksum" in error


def test_delta_sync_equals_file_sync_and_resends_after_a_loss(
    findings: dict[str, Any],
) -> None:
    (first, whole, _), (changes, num_bytes, share) = findings["changes"]["first"], findings["changes"]["changes"]
    assert changes == findings["changes"]["files"][0] and changes[0] == changes[1] != first[0]
    assert 1 / STRIDE <= share < 1.2 / STRIDE  # the first number of each tensor changes too
    assert 1.5 / STRIDE < num_bytes / whole < 3 / STRIDE  # a changed number takes 1.5 (float32) or 2 times its size
    assert findings["changes"]["after a loss"] == [changes, whole, None]


@pytest.mark.parametrize("experts", ["cut", "spread"])
@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_tensor_parallel_engine_shards_get_their_halves(
    done: tuple[Path, dict[str, Any]], kind: str, experts: str
) -> None:
    folder, findings = done
    halves = torch.load(folder / f"{kind}_{experts}.pt", weights_only=True)
    tensors = load_file(folder / "qwen3_moe" / "model.safetensors")
    for part, half in enumerate(halves):
        shard = EngineShard.of(part, 2, 2, spreads_experts=experts == "spread")
        expected = dict(fuse(tensors, shard=shard))
        assert half.keys() == expected.keys() and all(torch.equal(half[name], expected[name]) for name in half)
    error = findings["tp2_ep2_halves"]["halves"][f"{kind}_{experts}"]
    assert "version 2: engine 1 does not hold what was sent: 1 of" in error
    assert "first shard 1 of 2: lm_head.weight (checksum" in error
