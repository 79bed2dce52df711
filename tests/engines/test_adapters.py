"""Adapters in our own decoder and in the real vLLM, on a CPU, give the log-probs of PEFT.

About 70 s, most of it vLLM's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    GivenLearner,
    assert_same,
    decoded,
    generate,
    logprobs_of,
    pool_of,
    prompt,
    request,
    spec_of,
    vllm_of,
)
from megatron_models import random_adapter, save_adapter, scoring_model

from marsrl.rollout.adapter import AdapterConfig, held_by_shard, read_tensors
from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import AdapterUpdate, DecodeRequest, DecodeResult, WeightUpdate, WrongVersion
from marsrl.rollout.engines.vllm.arguments import slot_rank
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.pool.build import make_pool
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.types import Finish
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.layout import EngineShard
from marsrl.trainer.weights.comparison import CheckedEngines, Compared, TrainerScores, comparison_sequences
from marsrl.trainer.weights.sync import AdapterSync

pytestmark = pytest.mark.slow

# alpha / rank is not a power of two, so multiplying by it rounds.
CONFIG = AdapterConfig.model_validate({"rank": 8, "alpha": 13.0})
OF_EXPERTS = AdapterConfig.model_validate({"rank": 8, "alpha": 13.0, "targets": ["attention", "experts"]})


def peft_logprobs(model: Path, adapter: Path | None, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return log-probs [N-1] of each sequence, in nats."""
    judge = scoring_model(model, adapter)
    return [logprobs_of(judge, sequence) for sequence in sequences]


def assert_decoded_with(
    model: Path, folders: dict[str, Path], asks: Sequence[DecodeRequest], results: Sequence[DecodeResult]
) -> None:
    """Compare each result's log-probs with PEFT's for the request's adapter.

    If `folders` lacks the adapter, the base model alone is expected.
    """
    for adapter in dict.fromkeys(ask.adapter for ask in asks):
        pairs = [(ask, result) for ask, result in zip(asks, results, strict=True) if ask.adapter == adapter]
        whole = [np.concatenate([ask.token_ids, result.token_ids]) for ask, result in pairs]
        for (ask, result), right in zip(pairs, peft_logprobs(model, folders.get(adapter), whole), strict=True):
            assert len(result.token_ids) and result.version == (ask.adapter_version if adapter else 0), result
            of_tokens = right[len(ask.token_ids) - 1 :]
            np.testing.assert_allclose(result.logprobs, of_tokens, atol=1e-4, rtol=0, err_msg=ask.uid)


def assert_replaced_beside_others(
    pool: EnginePool,
    model: Path,
    folders: dict[str, Path],
    update: AdapterUpdate,
    of_adapter: Sequence[DecodeRequest],
    others: Sequence[DecodeRequest],
) -> int:
    """Check that an adapter is replaced while its requests and others are under way.

    Its requests continue with the new version, without cached keys of the old one; the others are undisturbed. Returns the number
    of tokens that other requests decoded while the adapter was loaded and scored.
    """
    undisturbed = generate(pool, others, version=0)
    pool.submit(of_adapter, version=0)
    pool.submit(others, version=0)
    before = sum(pool.num_decoded())
    while sum(pool.num_decoded()) < before + 3 * len([*of_adapter, *others]):
        assert not pool.collect(0.0)
    parts = {result.uid: result for result in pool.drain(update.name)}
    assert set(parts) == {ask.uid for ask in of_adapter} and pool.num_under_way == len(others)
    for part in parts.values():
        assert part.finish is Finish.UNFINISHED and len(part.token_ids), part
        assert part.version == of_adapter[0].adapter_version
    before = sum(pool.num_decoded())
    pool.update_adapters([update])
    new, probe = {**folders, update.name: Path(update.path)}, [prompt(70, seed=3), prompt(41, seed=5)]
    for scores in pool.score(probe, update.name):
        for logprobs, right in zip(scores, peft_logprobs(model, Path(update.path), probe), strict=True):
            np.testing.assert_allclose(logprobs, right, atol=1e-4, rtol=0)
    num_beside = sum(pool.num_decoded()) - before
    rest = []
    for ask in of_adapter:
        known = np.concatenate([ask.token_ids, parts[ask.uid].token_ids])
        left = ask.max_new_tokens - len(parts[ask.uid].token_ids)
        rest.append(replace(ask, token_ids=known, max_new_tokens=left, adapter_version=update.version))
    pool.submit(rest, version=0)
    ended: dict[str, DecodeResult] = {}
    while pool.num_under_way:
        ended |= {result.uid: result for result in pool.collect(0.2)}
    assert_same(ended.values(), undisturbed)
    asks = [*rest, *others]
    assert_decoded_with(model, new, asks, [ended[ask.uid] for ask in asks])
    # The first request of a group has no cached prefix.
    assert min(ended[ask.uid].num_cached_tokens for ask in of_adapter) == 0
    return num_beside


