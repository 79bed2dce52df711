"""Replicas here and in Ray: about 15 s, most of it Ray's start."""

import numpy as np
import psutil
import pytest
import torch
from engine_cases import ROUNDING, generate, perturbed, pool_of, prompt, request, tensors_of
from held_port import held_port
from processes import descendants

from marsrl.rollout.config import LocalOptions, RolloutConfig, VllmOptions
from marsrl.rollout.engines.protocol import WrongVersion
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.pool.build import make_pool
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import FileSync


def test_replicas_share_out_what_a_teacher_scores():
    lengths, asked = [9, 2, 5, 4], []

    def score(sequence):
        asked.append(len(sequence))
        return sequence[1:].astype(np.float32)

    sequences = [np.arange(length, dtype=np.int32) for length in lengths]
    pool = pool_of(*(ScriptedEngine(lambda r: [5], score=score) for _ in range(2)))
    found = pool.score_shared(sequences)
    assert sorted(asked) == sorted(lengths) and asked[:1] == [9] and set(asked[1:]) == {2, 5, 4}  # 9 tokens, and 11
    assert all(np.array_equal(scores, sequence[1:]) for scores, sequence in zip(found, sequences, strict=True))


def local_config(**options):
    return RolloutConfig(engine="local", threads=1, local=LocalOptions(max_num_seqs=64), **options)


def test_our_engine_goes_by_its_own_settings_and_not_by_vllms(checkpoint):
    config = local_config(placement="local", vllm=VllmOptions(dtype="bfloat16", max_num_seqs=3))
    with make_pool("main", str(checkpoint("qwen3_moe")), config, dtype="float32", max_model_len=128) as pool:
        assert (pool.infos()[0].dtype, pool.num_slots) == ("float32", 64)


@pytest.mark.slow
def test_training_may_follow_in_a_process_whose_vllm_engines_are_closed(checkpoint):
    """With process groups of its own: those of vLLM meet in a file that is gone."""
    if torch.distributed.is_initialized():
        pytest.skip("another test's process groups stand")
    options = VllmOptions(max_num_seqs=4, kv_cache_mib=32)
    config = RolloutConfig(engine="vllm", placement="local", threads=1, engines=2, vllm=options)
    with make_pool("main", str(checkpoint("qwen3")), config, dtype="float32", max_model_len=64) as pool:
        assert torch.distributed.is_initialized()
        generate(pool, [request(f"{i}.0", prompt(5), 3) for i in range(2)], version=0)
    parallel.start(Layout(1, 1, 1, 1, 1), seed=0)
    parallel.stop()
    assert not torch.distributed.is_initialized()


def test_two_actors_on_ray_serve_and_sync_as_one_engine_in_process(checkpoint, judge):
    directory, tensors = checkpoint("qwen3_moe"), tensors_of(checkpoint("qwen3_moe"))
    asks = [request(f"{i // 4}.{i}", prompt(20 + i // 4, seed=i // 4), 30, seed=i) for i in range(24)]
    here = make_pool("main", str(directory), local_config(placement="local"), dtype="float32", max_model_len=128)
    alone = generate(here, asks, version=0)
    config = local_config(engines=2, object_store_mib=80)
    before = set(descendants())  # of other tests
    pool = make_pool("main", str(directory), config, dtype="float32", max_model_len=128)
    children = set(descendants()) - before
    try:
        progress = []
        results = generate(pool, asks, version=0, progress=progress.append)
        for one, other in zip(alone, results, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=ROUNDING)
            assert (one.uid, one.finish, one.version) == (other.uid, other.finish, other.version)
        assert sum(pool.num_decoded(within_s=300)) == 24 * 30 >= progress[-1] and all(pool.num_decoded())
        pool.submit(asks[:10], version=0)
        ended = pool.collect(0.0)
        pool.submit(asks[10:], version=0)  # while they decode
        while len(ended) < 24:
            ended += pool.collect(5.0)
        for one, other in zip(alone, sorted(ended, key=lambda r: [a.uid for a in asks].index(r.uid)), strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
        long = [request(f"long{i}.0", prompt(10), 118, seed=i) for i in range(4)]
        pool.submit(long, version=0)
        parts = pool.collect(0.05) + pool.drain()
        assert {r.uid for r in parts} == {r.uid for r in long} and pool.num_under_way == 0
        assert all(len(r.token_ids) == len(r.logprobs) for r in parts)
        assert [info.kind for info in pool.infos()] == ["local", "local"]
        assert all(0 < result.seconds < 100 for result in results)
        with pytest.raises(WrongVersion):
            generate(pool, [request("early.0", prompt(5), 3)], version=1)
        new = perturbed(tensors, "experts")
        sync = FileSync(CheckedEngines(pool, vocab_size=160), torch.float32)
        report = sync.publish(judge.learner(directory, new), 1)
        sync.close()
        assert report.num_tensors == 21 and report.comparison.median < 1e-5
        assert all(r.version == 1 for r in generate(pool, asks[:3], version=1))
        pool.submit(asks[:1], version=0)
        with pytest.raises(WrongVersion):
            for _ in range(50):
                pool.collect(1.0)
    finally:
        pool.close()
    _, left = psutil.wait_procs(children, timeout=600)
    assert not left


def test_an_address_where_nobody_listens_is_named(checkpoint):
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        config = local_config(ray_address=address)
        with pytest.raises(RuntimeError, match=f"rollout.ray_address is {address}, but nothing answers"):
            make_pool("main", str(checkpoint("qwen3")), config, dtype="float32", max_model_len=64)


def test_a_missing_library_is_an_error_that_says_what_to_install(checkpoint, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for config, word in ((RolloutConfig(), "install vllm"), (local_config(), "install ray")):
        with pytest.raises(RuntimeError, match=word):
            make_pool("main", str(checkpoint("qwen3")), config, dtype="float32", max_model_len=64)
