"""The real vLLM in float32: about 60 s on one core, most of it its import and start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import GivenLearner, assert_drawn_from, decoded, perturbed, pool_of, prompt, request, tensors_of

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import Sampling, WeightUpdate
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.types import Finish
from marsrl.trainer.learner.other_roundings import Precision
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import FileSync

OWN = "qwen3+engine"  # vLLM's own sampler
GROUPS = {
    "qwen2": ("q_proj.bias", "self_attn", "mlp.gate_proj", "embed_tokens", "norm"),
    "qwen3": ("self_attn", "mlp.down_proj", "embed_tokens", "lm_head", "model.norm", "q_norm"),
    "qwen3_tied": ("embed_tokens",),
    "qwen3_moe": (
        "self_attn",
        "mlp.gate.weight",
        "gate_proj",
        "up_proj",
        "down_proj",
        "embed_tokens",
        "lm_head",
        "norm",
    ),
    "llama": ("k_proj.bias", "o_proj.bias", "gate_proj.bias", "down_proj.bias", "lm_head", "self_attn"),
    "mistral": ("self_attn", "mlp"),
}


def publish(engine, tensors, judge, directory, version, precision=None):
    settings = read_shape(directory).settings()
    engines = CheckedEngines(pool_of(engine), vocab_size=160, settings=settings)
    sync = FileSync(engines, torch.float32, precision=precision)
    learner = GivenLearner(tensors, lambda: judge.scores(directory, tensors, precision))
    try:
        return sync.publish(learner, version)
    finally:
        sync.close()


@pytest.mark.parametrize("kind", GROUPS)
def test_logprobs_follow_an_update_of_each_parameter_group(kind, vllm_engine, checkpoint, judge):
    """One after the other, each beside the old weights of all the others; decoding, and scoring given tokens."""
    engine, old = vllm_engine(kind), tensors_of(checkpoint(kind))
    probe = [prompt(97, seed=5)]
    before = judge(checkpoint(kind), None, probe)[0]
    for version, part in enumerate(GROUPS[kind], start=1):
        new = perturbed(old, part)
        after = judge(checkpoint(kind), new, probe)[0]
        assert np.abs(before - after).max() > 1e-2, part  # the change shows, so a missed one would
        report = publish(engine, new, judge, checkpoint(kind), version)
        np.testing.assert_allclose(engine.score(probe)[0], after, atol=1e-4, rtol=0, err_msg=part)
        asks = [request(f"a.{i}", prompt(20 + 7 * i, seed=i), 24, seed=i, temperature=0.7) for i in range(4)]
        for ask, result in zip(asks, decoded(engine, asks, version=version), strict=True):
            assert len(result.token_ids) == 24 and result.finish is Finish.LENGTH
            assert_drawn_from(judge.model(checkpoint(kind), new), ask, result)
        assert report.comparison is not None and report.comparison.median < 1e-5, part
    publish(engine, old, judge, checkpoint(kind), 0)


@pytest.mark.parametrize("kind", ["qwen3", OWN])
def test_a_teacher_scores_samples_of_several_lengths_and_equal_ones(kind, vllm_engine, checkpoint, judge):
    directory = checkpoint(kind.partition("+")[0])
    engine = vllm_engine(kind)
    engine.update_weights(WeightUpdate(str(directory), 0))
    samples = [prompt(97, seed=5), prompt(30, seed=6), prompt(97, seed=5), prompt(2, seed=7)]
    for _ in range(2):  # also where their prefixes are cached
        for found, right in zip(engine.score(samples, is_probe=False), judge(directory, None, samples), strict=True):
            np.testing.assert_allclose(found, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama", "mistral"])
def test_vllm_says_with_which_settings_its_layers_compute(kind, vllm_engine, checkpoint):
    engine, settings = vllm_engine(kind), read_shape(checkpoint(kind)).settings()
    assert ("experts_per_token" in settings) == (kind == "qwen3_moe")
    assert engine.info().settings == {name: (float(value),) for name, value in settings.items()}


@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_the_same_requests_give_the_same_bits_and_a_prefix_is_computed_once_until_it_is_forgotten(kind, vllm_engine):
    engine = vllm_engine(kind)
    asks = [request(f"{i // 4}.{i}", prompt(70, seed=i // 4), 20, seed=i) for i in range(48)]  # more than max_num_seqs
    engine.forget_prefixes()
    first = decoded(engine, asks)
    assert decoded(engine, asks[:1])[0].num_cached_tokens >= 64
    engine.forget_prefixes()
    assert decoded(engine, asks[:1])[0].num_cached_tokens == 0
    engine.forget_prefixes()
    second = decoded(engine, asks)
    assert len({r.token_ids.tobytes() for r in first}) == 48
    for one, two in zip(first, second, strict=True):
        assert one.token_ids.tobytes() == two.token_ids.tobytes() and one.logprobs.tobytes() == two.logprobs.tobytes()


@pytest.mark.parametrize("kind", ["qwen3"])
def test_a_seed_draws_the_same_tokens_as_in_the_local_engine(kind, vllm_engine, checkpoint):
    """Whatever else is in the batch, and wherever prefills are cut."""
    engine = vllm_engine(kind)
    asks = [
        request(
            f"{i}",
            prompt(100 + 28 * i, seed=i),
            12,
            seed=2**62 + i,
            temperature=0.5 + 0.1 * i,
            top_p=1 - 0.04 * i,
            records_kept=i > 1,
        )
        for i in range(6)
    ]
    local = decoded(LocalEngine(checkpoint(kind), dtype="float32", max_model_len=256), asks)
    alone = [decoded(engine, [ask])[0] for ask in asks]
    for expected, found, single in zip(local, decoded(engine, asks), alone, strict=True):
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_array_equal(single.token_ids, expected.token_ids)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
        for each in (found, single):
            assert (each.kept_tokens is None) == (expected.kept_tokens is None)
            if each.kept_tokens is not None and expected.kept_tokens is not None:
                np.testing.assert_array_equal(each.kept_tokens.counts, expected.kept_tokens.counts)
                np.testing.assert_array_equal(each.kept_tokens.ids, expected.kept_tokens.ids)
    assert sum(result.kept_tokens is not None for result in local) == 4


@pytest.mark.parametrize("kind", ["qwen3", OWN])
def test_a_stop_token_ends_a_completion_and_belongs_to_it_and_a_top_k_of_one_is_greedy(kind, vllm_engine):
    engine = vllm_engine(kind)
    free = decoded(engine, [request("a", prompt(10), 12, temperature=0.0)])[0]
    stop = int(free.token_ids[5])
    result = decoded(engine, [request("a", prompt(10), 12, temperature=0.0, stop_token_ids=(stop,))])[0]
    assert result.finish is Finish.STOP and result.token_ids[-1] == stop
    assert len(result.logprobs) == len(result.token_ids) <= 6 and result.seconds > 0
    top_1 = decoded(engine, [request("a", prompt(10), 12, top_k=1, seed=4)])[0]
    np.testing.assert_array_equal(free.token_ids, top_1.token_ids)
    np.testing.assert_allclose(top_1.logprobs, 0.0, atol=1e-6)  # of the distribution that was drawn from


@pytest.mark.parametrize("kind", [OWN])
def test_a_request_that_cannot_be_served_does_not_take_the_others_with_it(kind, vllm_engine):
    engine = vllm_engine(kind)
    before = engine.num_decoded()
    asks = [
        (request("full", prompt(256), 8), "max_model_len 256"),
        (request("good", prompt(8), 8), ""),
        (request("empty", prompt(0), 8), "is empty"),
        (request("foreign", np.array([5, 160]), 8), "outside of the vocabulary of 160"),
        (request("tight", prompt(252), 8), ""),
        (request("kept", prompt(8), 2, top_k=5, records_kept=True), "which tokens were kept"),
        (request("experts", prompt(8), 2, experts_from=0), "asks for experts"),
        (request("cold", prompt(8), 2, temperature=1e-3), "takes 0.01 for all below it"),
    ]
    results = {r.uid: r for r in decoded(engine, [ask for ask, _ in asks])}
    for ask, says in asks:
        result = results[ask.uid]
        assert (result.finish is Finish.ERROR) == bool(says) and says in result.error
    assert len(results["good"].token_ids) == 8 and len(results["tight"].token_ids) == 4
    assert engine.num_decoded() - before == 12


@pytest.mark.parametrize("kind", [OWN])
def test_vllm_s_own_draws_have_the_trainer_s_logprobs(kind, vllm_engine, checkpoint, judge):
    """At the sampling temperature, among the tokens that top_k and top_p keep as our sampler would; and after a sync."""
    engine, tensors = vllm_engine(kind), tensors_of(checkpoint("qwen3"))
    assert engine.info().sampler == "vLLM's own sampler draws tokens, on its Model Runner V1, eager"
    cuts = [{}, {"temperature": 0.7}, {"top_k": 7}, {"top_p": 0.6}, {"temperature": 1.4, "top_p": 0.9, "top_k": 40}]
    asks = [request(f"{i}", prompt(20 + i, seed=i), 16, seed=i, **cut) for i, cut in enumerate(cuts)]
    for weights in (tensors, perturbed(tensors, "self_attn"), tensors):
        publish(engine, weights, judge, checkpoint("qwen3"), 0)
        model = judge.model(checkpoint("qwen3"), weights)
        for ask, result in zip(asks, decoded(engine, asks), strict=True):
            assert_drawn_from(model, ask, result)


@pytest.mark.parametrize("kind", [OWN])
def test_vllm_s_own_sampler_draws_by_seed_alone_and_stops_at_texts_too(kind, vllm_engine):
    engine = vllm_engine(kind)
    asks = [request(f"{i}", prompt(30), 40, seed=i) for i in range(3)]
    whole = decoded(engine, asks)
    assert len({result.token_ids.tobytes() for result in whole}) == 3
    for ask, result in zip(asks, whole, strict=True):  # whoever is beside it
        np.testing.assert_array_equal(decoded(engine, [ask])[0].token_ids, result.token_ids)
    ids = whole[0].token_ids.tolist()
    end = next(i for i in range(8, 30) if ids[i] > 4 and ids[i] not in ids[:i])
    stopped = decoded(engine, [replace(asks[0], sampling=Sampling(stop=(f"w{ids[end]:03d}",)))])[0]
    assert stopped.finish is Finish.STOP and len(stopped.logprobs) == len(stopped.token_ids) == end + 1


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's FP8 cache on a CPU wants AVX512")
@pytest.mark.parametrize("kind", ["qwen3+fp8"])
def test_a_sync_knows_how_far_an_fp8_cache_rounds(kind, vllm_engine, checkpoint, judge):
    engine, tensors = vllm_engine(kind), tensors_of(checkpoint("qwen3"))
    fp8 = Precision(torch.float32, cache=torch.float8_e4m3fn)
    config = engine._llm.llm_engine.vllm_config
    assert config.cache_config.cache_dtype == "fp8" and config.scheduler_config.max_num_batched_tokens == 512  # extra
    report = publish(engine, tensors, judge, checkpoint("qwen3"), 0, fp8)
    assert report.comparison.median > 1e-3  # nats
    with pytest.raises(RuntimeError, match="disagree on the probe by more than rounding explains"):
        publish(engine, tensors, judge, checkpoint("qwen3"), 0)  # with a cache of the engine's dtype
    learner = GivenLearner(tensors, lambda: judge.scores(checkpoint("qwen3"), perturbed(tensors, "self_attn"), fp8))
    sync = FileSync(CheckedEngines(pool_of(engine), vocab_size=160), torch.float32, precision=fp8)
    with pytest.raises(RuntimeError, match="disagree on the probe"):  # a program that computes something else
        sync.publish(learner, 1)
    sync.close()