OURS = ["local qwen2", "local qwen3", "local llama", "local qwen3_moe"]
VLLMS = ["vllm qwen3", "vllm qwen3 engine", "vllm qwen3_moe"]  # `engine`: with vLLM's own sampler
every = pytest.mark.parametrize("served", [*OURS, *VLLMS], indirect=True)
of_vllm = pytest.mark.parametrize("served", VLLMS, indirect=True)
Checkpoint = Callable[[str], Path]


def asks_of(versions: Mapping[str, int], *adapters: str) -> list[DecodeRequest]:
    """Return one request for each adapter, all with the same prompt."""
    return [
        replace(request(f"0.{i}", prompt(70), 16, seed=i), adapter=name, adapter_version=versions.get(name, 0))
        for i, name in enumerate(adapters)
    ]


class Served:
    """An engine with two adapters of random numbers, each with its own version."""

    def __init__(self, model: Path, folder: Path, way: str, sampler: str = "marsrl") -> None:
        self.model, self.shape = model, read_shape(model)
        of_moe = OF_EXPERTS if way == "local" else CONFIG.model_copy(update={"targets": ("attention",)})
        self.config = of_moe if self.shape.num_experts else CONFIG
        self._folder, self._number = folder, 0
        self.folders: dict[str, Path] = {}
        self.versions: dict[str, int] = {}
        adapters = dict.fromkeys("ab", self.config)
        if way == "local":
            self.engine: Any = LocalEngine(spec_of(model, adapters=adapters))
        else:
            self.engine = vllm_of(model, {"max_num_seqs": 16, "sampler": sampler}, adapters=adapters)
        for name in "ab":
            self.update(name)

    def update(self, name: str) -> dict[str, int]:
        """Write another version of the adapter, load it, and return the checksums that the engine then reports."""
        self.next(name)
        return self.load(name)

    def next(self, name: str) -> None:
        """Write another version of the adapter, without loading it."""
        self._number += 1
        self.folders[name] = save_adapter(self.model, self._folder / f"{self._number}", self.config, self._number)
        self.versions[name] = self._number

    def load(self, name: str) -> dict[str, int]:
        update = AdapterUpdate(name, str(self.folders[name]), self.versions[name])
        return dict(self.engine.update_adapter(update).checksums[0])

    def asks(self, *adapters: str) -> list[DecodeRequest]:
        return asks_of(self.versions, *adapters)

    def assert_right(self, *adapters: str) -> None:
        asks = self.asks(*adapters)
        assert_decoded_with(self.model, self.folders, asks, decoded(self.engine, asks))


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    way, kind, *sampler = request.param.split()
    engine = Served(checkpoint(kind), tmp_path_factory.mktemp("adapters"), way, *sampler)
    yield engine
    if way == "vllm":
        engine.engine.close()


@every
def test_mixed_adapters_in_one_batch_decode_as_peft_does(served: Served) -> None:
    """Unpatched, vLLM on a CPU would apply the adapter in its last slot to requests without an adapter."""
    assert served.engine.info().adapters == ("a", "b")
    for adapters in (("a", "b", ""), ("", "b", "b", ""), ("a", ""), ("",)):
        served.assert_right(*adapters)
    asks = served.asks("a", "b", "")
    for ask, result in zip(asks, decoded(served.engine, asks), strict=True):
        (alone,) = decoded(served.engine, [ask])
        np.testing.assert_array_equal(alone.token_ids, result.token_ids)
        np.testing.assert_allclose(alone.logprobs, result.logprobs, atol=1e-5)
    probe = [prompt(70, seed=3)]
    for name in ("a", "b", ""):
        (right,) = peft_logprobs(served.model, served.folders.get(name), probe)
        np.testing.assert_allclose(served.engine.score(probe, name)[0], right, atol=1e-4, rtol=0)
    names = ["b", "", "a", "b"]
    for found, name in zip(served.engine.score(probe * 3 + [prompt(41, seed=4)], names), names, strict=True):
        (right,) = peft_logprobs(
            served.model, served.folders.get(name), probe if len(found) == 69 else [prompt(41, seed=4)]
        )
        np.testing.assert_allclose(found, right, atol=1e-4, rtol=0)


