"""Engines that take requests while they decode, and give them up; our own decoder against transformers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import ROUNDING, decoded, perturbed, prompt, request, tensors_of
from safetensors.torch import save_file

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import DecodeResult, WeightUpdate, WrongVersion
from marsrl.rollout.engines.texts import Texts
from marsrl.rollout.tasks.arithmetic import ARITHMETIC_TOKENIZER
from marsrl.rollout.types import Finish
from marsrl.rollout.weights.checksum import fused_checksums
from marsrl.trainer.models.byte_tokenizer import write_byte_tokenizer


@pytest.fixture(params=["local", "vllm"])
def engine(request, checkpoint):
    if request.param == "vllm":
        return request.getfixturevalue("vllm_engine")("qwen3")
    return LocalEngine(checkpoint("qwen3"), dtype="float32", max_model_len=256, max_num_seqs=6)


def asks_of(n, length=40):
    return [request(f"{i // 2}.{i}", prompt(30 + 7 * (i // 2), seed=i // 2), length - 2 * i, seed=i) for i in range(n)]


def collect(engine, n):
    results = {}
    while len(results) < n:
        results.update((result.uid, result) for result in engine.collect(0.02))
    return results


def assert_same(results, expected):
    for right in expected:
        np.testing.assert_array_equal(results[right.uid].token_ids, right.token_ids)
        np.testing.assert_allclose(results[right.uid].logprobs, right.logprobs, atol=1e-4)
        assert results[right.uid].finish is right.finish


def test_requests_that_join_others_get_what_they_get_alone(engine):
    asks = asks_of(8)
    alone = decoded(engine, asks)
    before = engine.num_decoded()
    engine.submit(asks[:3], version=0)
    early = engine.collect(0.0)
    for ask in asks[3:]:  # more than the local engine has rows for
        engine.submit([ask], version=0)
        early += engine.collect(0.0)
    results = {r.uid: r for r in early} | collect(engine, 8 - len(early))
    assert_same(results, alone)
    assert engine.num_decoded() - before == sum(len(r.token_ids) for r in alone)
    assert engine.collect(1.0) == []  # nothing to wait for


def test_an_aborted_request_comes_back_as_far_as_it_got_and_goes_on_from_there(engine):
    """Noise depends on seed and position alone, so the same seed goes on with the same tokens."""
    asks = asks_of(4, length=60)
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
        assert 5 < n <= 12 and len(part.logprobs) == n and part.version == 0
        np.testing.assert_array_equal(part.token_ids, right.token_ids[:n])
        np.testing.assert_allclose(part.logprobs, right.logprobs[:n], atol=1e-4)
        tokens = np.concatenate([ask.token_ids, part.token_ids])
        rest.append(request(ask.uid, tokens, ask.max_new_tokens - n, seed=ask.seed))
    for right, last in zip(whole, decoded(engine, rest), strict=True):
        np.testing.assert_array_equal(right.token_ids[-len(last.token_ids) :], last.token_ids)
    assert engine.collect(0.0) == []


def test_a_request_of_another_version_or_that_cannot_be_served(engine):
    with pytest.raises(WrongVersion, match="version 9"):
        engine.submit(asks_of(1), version=9)
    engine.submit([request("full", prompt(256), 8), request("good", prompt(8), 3)], version=0)
    results = collect(engine, 2)
    assert results["full"].finish is Finish.ERROR and len(results["good"].token_ids) == 3
    with pytest.raises(ValueError, match="different uids"):
        decoded(engine, [request("a", prompt(8), 3), request("a", prompt(9), 3)])


def test_a_text_ends_a_completion_at_the_token_that_completes_it(engine):
    """Also where an earlier segment holds its first half; requests beside it, of other texts or none, go on."""
    asks = asks_of(3, length=40)
    whole = decoded(engine, asks)
    ids = whole[0].token_ids.tolist()
    pairs = [*itertools.pairwise(ids)]
    end = next(i for i in range(8, 30) if min(pairs[i - 1]) > 4 and pairs[i - 1] not in pairs[: i - 1])
    text = f"{ids[end - 1]:03d} w{ids[end]:03d}"[1:]  # from the middle of a word on
    before = engine.num_decoded()
    stopping = [replace(ask, sampling=replace(ask.sampling, stop=(text, "never"))) for ask in asks[:1]]
    stopped, *others = decoded(engine, [*stopping, *asks[1:]])
    assert stopped.finish is Finish.STOP and stopped.token_ids.tolist() == ids[: end + 1]
    np.testing.assert_allclose(stopped.logprobs, whole[0].logprobs[: end + 1], atol=1e-4)
    assert_same({other.uid: other for other in others}, whole[1:])
    assert engine.num_decoded() - before == end + 1 + sum(len(other.token_ids) for other in others)
    tokens = np.concatenate([asks[0].token_ids, whole[0].token_ids[:end]])
    (rest,) = decoded(engine, [replace(stopping[0], token_ids=tokens, max_new_tokens=20)])
    assert rest.finish is Finish.STOP and rest.token_ids.tolist() == [ids[end]]


def test_the_text_of_a_completion_has_earlier_segments_too_and_none_comes_with_one_that_is_given_up(engine, checkpoint):
    (ask,) = asks_of(1)
    asked = replace(ask, text_from=len(ask.token_ids) - 3)  # the end of an earlier segment
    (told,) = decoded(engine, [asked])
    completion = np.concatenate([ask.token_ids[-3:], told.token_ids])
    assert told.text == ChatRenderer(checkpoint("qwen3")).decode(completion)
    assert [result.text for result in decoded(engine, [ask])] == [None]
    engine.submit([asked], version=0)
    assert engine.collect(0.0) == []
    engine.abort()
    (cut,) = engine.collect(1.0)
    assert cut.finish is Finish.UNFINISHED and cut.text is None


def test_a_character_that_lies_in_two_segments_is_one_in_the_text(tmp_path):
    write_byte_tokenizer(tmp_path)
    texts, renderer = Texts.of_model(tmp_path), ChatRenderer(tmp_path)
    ids = np.frombuffer("a€\n".encode(), np.uint8).astype(np.int32)
    for cut in range(len(ids)):
        asked = request("u", np.concatenate([prompt(5), ids[:cut]]), 9)
        told = replace(
            DecodeResult.without_tokens("u", Finish.STOP, 0), token_ids=np.append(ids[cut:], renderer.eos_id)
        )
        assert texts.told(replace(asked, text_from=5), told).text == "a€\n"


def test_a_text_that_was_there_before_ends_nothing(tmp_path):
    ARITHMETIC_TOKENIZER.write(tmp_path)
    stops, renderer = Texts.of_model(tmp_path), ChatRenderer(tmp_path)
    known, drawn = (renderer.encode_trusted(text) for text in ("grade fix", "fix Answer: 3"))
    assert [stops.is_ended(known, drawn[: i + 1].tolist(), ("Answer:", "fix")) for i in range(3)] == [True, True, False]
    assert not stops.is_ended(known, [], ("fix",)) and not stops.is_ended(known, drawn.tolist(), ())
    assert not stops.is_ended(known, drawn.tolist(), ("fix",))
    ends = [
        stops.first_end(known, drawn.tolist(), ("Answer:", "fix"), start) for start in range(4)
    ]  # of several at once
    assert ends == [1, 2, None, None]


KINDS = ["qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "llama", "mistral"]


def local_of(checkpoint, kind, **options):
    return LocalEngine(checkpoint(kind), dtype="float32", max_model_len=256, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_transformers(kind, checkpoint, judge):
    engine = local_of(checkpoint, kind)
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
    engine = local_of(checkpoint, kind)
    asks = [request(f"{i}", prompt(10 + 5 * i, seed=i), 40, seed=i, stop_token_ids=(3, 9)) for i in range(9)]
    together = decoded(engine, asks)
    assert {len(r.token_ids) for r in together} != {40}  # some rows end early: compaction has happened
    narrow = local_of(checkpoint, kind, max_num_seqs=2)
    for ask, result, other in zip(asks, together, decoded(narrow, asks[::-1])[::-1], strict=True):
        alone = decoded(engine, [ask])[0]
        np.testing.assert_array_equal(alone.token_ids, result.token_ids)
        np.testing.assert_array_equal(other.token_ids, result.token_ids)
        np.testing.assert_allclose(alone.logprobs, result.logprobs, atol=ROUNDING)
        assert (result.finish is Finish.STOP) == (int(result.token_ids[-1]) in (3, 9))


@pytest.mark.parametrize("part", ["self_attn", "mlp.gate.weight", "down_proj", "embed_tokens", "lm_head", "norm"])
def test_an_update_takes_and_reports_what_was_sent(part, checkpoint, judge, tmp_path):
    engine = local_of(checkpoint, "qwen3_moe")
    new = perturbed(tensors_of(checkpoint("qwen3_moe")), part)
    save_file(new, tmp_path / "w.safetensors")
    receipt = engine.update_weights(WeightUpdate(str(tmp_path / "w.safetensors"), 1))
    assert receipt.version == 1 and dict(receipt.checksums[0]) == fused_checksums(new, torch.float32)
    ask = [prompt(50)]
    np.testing.assert_allclose(engine.score(ask)[0], judge(checkpoint("qwen3_moe"), new, ask)[0], atol=1e-4, rtol=0)
    with pytest.raises(WrongVersion):
        decoded(engine, [request("a", prompt(5), 2)])
