"""The real vLLM and our own decoder: continuous batching, aborts, log-probs, FP8 weights.

About 100 s on one core, most of it vLLM's import and starts.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import (
    GivenLearner,
    assert_drawn_from,
    assert_same,
    decoded,
    perturbed,
    pool_of,
    prompt,
    request,
    spec_of,
    tensors_of,
)

from marsrl.rollout.agents.byte_tokenizer import write_byte_tokenizer
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import DecodeResult, Sampling, WeightUpdate, WrongVersion
from marsrl.rollout.engines.texts import Texts
from marsrl.rollout.engines.vllm.worker_fp8 import quantised
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.tasks.arithmetic import ARITHMETIC_TOKENIZER
from marsrl.rollout.types import Finish
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.layout import box_of, fuse, shard_layout
from marsrl.trainer.learner.other_roundings import Precision
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import FileSync

pytestmark = pytest.mark.slow


@pytest.fixture(params=["local qwen3", "qwen3"])
def kind(request):
    return request.param


def asks_of(n, length=40):
    return [request(f"{i // 2}.{i}", prompt(30 + 7 * (i // 2), seed=i // 2), length - 2 * i, seed=i) for i in range(n)]


def test_requests_that_join_others_get_what_they_get_alone(engine):
    asks = asks_of(8)
    alone = decoded(engine, asks)
    if isinstance(engine, LocalEngine):  # a group's prompt is computed once
        assert [result.num_cached_tokens for result in alone[:6]] == [0, 29, 0, 36, 0, 43]
    before = engine.num_decoded()
    engine.submit(asks[:3], version=0)
    results = engine.collect(0.0)
    for ask in asks[3:]:  # more requests than the local engine has rows
        engine.submit([ask], version=0)
        results += engine.collect(0.0)
    while len(results) < 8:
        results += engine.collect(0.02)
    assert_same(results, alone)
    assert engine.num_decoded() - before == sum(len(r.token_ids) for r in alone)
    assert engine.collect(1.0) == []  # nothing to wait for


def test_an_aborted_request_returns_its_tokens_and_can_go_on(engine):
    """Noise depends only on seed and position, so the same seed continues with the same tokens."""
    asks = [replace(ask, text_from=0) for ask in asks_of(4, length=60)]
    whole = decoded(engine, asks)
    engine.submit(asks, version=0)
    for _ in range(12):
        assert engine.collect(0.0) == []
    engine.submit([request("late", prompt(9), 30)], version=0)
    engine.abort()
    parts = {r.uid: r for r in engine.collect(1.0)}
    assert set(parts) == {"late", *(ask.uid for ask in asks)}
    assert {r.finish for r in parts.values()} == {Finish.UNFINISHED} and len(parts["late"].token_ids) == 0
    rest = []
    for ask, right in zip(asks, whole, strict=True):
        part = parts[ask.uid]
        n = len(part.token_ids)
        assert 5 < n <= 12 and len(part.logprobs) == n and part.version == 0 and part.text is None
        np.testing.assert_array_equal(part.token_ids, right.token_ids[:n])
        np.testing.assert_allclose(part.logprobs, right.logprobs[:n], atol=1e-4)
        tokens = np.concatenate([ask.token_ids, part.token_ids])
        rest.append(request(ask.uid, tokens, ask.max_new_tokens - n, seed=ask.seed))
    for right, last in zip(whole, decoded(engine, rest), strict=True):
        np.testing.assert_array_equal(right.token_ids[-len(last.token_ids) :], last.token_ids)
    assert engine.collect(0.0) == []


def test_a_text_ends_a_completion_at_the_token_that_completes_it(engine):
    """The first half of the text may be in an earlier segment. Neighbouring requests continue."""
    asks = asks_of(3, length=40)
    whole = decoded(engine, asks)
    ids = whole[0].token_ids.tolist()
    pairs = [*itertools.pairwise(ids)]
    end = next(i for i in range(8, 30) if min(pairs[i - 1]) > 4 and pairs[i - 1] not in pairs[: i - 1])
    text = f"{ids[end - 1]:03d} w{ids[end]:03d}"[1:]  # starts in the middle of a word
    before = engine.num_decoded()
    stopping = [replace(ask, sampling=replace(ask.sampling, stop=(text, "never"))) for ask in asks[:1]]
    stopped, *others = decoded(engine, [*stopping, *asks[1:]])
    assert stopped.finish is Finish.STOP and stopped.token_ids.tolist() == ids[: end + 1]
    np.testing.assert_allclose(stopped.logprobs, whole[0].logprobs[: end + 1], atol=1e-4)
    assert_same(others, whole[1:])
    assert engine.num_decoded() - before == end + 1 + sum(len(other.token_ids) for other in others)
    tokens = np.concatenate([asks[0].token_ids, whole[0].token_ids[:end]])
    (rest,) = decoded(engine, [replace(stopping[0], token_ids=tokens, max_new_tokens=20)])
    assert rest.finish is Finish.STOP and rest.token_ids.tolist() == [ids[end]]
    turn = replace(stopping[0], token_ids=tokens, max_new_tokens=20, stop_from=len(tokens))
    (turn_result,) = decoded(engine, [turn])
    assert len(turn_result.token_ids) > 1 and turn_result.token_ids[0] == ids[end]  # the first half is of another turn


def test_the_text_of_a_completion_has_earlier_segments_too(engine, directory):
    (ask,) = asks_of(1)
    asked = replace(ask, text_from=len(ask.token_ids) - 3)  # the text begins within an earlier segment
    (with_text,) = decoded(engine, [asked])
    completion = np.concatenate([ask.token_ids[-3:], with_text.token_ids])
    assert with_text.text == ChatRenderer(directory).decode(completion)
    assert [result.text for result in decoded(engine, [ask])] == [None]


def test_a_character_split_over_two_segments_is_decoded_whole(tmp_path):
    write_byte_tokenizer(tmp_path)
    texts, renderer = Texts.of_model(tmp_path), ChatRenderer(tmp_path)
    ids = np.frombuffer("a€\n".encode(), np.uint8).astype(np.int32)
    for cut in range(len(ids)):
        asked = request("u", np.concatenate([prompt(5), ids[:cut]]), 9)
        nothing = DecodeResult.without_tokens("u", Finish.STOP, 0)
        result = replace(nothing, token_ids=np.append(ids[cut:], renderer.eos_id))
        assert texts.told(replace(asked, text_from=5), result).text == "a€\n"


def test_a_stop_text_completed_earlier_ends_nothing(tmp_path):
    ARITHMETIC_TOKENIZER.write(tmp_path)
    stops, renderer = Texts.of_model(tmp_path), ChatRenderer(tmp_path)
    known, drawn = (renderer.encode_trusted(text) for text in ("grade fix", "fix Answer: 3"))
    assert [stops.is_ended(known, drawn[: i + 1].tolist(), ("Answer:", "fix")) for i in range(3)] == [True, True, False]
    assert not stops.is_ended(known, [], ("fix",)) and not stops.is_ended(known, drawn.tolist(), ())
    assert not stops.is_ended(known, drawn.tolist(), ("fix",))


def test_a_stop_text_is_found_in_a_short_turn(tmp_path):
    """The turn has fewer tokens than the longest stop text has bytes, and an earlier segment may have drawn most of them."""
    write_byte_tokenizer(tmp_path)
    stops, text = Texts.of_model(tmp_path), "Answer: 3"
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    for num_known in range(len(ids)):
        known, drawn = ids[:num_known], ids[num_known:].tolist()
        assert stops.is_ended(known, drawn, (text, "The answer is"))
        assert not stops.is_ended(known, drawn, ("The answer is",))


OWN = "qwen3+engine"  # vLLM's own sampler
GROUPS = {
    "qwen2": "q_proj.bias self_attn mlp.gate_proj embed_tokens norm",
    "qwen3": "self_attn mlp.down_proj embed_tokens lm_head model.norm q_norm",
    "qwen3_moe": "self_attn mlp.gate.weight gate_proj up_proj down_proj embed_tokens lm_head norm",
    "llama": "k_proj.bias o_proj.bias gate_proj.bias down_proj.bias lm_head self_attn",
    "mistral": "self_attn mlp",
}
GROUPS |= {f"local {kind}": parts if kind == "qwen3_moe" else parts.split()[0] for kind, parts in GROUPS.items()}
GROUPS |= {OWN: "self_attn"}
CUTS = ({}, {"temperature": 0.7}, {"top_k": 7}, {"top_p": 0.6}, {"temperature": 1.4, "top_p": 0.9, "top_k": 40})


def publish(engine, tensors, judge, directory, version, precision=None, scored=None):
    """Publish tensors to the engine.

    scored: tensors with which the trainer computes its scores; default: the published ones.
    """
    engines = CheckedEngines(pool_of(engine), vocab_size=160, settings=read_shape(directory).settings())
    sync = FileSync(engines, torch.float32, precision=precision)
    try:
        return sync.publish(
            GivenLearner(tensors, lambda: judge.scores(directory, scored or tensors, precision)), version
        )
    finally:
        sync.close()


@pytest.mark.parametrize("kind", GROUPS)
def test_logprobs_follow_an_update_of_each_parameter_group(kind, engine, directory, judge):
    """Change one group of parameters at a time, and check decoding and scoring.

    Log-probs are at the sampling temperature, among the tokens that top_k and top_p keep in our sampler.
    """
    old, probe = tensors_of(directory), [prompt(97, seed=5)]
    before = judge(directory, None, probe)[0]
    for version, part in enumerate(GROUPS[kind].split(), start=1):
        new = perturbed(old, part)
        after = judge(directory, new, probe)[0]
        assert np.abs(before - after).max() > 1e-2, part  # the change is visible, so a missed one would be too
        report = publish(engine, new, judge, directory, version)
        np.testing.assert_allclose(engine.score(probe)[0], after, atol=1e-4, rtol=0, err_msg=part)
        asks = [request(f"a.{i}", prompt(20 + 7 * i, seed=i), 12, seed=i, **cut) for i, cut in enumerate(CUTS)]
        for ask, result in zip(asks, decoded(engine, asks, version=version), strict=True):
            assert len(result.token_ids) == 12 and result.finish is Finish.LENGTH
            assert_drawn_from(judge.model(directory, new), ask, result)
        assert report.comparison is not None and report.comparison.median < 1e-5, part
    publish(engine, old, judge, directory, 0)


@pytest.mark.parametrize("kind", ["qwen3", OWN])
def test_a_teacher_scores_samples_of_mixed_lengths_and_repeats(engine, directory, judge):
    engine.update_weights(WeightUpdate(str(directory), 0))
    samples = [prompt(97, seed=5), prompt(30, seed=6), prompt(97, seed=5), prompt(2, seed=7)]
    for _ in range(2):  # the second time with cached prefixes
        for found, right in zip(engine.score(samples, temperature=1.0), judge(directory, None, samples), strict=True):
            np.testing.assert_allclose(found, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["local qwen3", "qwen3", OWN])
def test_a_teacher_scores_its_own_draws_at_their_temperature(engine, directory, judge):
    """Scores equal the log-probs of decoding, so a policy that teaches itself has no gradient. The probe has temperature 1."""
    engine.update_weights(WeightUpdate(str(directory), 0))
    for temperature in (0.6, 1.4):
        asks = [request(f"{i}", prompt(20 + 9 * i, seed=i), 12, seed=i, temperature=temperature) for i in range(3)]
        drawn = decoded(engine, asks)
        samples = [np.concatenate([ask.token_ids, each.token_ids]) for ask, each in zip(asks, drawn, strict=True)]
        for score, each in zip(engine.score(samples, temperature=temperature), drawn, strict=True):
            np.testing.assert_allclose(score[-12:], each.logprobs, atol=1e-4, rtol=0)
        for score, right in zip(engine.score(samples), judge(directory, None, samples), strict=True):
            np.testing.assert_allclose(score, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama", "mistral"])
def test_vllm_reports_the_settings_of_its_layers(kind, engine, directory):
    settings = read_shape(directory).settings()
    assert ("experts_per_token" in settings) == (kind == "qwen3_moe")
    assert engine.info().settings == {name: (float(value),) for name, value in settings.items()}


@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_equal_requests_give_equal_bits_and_reuse_prefixes(engine):
    # More requests than max_num_seqs.
    asks = [request(f"{i // 4}.{i}", prompt(70, seed=i // 4), 20, seed=i) for i in range(48)]
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
def test_a_seed_draws_the_same_tokens_as_in_the_local_engine(engine, directory):
    """The tokens do not depend on the other requests in the batch, nor on where prefills are split."""
    cuts = [{"temperature": 0.5 + 0.1 * i, "top_p": 1 - 0.04 * i, "records_kept": i > 1} for i in range(6)]
    asks = [request(f"{i}", prompt(100 + 28 * i, seed=i), 12, seed=2**62 + i, **cut) for i, cut in enumerate(cuts)]
    local = decoded(LocalEngine(spec_of(directory)), asks)
    alone = [decoded(engine, [ask])[0] for ask in asks]
    for found in (decoded(engine, asks), alone):
        assert_same(found, local)
    assert sum(result.kept_tokens is not None for result in local) == 4


@pytest.mark.parametrize("kind", ["local qwen3", "qwen3", OWN])
def test_a_stop_token_ends_a_completion_and_top_k_1_is_greedy(engine):
    free = decoded(engine, [request("a", prompt(10), 12, temperature=0.0)])[0]
    stop = int(free.token_ids[5])
    result = decoded(engine, [request("a", prompt(10), 12, temperature=0.0, stop_token_ids=(stop,))])[0]
    assert result.finish is Finish.STOP and result.token_ids[-1] == stop
    assert len(result.logprobs) == len(result.token_ids) <= 6 and result.seconds > 0
    top_1 = decoded(engine, [request("a", prompt(10), 12, top_k=1, seed=4)])[0]
    np.testing.assert_array_equal(free.token_ids, top_1.token_ids)
    np.testing.assert_allclose(top_1.logprobs, 0.0, atol=1e-6)  # log-probs are of the sampled distribution


@pytest.mark.parametrize("kind", ["local qwen3", "qwen3", OWN])
def test_an_unservable_request_does_not_fail_the_others(kind, engine):
    with pytest.raises(WrongVersion, match="version 9"):
        engine.submit(asks_of(1), version=9)
    before = engine.num_decoded()
    asks = [
        (request("full", prompt(256), 8), "max_model_len 256"),
        (request("good", prompt(8), 8), ""),
        (request("empty", prompt(0), 8), "is empty"),
        (request("foreign", np.array([5, 160]), 8), "outside of the vocabulary of 160"),
        (request("tight", prompt(252), 8), ""),
        (request("cold", prompt(8), 2, temperature=1e-3), "raises it to 0.01" if kind == OWN else ""),
    ]
    results = {r.uid: r for r in decoded(engine, [ask for ask, _ in asks])}
    for ask, says in asks:
        result = results[ask.uid]
        assert (result.finish is Finish.ERROR) == bool(says) and says in result.error
    assert len(results["good"].token_ids) == 8 and len(results["tight"].token_ids) == 4
    assert engine.num_decoded() - before == (12 if kind == OWN else 14)
    with pytest.raises(ValueError, match="distinct uids"):
        decoded(engine, [request("a", prompt(8), 3), request("a", prompt(9), 3)])


@pytest.mark.parametrize("kind", [OWN])
def test_vllm_s_own_sampler_draws_by_seed_and_stops_at_texts(engine):
    assert engine.info().sampler == "vLLM's own sampler draws tokens, on its Model Runner V1, eager"
    asks = [request(f"{i}", prompt(30), 40, seed=i) for i in range(3)]
    whole = decoded(engine, asks)
    assert len({result.token_ids.tobytes() for result in whole}) == 3
    for ask, result in zip(asks, whole, strict=True):  # the tokens do not depend on which other requests run
        np.testing.assert_array_equal(decoded(engine, [ask])[0].token_ids, result.token_ids)
    ids = whole[0].token_ids.tolist()
    end = next(i for i in range(8, 30) if ids[i] > 4 and ids[i] not in ids[:i])
    stopped = decoded(engine, [replace(asks[0], sampling=Sampling(stop=(f"w{ids[end]:03d}",)))])[0]
    assert stopped.finish is Finish.STOP and len(stopped.logprobs) == len(stopped.token_ids) == end + 1


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's FP8 cache on a CPU wants AVX512")
@pytest.mark.parametrize("kind", ["qwen3+fp8"])
def test_a_sync_knows_how_far_an_fp8_cache_rounds(engine, directory, judge):
    tensors = tensors_of(directory)
    fp8 = Precision(torch.float32, cache=torch.float8_e4m3fn)
    config = engine._llm.llm_engine.vllm_config
    # These come from rollout.vllm.kv_cache_dtype and rollout.vllm.extra.
    assert config.cache_config.cache_dtype == "fp8" and config.scheduler_config.max_num_batched_tokens == 512
    report = publish(engine, tensors, judge, directory, 0, fp8)
    assert report.comparison.median > 1e-3  # nats
    with pytest.raises(RuntimeError, match="disagree on the probe by more than rounding explains"):
        publish(engine, tensors, judge, directory, 0)  # this comparison expects a cache of the engine's dtype
    changed = perturbed(tensors, "self_attn")
    with pytest.raises(RuntimeError, match="disagree on the probe"):  # the engine computes with other weights
        publish(engine, tensors, judge, directory, 1, fp8, scored=changed)


FP8 = Precision(torch.bfloat16, weights=torch.float8_e4m3fn)
WITH_AMX = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's FP8 on a CPU wants AMX")
IN_FP8 = [pytest.param(f"{model}+fp8_weights", marks=WITH_AMX) for model in ("qwen3", "qwen3_moe_wide")]
OF_FP8 = pytest.mark.parametrize("kind", IN_FP8)
MATRICES = (
    *(f".{name}.weight" for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    *("w13_weight", "w2_weight"),
)


def dequantised(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight [..., N, K] float32 that a kernel computes with."""
    rows, cols = numbers.shape[-2:]
    return numbers.float() * scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :rows, :cols]