@of_vllm
def test_a_new_adapter_version_drops_only_its_own_prefixes(served: Served) -> None:
    decoded(served.engine, served.asks("a", "b", ""))
    served.update("a")
    cached = [result.num_cached_tokens for result in decoded(served.engine, served.asks("a", "b", ""))]
    assert cached[0] == 0 and min(cached[1:]) >= 64
    served.assert_right("a", "b", "")


@of_vllm
def test_a_new_version_under_the_old_path_is_refused(served: Served) -> None:
    """vLLM would reuse the old version's cached prefixes, and no other check would notice."""
    probe = [prompt(70, seed=9)]
    served.engine.score(probe, "a")
    served.load("a")
    with pytest.raises(RuntimeError, match="its prefix cache, which still holds prefixes of older weights"):
        served.engine.score(probe, "a")
    served.update("a")


@of_vllm
def test_the_unused_part_of_a_smaller_adapters_slot_is_0(served: Served) -> None:
    smaller = served.config.model_copy(update={"rank": 4, "alpha": served.config.scale * 4})
    folder = save_adapter(served.model, served.folders["b"].parent / "smaller", smaller, 0)
    receipt = served.engine.update_adapter(AdapterUpdate("b", str(folder), 99))
    right = held_by_shard(served.shape, smaller, read_tensors(folder), torch.float32, EngineShard())
    assert dict(receipt.checksums[0]) == {name: checksum(tensor) for name, tensor in right}
    served.update("b")


@every
def test_others_decode_while_an_adapter_is_replaced_and_verified(served: Served) -> None:
    """The adapter's probe runs beside the other requests, and before any that wait for a free sequence.

    Sequences are limited by rollout.vllm.max_num_seqs.
    """
    folders = dict(served.folders)
    asks = [replace(ask, max_new_tokens=60) for ask in served.asks(*"aba", "", *"bab", *"b" * 13)]
    of_adapter, others = [ask for ask in asks if ask.adapter == "a"], [ask for ask in asks if ask.adapter != "a"]
    served.next("a")
    update = AdapterUpdate("a", str(served.folders["a"]), served.versions["a"])
    pool = pool_of(served.engine)
    num_beside = assert_replaced_beside_others(pool, served.model, folders, update, of_adapter, others)
    assert num_beside > len(others) or isinstance(served.engine, LocalEngine)  # LocalEngine scores between two steps


@of_vllm
def test_requests_that_end_during_scoring_are_returned_later(served: Served) -> None:
    asks = served.asks("b", "b", "")
    (first, *_) = decoded(served.engine, asks)
    text = f"w{first.token_ids[9]:03d}"
    asks = [replace(ask, sampling=replace(ask.sampling, stop=(text,))) for ask in asks]
    right = decoded(served.engine, asks)
    assert min(len(result.token_ids) for result in right) <= 10
    pool, before = pool_of(served.engine), served.engine.num_decoded()
    pool.submit(asks, version=0)
    early = pool.collect(0.0)
    for seed in range(16):
        pool.score([prompt(30, seed=seed)], "a")
    assert served.engine.num_decoded() - before >= sum(len(result.token_ids) for result in right)
    assert_same([*early, *pool.collect(0.0)], right)


@of_vllm
def test_files_of_past_versions_are_not_needed(served: Served) -> None:
    """Continued and new requests work without these files, even after the base weights were loaded again.

    That load makes vLLM drop all adapters. It reads each of them again from the path in a request.
    """
    before, others = served.folders["a"], served.asks("b", "", "b")
    served.engine.submit(others, version=0)
    num_ended = len(served.engine.collect(0.0))
    served.update("a")
    shutil.rmtree(before)
    while num_ended < len(others):
        num_ended += len(served.engine.collect(0.2))
    receipt = served.engine.update_weights(WeightUpdate(str(served.model), 0))
    assert not [name for name in receipt.checksums[0] if "base_layer" in name]
    served.assert_right("a", "b", "")


@every
def test_an_adapter_is_not_replaced_under_its_own_requests(served: Served) -> None:
    served.engine.submit(served.asks("a"), version=0)
    with pytest.raises(RuntimeError, match="requests of a are (under way|being decoded)"):
        served.load("a")
    served.engine.abort()
    while not served.engine.collect(0.1):
        pass
    (ask,) = served.asks("b")
    for wrong, says in (
        (replace(ask, adapter_version=0), f"version 0 of adapter b, but version {ask.adapter_version} is loaded"),
        (replace(ask, adapter="c"), "requested adapter c; serves a, b"),
    ):
        with pytest.raises(WrongVersion, match=says):
            served.engine.submit([wrong], version=0)


