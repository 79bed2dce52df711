"""Trainer and engine compute equal log-probs for equal weights, before and after a sync, for every kind of parameter.

An engine has one process, or two processes with half of the model each; both must end with the process that started them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_cases import actors, after, decoded, descendants, generate, prompt, request, spec_of
from megatron_models import save_model

from marsrl.kernels import PolicyObjective
from marsrl.rollout.config import RolloutConfig, VllmOptions
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.pool.build import make_pool
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.ray_connection import RayCluster
from marsrl.rollout.weights.files import write_shards
from marsrl.rollout.weights.layout import EngineShard
from marsrl.trainer.config import MptConfig, PolicyConfig
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.other_roundings import Precision
from marsrl.trainer.weights.comparison import CheckedEngines, comparison_sequences, trainer_scores
from marsrl.trainer.weights.sync import FileSync

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5  # nats
VOCAB_SIZE = 100  # padded to 128, so the second of two halves has fewer real rows

SIZES = {  # sizes for which vLLM has a kernel
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "moe_intermediate_size": 64,
}  # fmt: skip
GROUPS = {
    "qwen3_moe": ("embedding", "linear_qkv", "linear_proj", "q_layernorm", "k_layernorm", "input_layernorm",
                 "pre_mlp_layernorm", "router", "experts", "final_layernorm", "output_layer"),
    # Qwen2's kinds are included: its biases are linear_qkv.bias.
    "llama": ("embedding", "linear_qkv.weight", "linear_qkv.bias", "linear_proj", "mlp.linear_fc1", "mlp.linear_fc2",
              "final_layernorm", "output_layer"),
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Ray, shared by pools that need a cluster."""
    ray = RayCluster(address=None, timeout_s=600, object_store_mib=80)
    yield ray
    ray.close()


@dataclass(frozen=True)
class Parts:
    """A learner, and engines that it publishes to. kind: kind of the model. vllm: options of the engines."""

    kind: str
    model_dir: Path
    vllm: VllmOptions
    learner: Learner
    sync: FileSync
    folder: Path  # folder with the files of the published versions
    pool: EnginePool


CASES = {
    "qwen3_moe": {},
    # The biases of q, gate and up are split; both ranks hold the single key head.
    "llama in halves": {"tensor_parallel": 2},
    "qwen3_moe spread": {"tensor_parallel": 2, "expert_parallel": True},
}


def median_difference(learner: Learner, pool: EnginePool) -> float:
    engine = pool.score(comparison_sequences(learner.vocab_size))[0]
    trainer = trainer_scores(learner, Precision(torch.float32)).logprobs
    return float(np.median(np.abs(np.concatenate(trainer) - np.concatenate(engine))))


FIRST, *OTHERS = CASES


@pytest.mark.parametrize("case", [pytest.param(FIRST, marks=pytest.mark.smoke), *OTHERS])
def test_log_probs_agree_before_and_after_every_sync(case: str, cluster: RayCluster, tmp_path: Path) -> None:
    kind, versions, is_in_halves = case.split()[0], tmp_path / "versions", bool(CASES[case])
    versions.mkdir()
    model_dir = save_model(kind, tmp_path, vocab_size=VOCAB_SIZE, **SIZES)
    mpt, policy = MptConfig(scope="off"), PolicyConfig(dtype="float32")
    learner = Learner(policy, model_dir, objectives=[PolicyObjective()], mpt=mpt, total_steps=1, seed=0)
    # vLLM runs in an actor's own process, because it cannot load a MoE model after a dense one.
    vllm = VllmOptions(max_num_seqs=8, kv_cache_mib=32, **CASES[case])  # type: ignore[arg-type]
    config = RolloutConfig(threads=1, object_store_mib=80, max_engine_restarts=0, vllm=vllm)
    with make_pool("main", spec_of(model_dir, kind="vllm"), config) as pool:
        sync = FileSync(CheckedEngines(pool, vocab_size=VOCAB_SIZE), torch.float32, directory=versions)
        assert median_difference(learner, pool) < TOLERANCE
        # Change all kinds at once; engines/test_engines.py changes one at a time, and checks that the probe detects each.
        torch.manual_seed(1)
        for group in GROUPS[kind]:
            _change(learner, group)
        assert median_difference(learner, pool) > 1e-3, "the probe does not see the change"
        report = sync.publish(learner, version=1)
        assert report is not None and report.comparison is not None
        assert report.comparison.median < TOLERANCE
        assert report.comparison.num_tokens == 640
        if is_in_halves:
            parts = Parts(kind, model_dir, vllm, learner, sync, versions, pool)
            _draws_as_one_process_does(parts, version=1)
            _names_a_bit_of_the_second_half(parts, version=1)
            _leaves_no_worker(parts, version=1, kills_worker=kind == "llama")
        sync.close()
    parallel.stop()


