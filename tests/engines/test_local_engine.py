"""Our own decoder against transformers: about 3 s."""

import numpy as np
import pytest
import torch
from engine_cases import ROUNDING, decoded, perturbed, prompt, request, tensors_of
from safetensors.torch import save_file

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import WeightUpdate, WrongVersion
from marsrl.rollout.types import Finish
from marsrl.rollout.weights.checksum import fused_checksums

KINDS = ["qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "llama", "mistral"]


def engine_of(checkpoint, kind, **options):
    return LocalEngine(checkpoint(kind), dtype="float32", max_model_len=256, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_transformers(kind, checkpoint, judge):
    engine = engine_of(checkpoint, kind)
    asks = [
        request(f"{i // 2}.{i}", prompt(20 + 7 * (i // 2), seed=i // 2), 70, seed=i, temperature=0.7) for i in range(6)
    ]
    results = decoded(engine, asks)
    whole = [np.concatenate([a.token_ids, r.token_ids]) for a, r in zip(asks, results, strict=True)]
    for ask, result, right in zip(asks, results, judge(checkpoint(kind), None, whole, 0.7), strict=True):
        np.testing.assert_allclose(result.logprobs, right[len(ask.token_ids) - 1 :], atol=1e-4, rtol=0)
    for scored, right in zip(engine.score(whole), judge(checkpoint(kind), None, whole), strict=True):
        np.testing.assert_allclose(scored, right, atol=1e-4, rtol=0)
    assert [r.num_cached_tokens for r in results] == [0, 19, 0, 26, 0, 33]  # a group's prompt is computed once


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_depends_on_seed_and_position_alone(kind, checkpoint):
    engine = engine_of(checkpoint, kind)
    asks = [request(f"{i}", prompt(10 + 5 * i, seed=i), 40, seed=i, stop_token_ids=(3, 9)) for i in range(9)]
    together = decoded(engine, asks)
    assert {len(r.token_ids) for r in together} != {40}  # some rows end early: compaction has happened
    narrow = engine_of(checkpoint, kind, max_num_seqs=2)
    for ask, result, other in zip(asks, together, decoded(narrow, asks[::-1])[::-1], strict=True):
        alone = decoded(engine, [ask])[0]
        np.testing.assert_array_equal(alone.token_ids, result.token_ids)
        np.testing.assert_array_equal(other.token_ids, result.token_ids)
        np.testing.assert_allclose(alone.logprobs, result.logprobs, atol=ROUNDING)
        assert (result.finish is Finish.STOP) == (int(result.token_ids[-1]) in (3, 9))


@pytest.mark.parametrize("part", ["self_attn", "mlp.gate.weight", "down_proj", "embed_tokens", "lm_head", "norm"])
def test_an_update_takes_and_reports_what_was_sent(part, checkpoint, judge, tmp_path):
    engine = engine_of(checkpoint, "qwen3_moe")
    new = perturbed(tensors_of(checkpoint("qwen3_moe")), part)
    save_file(new, tmp_path / "w.safetensors")
    receipt = engine.update_weights(WeightUpdate(str(tmp_path / "w.safetensors"), 1))
    assert receipt.version == 1 and dict(receipt.checksums[0]) == fused_checksums(new, torch.float32)
    ask = [prompt(50)]
    np.testing.assert_allclose(engine.score(ask)[0], judge(checkpoint("qwen3_moe"), new, ask)[0], atol=1e-4, rtol=0)
    with pytest.raises(WrongVersion):
        decoded(engine, [request("a", prompt(5), 2)])