def given(served: Served, tensors: dict[str, torch.Tensor], folder: Path) -> GivenLearner:
    """Return a learner with these tensors, whose scores are those of the adapter in the folder."""
    sequences = comparison_sequences(160)
    scores = peft_logprobs(served.model, folder, sequences)
    noise = np.random.default_rng(0)
    rounded = [each + noise.normal(0, 1e-5, len(each)).astype(np.float32) for each in scores]
    return GivenLearner(tensors, lambda: TrainerScores(scores, rounded))


@of_vllm
def test_publish_verifies_an_adapter_and_removes_the_old_one(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = CheckedEngines(pool_of(served.engine), vocab_size=160, adapter="a")
    sync = AdapterSync(engines, torch.float32, base=str(served.model), adapter=served.config, directory=tmp_path)
    for version in (201, 202):
        tensors = random_adapter(served.shape, served.config, version)
        folder = served.folders["b"].parent / f"{version}"
        served.folders["a"], served.versions["a"] = save_adapter(served.model, folder, served.config, version), version
        report = sync.publish(given(served, tensors, served.folders["a"]), version)
        assert report is not None and report.comparison is not None
        assert [each.name.partition(".")[0] for each in next(tmp_path.iterdir()).iterdir()] == [f"version_{version}"]
        served.assert_right("a", "b", "")
    other = random_adapter(served.shape, served.config, 1)
    with pytest.raises(RuntimeError, match="trainer and engine 0 disagree on the probe"):
        sync.publish(given(served, other, served.folders["a"]), 203)
    llm = served.engine._llm.llm_engine
    load = llm.add_lora

    def spoiled(asked: Any) -> None:
        load(asked)
        manager = llm.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
        manager.modules["model.layers.1.self_attn.o_proj"].lora_b_stacked[0][:] *= 2

    monkeypatch.setattr(llm, "add_lora", spoiled)
    with pytest.raises(RuntimeError, match=r"1 of \d+ tensors differ, first .*layers\.1\.self_attn\.o_proj\.lora_B"):
        sync.publish(given(served, other, served.folders["a"]), 204)
    sync.close()
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    served.update("a")
    served.update("b")


@pytest.mark.parametrize("served", ["local qwen3", "vllm qwen3"], indirect=True)
def test_a_joint_comparison_names_the_wrong_adapter(served: Served) -> None:
    pool, sequences = pool_of(served.engine), comparison_sequences(160)[:4]
    engines = {name: CheckedEngines(pool, vocab_size=160, adapter=name) for name in "ab"}

    def scores(folder: Path) -> TrainerScores:
        logprobs = peft_logprobs(served.model, folder, sequences)
        return TrainerScores(logprobs, [each + np.float32(1e-5) for each in logprobs])

    def compared(**adapters: str) -> list[Compared]:
        return [Compared(engines[name], scores(served.folders[whose]), 7, False) for name, whose in adapters.items()]

    assert [each.num_tokens for each in CheckedEngines.compare(compared(a="a", b="b"))] == [160, 160]
    with pytest.raises(RuntimeError, match="adapter b, version 7: trainer and engine 0 disagree on the probe"):
        CheckedEngines.compare(compared(a="a", b="a"))


@pytest.mark.parametrize("served", ["local qwen3", "vllm qwen3"], indirect=True)
def test_a_past_version_is_loaded_into_a_slot_and_verified(served: Served, tmp_path: Path) -> None:
    engines = CheckedEngines(pool_of(served.engine), vocab_size=160, adapter="a")
    sync = AdapterSync(engines, torch.float32, base=str(served.model), adapter=served.config, directory=tmp_path)
    folders = {
        n: save_adapter(served.model, served.folders["b"].parent / f"past{n}", served.config, n) for n in (301, 302)
    }
    sync.load_past(AdapterUpdate("b", str(folders[301]), 301), read_tensors(folders[301]))
    served.folders["b"], served.versions["b"] = folders[301], 301
    served.assert_right("a", "b", "")
    with pytest.raises(
        RuntimeError, match=r"version 302: engine 0 does not hold what was sent: \d+ of \d+ tensors differ"
    ):
        sync.load_past(AdapterUpdate("b", str(folders[301]), 302), read_tensors(folders[302]))
    sync.close()
    served.update("b")


@pytest.mark.slow
def test_a_ray_actor_decodes_others_while_an_adapter_is_replaced(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In a Ray actor, the engine's thread loads the adapter and scores with it between two decoding steps."""
    model = checkpoint("qwen3")
    config = RolloutConfig(engine="local", placement="disaggregated", threads=1, object_store_mib=80)
    folders = [save_adapter(model, tmp_path / f"{seed}", CONFIG, seed) for seed in range(3)]
    folder_of, adapters = dict(zip("ab", folders, strict=False)), dict.fromkeys("ab", CONFIG)
    with make_pool("main", spec_of(model, 2048, adapters=adapters), config) as pool:
        for name, folder in folder_of.items():
            pool.update_adapters([AdapterUpdate(name, str(folder), 1)])
        long = [replace(ask, max_new_tokens=600) for ask in asks_of(dict.fromkeys("ab", 1), *("a", "b", "") * 2)]
        of_adapter, others = [ask for ask in long if ask.adapter == "a"], [ask for ask in long if ask.adapter != "a"]
        update = AdapterUpdate("a", str(folders[2]), 2)
        num_beside = assert_replaced_beside_others(pool, model, folder_of, update, of_adapter, others)
    assert num_beside > 0


def test_an_adapter_file_with_other_settings_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("qwen3")
    folder = save_adapter(model, tmp_path / "a", CONFIG.model_copy(update={"rank": 4}), 0)
    with pytest.raises(ValueError, match=r"q_proj\.lora_A\.weight: found \(4, 64\), expected \(8, 64\)"):
        LocalEngine(spec_of(model, adapters={"a": CONFIG})).update_adapter(AdapterUpdate("a", str(folder), 1))


@pytest.mark.parametrize(("rank", "slots"), [(2, 8), (4, 8), (8, 16)])
def test_vllm_has_slots_for_the_file_of_any_expert_rank(
    rank: int, slots: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    from vllm.lora.peft_helper import PEFTHelper

    model, config = checkpoint("qwen3_moe"), OF_EXPERTS.model_copy(update={"expert_rank": rank})
    folder = save_adapter(model, tmp_path / "a", config)
    assert slot_rank(read_shape(model), [config]) == slots
    PEFTHelper.from_local_dir(str(folder), None).validate_legal(SimpleNamespace(max_lora_rank=slots))


@pytest.mark.parametrize("kind", ["local", "vllm"])
def test_start_adapters_load_at_once_and_others_start_bare(kind: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("qwen3")
    folder = save_adapter(model, tmp_path / "a", CONFIG)
    adapters = {"a": CONFIG.model_copy(update={"start": str(folder)}), "b": CONFIG}
    asks = asks_of({}, "a", "b", "")
    engine: Any = (
        LocalEngine(spec_of(model, adapters=adapters)) if kind == "local" else vllm_of(model, {}, adapters=adapters)
    )
    with closing(engine):
        results = decoded(engine, asks)
    assert {result.finish for result in results} == {Finish.LENGTH}
    assert_decoded_with(model, {"a": folder}, asks, results)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("spreads", [False, True])
def test_shards_hold_together_what_one_engine_holds(parts: int, spreads: bool, checkpoint: Checkpoint) -> None:
    """Each shard's B is multiplied by alpha / rank too."""
    shape = read_shape(checkpoint("qwen3_moe"))
    tensors = random_adapter(shape, OF_EXPERTS, 0)
    whole = dict(held_by_shard(shape, OF_EXPERTS, tensors, torch.float32, EngineShard()))
    assert whole.keys() == tensors.keys()
    for name, tensor in whole.items():
        scale = OF_EXPERTS.scale if "lora_B" in name else 1.0
        torch.testing.assert_close(tensor, tensors[name] * scale, rtol=1e-6, atol=0)
    shards = [EngineShard.of(part, parts, shape.num_kv_heads, spreads_experts=spreads) for part in range(parts)]
    held = [dict(held_by_shard(shape, OF_EXPERTS, tensors, torch.float32, shard)) for shard in shards]
    for name, tensor in whole.items():
        held_parts = [each[name] for each in held if name in each]
        is_row = name.endswith(("o_proj.lora_A.weight", "down_proj.lora_A.weight"))
        is_column = "lora_B" in name and "o_proj" not in name and "down_proj" not in name
        if spreads and ".experts." in name:
            assert len(held_parts) == 1 and torch.equal(held_parts[0], tensor)
        elif is_row or is_column:
            few = (
                held_parts[:: parts // min(parts, shape.num_kv_heads)]
                if "k_proj" in name or "v_proj" in name
                else held_parts
            )
            assert torch.equal(torch.cat(few, dim=1 if is_row else 0), tensor)
        else:
            assert all(torch.equal(each, tensor) for each in held_parts) and len(held_parts) == parts
