"""The trainer's log-probs are the engine's, for the same weights: before a sync, after one, for every kind of parameter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from marsrl.kernels import PolicyObjective
from marsrl.rollout.config import RolloutConfig, VllmOptions
from marsrl.rollout.pool.build import make_pool
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.ray_connection import RayCluster
from marsrl.trainer.config import MptConfig, PolicyConfig
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.weights.checked_engines import CheckedEngines
from marsrl.trainer.weights.comparison import comparison_sequences, trainer_scores
from marsrl.trainer.weights.file_channel import FileChannel

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5  # nats

GROUPS = {
    "qwen3moe": ("embedding", "linear_qkv", "linear_proj", "q_layernorm", "k_layernorm", "input_layernorm",
                 "pre_mlp_layernorm", "router", "experts", "final_layernorm", "output_layer"),
    "qwen2": ("embedding", "linear_qkv.weight", "linear_qkv.bias", "linear_proj", "mlp.linear_fc1", "mlp.linear_fc2",
              "final_layernorm", "output_layer"),
}  # fmt: skip


def write_model(kind: str, folder: Path) -> Path:
    """A random model of the kind, hidden 64, made by transformers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "initializer_range": 0.08,
    }  # fmt: skip
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(intermediate_size=96, **common))
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(head_dim=32, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, **common)
        )
    with torch.no_grad():
        for _, parameter in model.named_parameters():  # norms of exactly 1 and biases of 0 would hide a lost tensor
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Ray, which pools that ask for a cluster of their own then share."""
    ray = RayCluster(address=None, timeout_s=60, object_store_mib=80)
    yield ray
    ray.close()


@pytest.fixture(params=["qwen3moe", "qwen2"])
def parts(
    request: pytest.FixtureRequest, tmp_path: Path, cluster: RayCluster
) -> Iterator[tuple[str, Learner, FileChannel, EnginePool]]:
    model_dir = write_model(request.param, tmp_path / request.param)
    learner = Learner(
        PolicyConfig(dtype="float32"),
        model_dir,
        objective=PolicyObjective(),
        mpt=MptConfig(scope="off"),
        num_agents=1,
        total_steps=1,
        seed=0,
    )
    # in an actor: a process of its own, as vLLM cannot load a MoE model after a dense one
    config = RolloutConfig(threads=1, object_store_mib=80, vllm=VllmOptions(max_num_seqs=8, kv_cache_mib=32))
    pool = make_pool("main", str(model_dir), config, dtype="float32", max_model_len=256)
    channel = FileChannel(CheckedEngines(pool, vocab_size=128), torch.float32)
    yield request.param, learner, channel, pool
    channel.close()
    pool.close()
    learner.close()


def median_difference(learner: Learner, pool: EnginePool) -> float:
    engine = pool.score(comparison_sequences(learner.vocab_size))[0]
    trainer = trainer_scores(learner, torch.float32).logprobs
    return float(np.median(np.abs(np.concatenate(trainer) - np.concatenate(engine))))


def test_log_probs_agree_before_and_after_every_sync(parts: tuple[str, Learner, FileChannel, EnginePool]) -> None:
    kind, learner, channel, pool = parts
    assert median_difference(learner, pool) < TOLERANCE
    for version, group in enumerate(GROUPS[kind], start=1):
        changed = 0
        torch.manual_seed(version)
        with torch.no_grad():
            for name, parameter in learner._model.named_parameters():
                if group in name:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
                    changed += 1
        assert changed, f"{kind} has no parameter called {group}"
        assert median_difference(learner, pool) > 1e-3, f"{group}: the probe does not see it"
        report = channel.publish(learner, version)
        assert report is not None and report.comparison is not None
        assert report.comparison.median < TOLERANCE, group
        assert report.comparison.num_tokens == 640
