"""The real vLLM in float32: about 60 s on one core, most of it its import and start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import GivenLearner, decoded, perturbed, prompt, request, tensors_of

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import Sampling, WeightUpdate
from marsrl.rollout.engines.sampler import RowSampling, truncated
from marsrl.rollout.engines.stops import StopTexts
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.types import Finish
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import FileSync

KINDS = ["qwen2", "qwen3", "qwen3_tied", "qwen3_moe"]
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
}


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_tied"])
def test_what_vllm_drops_at_level_2_comes_back_with_its_buffers_or_with_an_update(vllm_engine, checkpoint, kind):
    """vLLM saves the model's buffers then; parameters are lost, as is any tensor that is neither."""
    engine = vllm_engine(kind)
    update = WeightUpdate(str(checkpoint(kind)), 0)
    asks = [request("a", prompt(40), 12)]
    engine.update_weights(update)
    (before,) = decoded(engine, asks)
    model = engine._core.model_executor.driver_worker.worker.model_runner.get_model()
    tensors = {id(each) for each in (*model.parameters(), *model.buffers())}
    neither = {
        name
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and id(value) not in tensors
    }
    on_the_host = {"_q_scale_cpu", "_k_scale_cpu", "_v_scale_cpu"}
    assert neither - on_the_host <= {"kv_cache"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    engine.update_weights(update)
    (after,) = decoded(engine, asks)
    np.testing.assert_array_equal(after.token_ids, before.token_ids)
    np.testing.assert_array_equal(after.logprobs, before.logprobs)


def publish(engine, tensors, judge, directory, version, cache_dtype=None):
    settings = read_shape(directory).settings()
    engines = CheckedEngines(EnginePool(LocalReplicas([engine])), vocab_size=160, settings=settings)
    sync = FileSync(engines, torch.float32, cache_dtype=cache_dtype)
    learner = GivenLearner(tensors, lambda: judge.scores(directory, tensors, cache_dtype))
    try:
        return sync.publish(learner, version)
    finally:
        sync.close()


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_logprobs_are_those_of_transformers(kind, vllm_engine, checkpoint, judge):
    engine, tensors = vllm_engine(kind), tensors_of(checkpoint(kind))
    publish(engine, tensors, judge, checkpoint(kind), 0)
    asks = [request(f"a.{i}", prompt(20 + 7 * i, seed=i), 24, seed=i, temperature=0.7) for i in range(6)]
    results = decoded(engine, asks)
    whole = [np.concatenate([a.token_ids, r.token_ids]) for a, r in zip(asks, results, strict=True)]
    for ask, result, right in zip(asks, results, judge(checkpoint(kind), None, whole, 0.7), strict=True):
        assert len(result.token_ids) == 24 and result.finish is Finish.LENGTH
        np.testing.assert_allclose(result.logprobs, right[len(ask.token_ids) - 1 :], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", GROUPS)
def test_logprobs_follow_an_update_of_each_parameter_group(kind, vllm_engine, checkpoint, judge):
    """One after the other, each beside the old weights of all the others."""
    engine, old = vllm_engine(kind), tensors_of(checkpoint(kind))
    probe = [prompt(97, seed=5)]
    before = judge(checkpoint(kind), None, probe)[0]
    for version, part in enumerate(GROUPS[kind], start=1):
        new = perturbed(old, part)
        after = judge(checkpoint(kind), new, probe)[0]
        assert np.abs(before - after).max() > 1e-2, part  # the change shows, so a missed one would
        report = publish(engine, new, judge, checkpoint(kind), version)
        np.testing.assert_allclose(engine.score(probe)[0], after, atol=1e-4, rtol=0, err_msg=part)
        ask = request(f"a.{version}", prompt(40), 16, seed=3)
        result = decoded(engine, [ask], version=version)[0]
        right = judge(checkpoint(kind), new, [np.concatenate([ask.token_ids, result.token_ids])])[0][39:]
        np.testing.assert_allclose(result.logprobs, right, atol=1e-4, rtol=0, err_msg=part)
        assert report.comparison is not None and report.comparison.median < 1e-5, part
    publish(engine, old, judge, checkpoint(kind), 0)


def corrupting(engine, corrupt, monkeypatch):
    """Every load is followed by corrupt(model)."""
    load = engine._llm.collective_rpc

    def rpc(method, *args, **kwargs):
        out = load(method, *args, **kwargs)
        if method == "marsrl_load":
            corrupt(engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model())
        return out

    monkeypatch.setattr(engine._llm, "collective_rpc", rpc)


@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_one_number_of_one_expert_that_changes_after_loading_is_named(
    kind, vllm_engine, checkpoint, judge, monkeypatch
):
    engine, tensors = vllm_engine(kind), tensors_of(checkpoint(kind))

    def corrupt(model):
        model.get_submodule("model.layers.1.mlp.experts").routed_experts.w2_weight.data[5, 3, 7] += 1e-3

    with monkeypatch.context() as patch:
        corrupting(engine, corrupt, patch)
        with pytest.raises(
            RuntimeError, match=r"1 of \d+ tensors differ, first model\.layers\.1\.mlp\.experts\.w2_weight"
        ):
            publish(engine, tensors, judge, checkpoint(kind), 1)
    publish(engine, tensors, judge, checkpoint(kind), 0)


@pytest.mark.parametrize("kind", ["qwen3"])
def test_a_linear_layer_that_computes_with_the_old_weight_is_named(kind, vllm_engine, checkpoint, judge, monkeypatch):
    engine, tensors = vllm_engine(kind), tensors_of(checkpoint(kind))
    name = "model.layers.0.self_attn.qkv_proj"
    model = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    stale = model.get_submodule(name).cpu_linear
    with monkeypatch.context() as patch:
        corrupting(engine, lambda model: setattr(model.get_submodule(name), "cpu_linear", stale), patch)
        with pytest.raises(RuntimeError, match=rf"1 of \d+ tensors differ, first {name}\.weight"):
            publish(engine, perturbed(tensors, "self_attn"), judge, checkpoint(kind), 1)
    publish(engine, tensors, judge, checkpoint(kind), 0)


@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_experts_that_vllm_does_not_repack_are_named(kind, vllm_engine, checkpoint, judge, monkeypatch):
    engine, tensors = vllm_engine(kind), tensors_of(checkpoint(kind))
    with monkeypatch.context() as patch:
        patch.setattr("marsrl.rollout.engines.vllm.worker._pack_experts", lambda *_: None)
        with pytest.raises(RuntimeError, match=r"4 of \d+ tensors differ, first .*experts\.w"):
            publish(engine, tensors, judge, checkpoint(kind), 1)
    publish(engine, tensors, judge, checkpoint(kind), 0)


@pytest.mark.parametrize("kind", ["qwen3"])
def test_a_prefix_cache_that_outlives_an_update_is_caught_by_the_probe(
    kind, vllm_engine, checkpoint, judge, monkeypatch
):
    engine, old = vllm_engine(kind), tensors_of(checkpoint(kind))
    new = perturbed(old, "self_attn")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_reset_prefix_cache", lambda: None)
        with pytest.raises(RuntimeError, match="prefix cache, which are of older weights"):
            publish(engine, new, judge, checkpoint(kind), 1)
        patch.setattr(engine, "_refuse_old_prefixes", lambda _: None)  # an engine that does not count them
        with pytest.raises(
            RuntimeError, match="of the 16 last tokens, which an engine may compute through its prefix cache"
        ):
            publish(engine, perturbed(old, "self_attn", seed=1), judge, checkpoint(kind), 2)
    publish(engine, old, judge, checkpoint(kind), 0)


@pytest.mark.parametrize(
    ("kind", "setting", "spoil"),
    [
        ("qwen3", "norm_eps", lambda module: setattr(module.q_norm, "variance_epsilon", 1e-4)),
        ("qwen3", "rope_theta", lambda module: setattr(module.rotary_emb, "base", 5e4)),
    ],
)
def test_a_layer_of_vllm_that_computes_with_another_setting_is_named(kind, setting, spoil, vllm_engine, checkpoint):
    engine, settings = vllm_engine(kind), read_shape(checkpoint(kind)).settings()
    assert engine.info().settings == {name: (float(value),) for name, value in settings.items()}
    module = (
        engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model().model.layers[1].self_attn
    )
    before = module.q_norm.variance_epsilon, module.rotary_emb.base
    spoil(module)
    with pytest.raises(ValueError, match=rf"engine 0 \(vllm\..* computes with {setting}"):
        CheckedEngines(EnginePool(LocalReplicas([engine])), vocab_size=160, settings=settings)
    module.q_norm.variance_epsilon, module.rotary_emb.base = before


@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_vllm_tells_all_settings_of_a_router_too(kind, vllm_engine, checkpoint):
    settings = read_shape(checkpoint(kind)).settings()
    assert settings["experts_per_token"] == 2
    assert vllm_engine(kind).info().settings == {name: (float(value),) for name, value in settings.items()}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_greedy_segments_continue_as_if_they_were_one(kind, vllm_engine):
    engine = vllm_engine(kind)
    start = prompt(70, seed=9)
    whole = decoded(engine, [request("w", start, 48, temperature=0.0)])[0]
    tokens, logprobs, cached = start, [], []
    for segment in range(3):
        result = decoded(engine, [request(f"s.{segment}", tokens, 16, temperature=0.0)])[0]
        tokens = np.concatenate([tokens, result.token_ids])
        logprobs.append(result.logprobs)
        cached.append(result.num_cached_tokens)
    np.testing.assert_array_equal(tokens[70:], whole.token_ids)
    np.testing.assert_allclose(np.concatenate(logprobs), whole.logprobs, atol=1e-4, rtol=0)
    assert cached[2] >= 64  # the prefix was not computed again
    engine.forget_prefixes()
    assert decoded(engine, [request("s.again", tokens, 4, temperature=0.0)])[0].num_cached_tokens == 0


@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_the_same_requests_give_the_same_tokens_and_the_same_bits(kind, vllm_engine):
    engine = vllm_engine(kind)
    asks = [request(f"{i // 4}.{i}", prompt(40, seed=i // 4), 20, seed=i) for i in range(48)]  # more than max_num_seqs
    engine._reset_prefix_cache()
    first = decoded(engine, asks)
    engine._reset_prefix_cache()
    second = decoded(engine, asks)
    assert len({r.token_ids.tobytes() for r in first}) == 48
    for one, two in zip(first, second, strict=True):
        assert one.token_ids.tobytes() == two.token_ids.tobytes() and one.logprobs.tobytes() == two.logprobs.tobytes()


@pytest.mark.parametrize("kind", ["qwen3"])
def test_a_seed_draws_the_same_tokens_as_in_the_local_engine(kind, vllm_engine, checkpoint, monkeypatch):
    """Whatever else is in the batch, and wherever prefills are cut (here after 64 tokens)."""
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
    monkeypatch.setattr(engine._core.engine_core.engine_core.scheduler, "max_num_scheduled_tokens", 64)
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
def test_stop_tokens_end_a_completion_and_belong_to_it(kind, vllm_engine):
    engine = vllm_engine(kind)
    free = decoded(engine, [request("a", prompt(10), 12, temperature=0.0)])[0]
    stop = int(free.token_ids[5])
    result = decoded(engine, [request("a", prompt(10), 12, temperature=0.0, stop_token_ids=(stop,))])[0]
    assert result.finish is Finish.STOP and result.token_ids[-1] == stop
    assert len(result.logprobs) == len(result.token_ids) <= 6
    assert result.seconds > 0 and not engine._shares._since


@pytest.mark.parametrize("kind", ["qwen3", OWN])
def test_a_request_that_cannot_be_served_does_not_take_the_others_with_it(kind, vllm_engine):
    engine = vllm_engine(kind)
    before = engine.num_decoded()
    asks = [
        request("full", prompt(256), 8),
        request("good", prompt(8), 8),
        request("empty", prompt(0), 8),
        request("foreign", np.array([5, 160]), 8),
        request("tight", prompt(252), 8),
    ]
    results = decoded(engine, asks)
    assert [r.uid for r in results] == [a.uid for a in asks]
    errors = {r.uid: r.error for r in results if r.finish is Finish.ERROR}
    assert set(errors) == {"full", "empty", "foreign"} and "max_model_len 256" in errors["full"]
    assert len(results[1].token_ids) == 8 and len(results[4].token_ids) == 4
    assert engine.num_decoded() - before == 12


@pytest.mark.parametrize("kind", ["qwen3"])
def test_an_update_leaves_the_version_where_it_was_when_the_file_is_missing(kind, vllm_engine, tmp_path):
    engine = vllm_engine(kind)
    with pytest.raises(FileNotFoundError, match="none"):
        engine.update_weights(WeightUpdate(str(tmp_path / "none"), 5))
    assert len(decoded(engine, [request("a", prompt(8), 4)])[0].token_ids) == 4


@pytest.mark.parametrize("kind", ["qwen3", OWN])
def test_sampling_is_cut_as_asked(kind, vllm_engine):
    engine = vllm_engine(kind)
    greedy = decoded(engine, [request("a", prompt(8), 6, temperature=0.0)])[0]
    top_1 = decoded(engine, [request("a", prompt(8), 6, top_k=1, seed=4)])[0]
    np.testing.assert_array_equal(greedy.token_ids, top_1.token_ids)
    np.testing.assert_allclose(top_1.logprobs, 0.0, atol=1e-6)  # of the distribution that was drawn from


@pytest.mark.parametrize("kind", [OWN])
def test_vllm_s_own_draws_have_the_trainer_s_logprobs(kind, vllm_engine, checkpoint, judge):
    """At the sampling temperature, among the tokens that top_k and top_p keep as our sampler would; and after a sync."""
    engine, tensors = vllm_engine(kind), tensors_of(checkpoint("qwen3"))
    assert engine.info().sampler == "vLLM's own sampler draws tokens, on its Model Runner V1, eager"
    cuts = [{}, {"temperature": 0.7}, {"top_k": 7}, {"top_p": 0.6}, {"temperature": 1.4, "top_p": 0.9, "top_k": 40}]
    asks = [request(f"{i}", prompt(20 + i, seed=i), 16, seed=i, **cut) for i, cut in enumerate(cuts)]
    for weights in (tensors, perturbed(tensors, "self_attn"), tensors):
        publish(engine, weights, judge, checkpoint("qwen3"), 0)
        model = judge._model(checkpoint("qwen3"), weights)
        for ask, result in zip(asks, decoded(engine, asks), strict=True):
            whole = torch.from_numpy(np.concatenate([ask.token_ids, result.token_ids]).astype(np.int64))
            logits = model(whole[None]).logits[0, len(ask.token_ids) - 1 : -1].detach()
            right = truncated(logits, RowSampling.of([ask.sampling] * 16, logits.device)).log_softmax(-1)
            drawn = right.gather(-1, whole[-16:, None])[:, 0]
            np.testing.assert_allclose(result.logprobs, drawn.numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [OWN])
def test_vllm_s_own_draws_follow_the_distribution(kind, vllm_engine, checkpoint, judge):
    """First tokens of 1,600 seeds, and those after a given one, by chi-square; draws repeat, so that it cannot flake."""
    engine, model = vllm_engine(kind), judge._model(checkpoint("qwen3"), None)
    for start, seeds in ((prompt(12), range(800)), (np.append(prompt(12), 17), range(800, 1600))):
        asks = [request(f"{seed}", start, 1, seed=derive_seed(0, "decode", seed), temperature=0.8) for seed in seeds]
        counts = np.bincount([int(r.token_ids[0]) for r in decoded(engine, asks)], minlength=160)
        logits = model(torch.from_numpy(start.astype(np.int64))[None]).logits[0, -1].detach()
        expected = (logits.double() / 0.8).softmax(-1).numpy() * 800
        rare = expected < 5
        found = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(expected[~rare], expected[rare].sum())
        chi_square, freedom = ((found - wanted) ** 2 / wanted).sum(), len(wanted) - 1
        assert freedom > 20 and chi_square < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("kind", [OWN])
def test_a_seed_of_vllm_s_own_sampler_draws_the_same_whoever_is_beside_it(kind, vllm_engine):
    engine = vllm_engine(kind)
    asks = [request(f"{i}", prompt(30), 12, seed=i) for i in range(6)]
    together = decoded(engine, asks)
    assert len({result.token_ids.tobytes() for result in together}) == 6
    for ask, result in zip(asks, together, strict=True):
        np.testing.assert_array_equal(decoded(engine, [ask])[0].token_ids, result.token_ids)


@pytest.mark.parametrize("kind", [OWN])
def test_vllm_s_own_sampler_gives_up_and_stops_at_texts_too(kind, vllm_engine, monkeypatch):
    engine = vllm_engine(kind)
    asks = [request(f"{i}", prompt(30 + i), 40, seed=i) for i in range(3)]
    whole = decoded(engine, asks)
    before = engine.num_decoded()
    engine.submit(asks, version=0)
    for _ in range(6):
        assert engine.collect(0.0) == []
    engine.submit([request("late", prompt(9), 4)], version=0)
    engine.abort()
    parts = {result.uid: result for result in engine.collect(1.0)}
    assert len(parts) == 4 and {part.finish for part in parts.values()} == {Finish.UNFINISHED}
    assert len(parts["late"].token_ids) == len(parts["late"].logprobs) == 0
    for right in whole:
        part = parts[right.uid]
        n = len(part.token_ids)
        assert 3 < n <= 6
        np.testing.assert_array_equal(part.token_ids, right.token_ids[:n])
        np.testing.assert_allclose(part.logprobs, right.logprobs[:n], atol=1e-4)
    assert engine.num_decoded() - before == sum(len(part.token_ids) for part in parts.values())
    monkeypatch.setattr(engine, "_stops", StopTexts(lambda ids: "".join(f"{token:03d}" for token in ids.tolist())))
    text = "".join(f"{token:03d}" for token in whole[0].token_ids[8:10])
    stopped = decoded(engine, [replace(asks[0], sampling=Sampling(stop=(text,)))])[0]
    assert stopped.finish is Finish.STOP and len(stopped.logprobs) == len(stopped.token_ids) == 10


@pytest.mark.parametrize("kind", [OWN])
def test_what_an_engine_was_not_started_for_is_refused(kind, vllm_engine):
    engine = vllm_engine(kind)
    asks = [
        request("kept", prompt(8), 2, top_k=5, records_kept=True),
        request("experts", prompt(8), 2, experts_from=0),
        request("cold", prompt(8), 2, temperature=1e-3),
        request("good", prompt(8), 2),
    ]
    *refused, good = decoded(engine, asks)
    assert [result.finish for result in refused] == [Finish.ERROR] * 3 and len(good.token_ids) == 2
    assert "which tokens were kept" in refused[0].error and "asks for experts" in refused[1].error


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's FP8 cache on a CPU wants AVX512")
@pytest.mark.parametrize("kind", ["qwen3+fp8"])
def test_a_sync_knows_how_far_an_fp8_cache_rounds(kind, vllm_engine, checkpoint, judge):
    engine, tensors, fp8 = vllm_engine(kind), tensors_of(checkpoint("qwen3")), torch.float8_e4m3fn
    config = engine._llm.llm_engine.vllm_config
    assert config.cache_config.cache_dtype == "fp8" and config.scheduler_config.max_num_batched_tokens == 512  # extra
    report = publish(engine, tensors, judge, checkpoint("qwen3"), 0, fp8)
    assert report.comparison.median > 1e-3  # nats
    with pytest.raises(RuntimeError, match="disagree on the probe by more than rounding explains"):
        publish(engine, tensors, judge, checkpoint("qwen3"), 0)  # with a cache of the engine's dtype
    learner = GivenLearner(tensors, lambda: judge.scores(checkpoint("qwen3"), perturbed(tensors, "self_attn"), fp8))
    sync = FileSync(CheckedEngines(EnginePool(LocalReplicas([engine])), vocab_size=160), torch.float32, cache_dtype=fp8)
    with pytest.raises(RuntimeError, match="disagree on the probe"):  # a program that computes something else
        sync.publish(learner, 1)
    sync.close()