def _change(learner: Learner, group: str) -> None:
    """Add noise to the parameters of this kind."""
    changed = [parameter for name, parameter in learner.model.named_parameters() if group in name]
    assert changed, f"the model has no parameter called {group}"
    with torch.no_grad():
        for parameter in changed:
            parameter.add_(torch.randn_like(parameter) * 0.05)


def _draws_as_one_process_does(parts: Parts, version: int) -> None:
    """Check that an engine of one process, with the last published weights, draws equal tokens with equal log-probs."""
    info = parts.pool.infos()[0]
    spread = parts.vllm.expert_parallel
    assert info.shards == tuple(EngineShard.of(i, 2, 1, spreads_experts=spread) for i in range(2))
    (folder,) = parts.folder.glob(f"*/version_{version}")
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((parts.model_dir / name).read_bytes())
    one = LocalEngine(spec_of(folder))
    asks = [
        request(f"a.{i}", prompt(20 + 7 * i, i, VOCAB_SIZE), 24, seed=i, temperature=0.3 * i, records_kept=i > 2)
        for i in range(6)
    ]
    found, right = generate(parts.pool, asks, version=version), decoded(one, asks, 0)
    for mine, other in zip(found, right, strict=True):
        np.testing.assert_array_equal(mine.token_ids, other.token_ids)
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=TOLERANCE, rtol=0)
        assert (mine.kept_tokens is None) == (other.kept_tokens is None)


def _names_a_bit_of_the_second_half(parts: Parts, version: int) -> None:
    """Change a bit of a tensor after its checksum and before it is written; check that the error names the tensor."""
    moe = parts.kind == "qwen3_moe"
    last = "model.layers.1.mlp.experts.3.down_proj.weight" if moe else "model.layers.1.mlp.down_proj.weight"
    fused = "model.layers.1.mlp.experts.w2_weight" if moe else last
    for name, named in ((last, fused), ("lm_head.weight", "lm_head.weight")):

        def spoiled(folder: Path, tensors: Any, name: str = name) -> int:
            changed = dict(tensors)
            changed[name] = changed[name].clone()
            changed[name].view(-1)[-1:].view(torch.uint8)[0] ^= 1
            return write_shards(folder, changed.items())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("marsrl.rollout.weights.files.write_shards", spoiled)
            said = rf"engine 0 does not hold what was sent: 1 of \d+ tensors differ, first shard 1 of 2: {named} \("
            with pytest.raises(RuntimeError, match=said):
                parts.sync.publish(parts.learner, version)
    parts.sync.publish(parts.learner, version)


def _leaves_no_worker(parts: Parts, version: int, *, kills_worker: bool) -> None:
    """Check that if one of the engine's processes is killed during decoding, the engine is lost and all its processes end."""
    actor = actors()[-1]
    workers = [child for child in descendants(actor) if child.name().startswith("VLLM::Worker")]
    assert len(workers) == 2
    asks = [request(f"k.{i}", prompt(10, i, VOCAB_SIZE), 200, seed=i) for i in range(64)]
    before = parts.pool.num_decoded()
    victim = workers[1] if kills_worker else actor
    killer: threading.Thread = after(lambda: parts.pool.num_decoded() > before, victim.kill)
    reason = "a GPU's worker process has ended" if kills_worker else "its process has died"
    with pytest.raises(RuntimeError, match=rf"engine 0 is lost \(.*{reason}"):
        generate(parts.pool, asks, version=version)
        killer.join()
        # Needed if the first call ended before the kill, as on a slow machine.
        generate(parts.pool, asks, version=version)
    killer.join()
    end = time.monotonic() + 600
    while not all(_has_ended(worker) for worker in workers):
        assert time.monotonic() < end, workers
        time.sleep(0.1)


def _has_ended(process: psutil.Process) -> bool:
    """Return True if the process has ended or is a zombie: vLLM does not reap workers that it killed."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