def test_a_matrix_is_rounded_in_blocks_that_begin_at_its_corner() -> None:
    weight = torch.randn(2, 200, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64).bfloat16()
    # An outlier determines its block's scale; one block is all zeros.
    weight[0, 130, 5], weight[1, :128, :128] = (
        1000,
        0,
    )
    numbers, scales = quantised(weight)
    assert numbers.dtype == torch.float8_e4m3fn and numbers.shape == weight.shape and scales.shape == (2, 2, 3)
    assert scales[0, 1, 0] == 1000 / 448 and (scales[0].flatten()[[0, 1, 2, 4, 5]] < 5 / 448).all()
    off = (dequantised(numbers, scales) - weight.float()).abs()
    spread = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :200, :300]
    # The error is at most half a unit in the last of 4 significant bits, or half of the smallest number.
    bound = torch.maximum(weight.float().abs() / 16, spread / 2**10)
    assert (off <= bound * (1 + 1e-5)).all() and not off[1, :128, :128].any()


def rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return HF tensors with the rounded values that an engine computes with."""
    layout, values = shard_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}), {}
    for name, fused in fuse(tensors, torch.bfloat16):
        whole = dequantised(*quantised(fused)) if name.endswith(MATRICES) else fused.float()
        for part, tensor in tensors.items():
            for at, box in layout.placed(*box_of(part, tensor.shape)):
                if at == name:
                    values[part] = box.of(whole).reshape(tensor.shape).contiguous()
    return values


@pytest.fixture
def sync(engine):
    """Yield the publish function of a sync by files: sync(learner, version)."""
    made = FileSync(CheckedEngines(pool_of(engine), vocab_size=160), torch.bfloat16, precision=FP8)
    yield made.publish
    made.close()


@OF_FP8
def test_every_version_is_rounded_to_fp8_and_used(engine, directory, sync, judge):
    old, probe = tensors_of(directory), [prompt(97, seed=5), prompt(60, seed=6)]
    for version, part in enumerate(("proj", "self_attn", "mlp", "norm", "embed_tokens"), start=1):
        new = perturbed(old, part)
        report = sync(GivenLearner(new, lambda new=new: judge.scores(directory, new, FP8)), version)
        assert report.comparison.ratio < 2 and report.comparison.noise > 1e-2, part
        scores = np.concatenate(engine.score(probe))
        # The first difference has rounding errors of bfloat16, the second also of FP8.
        off = [np.abs(scores - np.concatenate(judge(directory, each, probe))) for each in (rounded(new), new)]
        assert np.median(off[0]) < np.median(off[1]) / 2, part


@OF_FP8
def test_a_flipped_weight_or_scale_bit_changes_the_checksum(engine, directory):
    path = str(directory)
    sent = {name: checksum(tensor) for name, tensor in fuse(tensors_of(directory), torch.bfloat16)}
    assert dict(engine.update_weights(WeightUpdate(path, 0)).checksums[0]) == sent
    (model,) = engine._llm.apply_model(lambda model: model)
    held = dict(model.named_parameters())
    rounds = [name for name in held if name.endswith("_scale_inv")]
    assert len(rounds) == 8 and not any(".gate." in name for name in rounds)  # routers stay unquantised
    for scale in rounds:
        weight = scale.removesuffix("_scale_inv")
        for name in (weight, scale):
            byte = held[name].data.view(-1).view(torch.uint8)[-1:]
            byte ^= 1
            (found,) = engine._llm.collective_rpc("marsrl_checksums", args=(path,))
            assert {each for each in sent | found if sent.get(each) != found.get(each)} == {
                weight.replace(".routed_experts", "")
            }
            byte ^= 1
    assert engine._llm.collective_rpc("marsrl_checksums", args=(path,)) == [sent]


@OF_FP8
def test_the_probe_detects_other_scores_despite_fp8_noise(engine, directory, sync, judge):
    tensors = tensors_of(directory)
    sync(GivenLearner(tensors, lambda: judge.scores(directory, tensors, FP8)), 0)
    for other in (
        # Scores whose tolerance does not include weights rounded to FP8.
        lambda: judge.scores(directory, tensors, Precision(torch.bfloat16)),
        lambda: judge.scores(directory, perturbed(tensors, "layers.1.self_attn"), FP8),  # scores of older weights
    ):
        with pytest.raises(RuntimeError, match="disagree on the probe by more than rounding explains"):
            sync(GivenLearner(tensors, other), 1)
