"""Adapters in our own decoder against PEFT on transformers: about 10 s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_cases import (
    CONFIG,
    OF_EXPERTS,
    assert_decoded_with,
    assert_replaced_beside_others,
    peft_logprobs,
    random_tensors,
    written,
)
from engine_cases import decoded, pool_of, prompt, request

from marsrl.rollout.adapter import AdapterConfig, held_by_shard, read_tensors
from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import AdapterUpdate, DecodeRequest, WrongVersion
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.pool.build import make_pool
from marsrl.rollout.types import Finish
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.layout import EngineShard

Checkpoint = Callable[[str], Path]


def engine_of(model: Path, config: AdapterConfig, *names: str) -> LocalEngine:
    return LocalEngine(model, dtype="float32", max_model_len=256, adapters=dict.fromkeys(names, config))


def asks_of(*adapters: str, each: int = 2) -> list[DecodeRequest]:
    """Requests of these adapters in turn; those of one group have one prompt, whatever their adapter."""
    asks = [request(f"{i // 3}.{i}", prompt(20 + 7 * (i // 3), seed=i // 3), 24, seed=i) for i in range(3 * each)]
    return [
        replace(ask, adapter=adapters[i % len(adapters)], adapter_version=int(bool(adapters[i % len(adapters)])))
        for i, ask in enumerate(asks)
    ]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_several_adapters_and_none_in_one_batch_decode_as_peft_does(
    kind: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    model, config = checkpoint(kind), OF_EXPERTS if kind == "qwen3_moe" else CONFIG
    folders = {name: written(tmp_path / name, model, config, seed) for seed, name in enumerate("ab")}
    engine = engine_of(model, config, *folders)
    assert engine.info().adapters == ("a", "b")
    for name, folder in folders.items():
        receipt = engine.update_adapter(AdapterUpdate(name, str(folder), 1))
        held = held_by_shard(read_shape(model), config, read_tensors(folder), torch.float32, EngineShard())
        assert dict(receipt.checksums[0]) == {each: checksum(tensor) for each, tensor in held}
    asks = asks_of("a", "b", "")
    together = decoded(engine, asks)
    assert_decoded_with(model, folders, asks, together)
    for ask, result in zip(asks, together, strict=True):
        (alone,) = decoded(engine, [ask])
        np.testing.assert_array_equal(alone.token_ids, result.token_ids)
        np.testing.assert_allclose(alone.logprobs, result.logprobs, atol=1e-5)
    probe = [prompt(40)]
    for name in ("a", "b", ""):
        (right,) = peft_logprobs(model, folders.get(name), probe)
        np.testing.assert_allclose(engine.score(probe, name)[0], right, atol=1e-4, rtol=0)


def test_an_adapter_has_a_version_of_its_own_and_is_the_bare_model_before_its_first(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    engine = engine_of(checkpoint("qwen3"), CONFIG, "a", "b")
    bare, *as_adapter = asks_of("", "a", "b", each=1)
    as_adapter = [replace(bare, uid=each.uid, adapter=each.adapter) for each in as_adapter]
    for result in decoded(engine, [bare, *as_adapter]):
        np.testing.assert_array_equal(result.token_ids, decoded(engine, [bare])[0].token_ids)
    folder = written(tmp_path / "a", checkpoint("qwen3"), CONFIG, 0)
    engine.update_adapter(AdapterUpdate("a", str(folder), 5))
    assert [result.version for result in decoded(engine, [replace(as_adapter[0], adapter_version=5)])] == [5]
    for wrong, says in (
        (as_adapter[0], "version 0 of adapter a, but 5 is loaded"),
        (replace(bare, adapter="c"), "asked for adapter c; it serves a, b"),
    ):
        with pytest.raises(WrongVersion, match=says):
            engine.submit([wrong], version=0)


def test_others_decode_on_while_an_adapter_is_replaced(checkpoint: Checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = checkpoint("qwen3")
    folders = [written(tmp_path / f"{seed}", model, CONFIG, seed) for seed in range(3)]
    engine = engine_of(model, CONFIG, "a", "b")
    of = dict(zip("ab", folders, strict=False))
    for name, folder in of.items():
        engine.update_adapter(AdapterUpdate(name, str(folder), 1))
    asks, update = asks_of("a", "b", ""), AdapterUpdate("a", str(folders[2]), 2)
    own, others = [ask for ask in asks if ask.adapter == "a"], [ask for ask in asks if ask.adapter != "a"]
    assert_replaced_beside_others(pool_of(engine), model, of, update, own, others)
    engine.submit([replace(own[0], adapter_version=2)], version=0)
    with pytest.raises(RuntimeError, match="requests of a are being decoded"):
        engine.update_adapter(AdapterUpdate("a", str(folders[0]), 3))


@pytest.mark.slow
def test_an_actor_decodes_on_for_others_while_an_adapter_is_replaced(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In Ray: its thread takes the adapter, and scores with it, between two steps."""
    pytest.importorskip("peft")
    model, config = checkpoint("qwen3"), RolloutConfig(engine="local", threads=1, object_store_mib=80)
    folders = [written(tmp_path / f"{seed}", model, CONFIG, seed) for seed in range(3)]
    of, adapters = dict(zip("ab", folders, strict=False)), dict.fromkeys("ab", CONFIG)
    with make_pool("main", str(model), config, dtype="float32", max_model_len=2048, adapters=adapters) as pool:
        for name, folder in of.items():
            pool.update_adapter(AdapterUpdate(name, str(folder), 1))
        long = [replace(ask, max_new_tokens=600) for ask in asks_of("a", "b", "")]
        own, others = [ask for ask in long if ask.adapter == "a"], [ask for ask in long if ask.adapter != "a"]
        num_beside = assert_replaced_beside_others(pool, model, of, AdapterUpdate("a", str(folders[2]), 2), own, others)
    assert num_beside > 0


def test_an_adapter_of_other_settings_than_were_said_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("qwen3")
    folder = written(tmp_path / "a", model, CONFIG.model_copy(update={"rank": 4}), 0)
    with pytest.raises(ValueError, match=r"q_proj\.lora_A\.weight: found \(4, 64\), expected \(8, 64\)"):
        engine_of(model, CONFIG, "a").update_adapter(AdapterUpdate("a", str(folder), 1))


def test_an_engine_that_starts_from_an_adapter_has_it_at_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, folder = checkpoint("qwen3"), written(tmp_path / "a", checkpoint("qwen3"), CONFIG, 0)
    engine = engine_of(model, CONFIG.model_copy(update={"start": str(folder)}), "a")
    asks = [replace(ask, adapter_version=0) for ask in asks_of("a", each=1)]
    results = decoded(engine, asks)
    assert {result.finish for result in results} == {Finish.LENGTH}
    assert_decoded_with(model, {"a": folder}, asks, results)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("spreads", [False, True])
def test_shards_hold_together_what_one_engine_holds(parts: int, spreads: bool, checkpoint: Checkpoint) -> None:
    """And B times alpha / rank."""
    shape = read_shape(checkpoint("qwen3_moe"))
    tensors = random_tensors(shape, OF_EXPERTS, 0)
    whole = dict(held_by_shard(shape, OF_EXPERTS, tensors, torch.float32, EngineShard()))
    assert whole.keys() == tensors.keys()
    for name, tensor in whole.items():
        scale = OF_EXPERTS.scale if "lora_B" in name else 1.0
        torch.testing.assert_close(tensor, tensors[name] * scale, rtol=1e-6, atol=0)
    shards = [EngineShard.of(part, parts, shape.num_kv_heads, spreads_experts=spreads) for part in range(parts)]
    held = [dict(held_by_shard(shape, OF_EXPERTS, tensors, torch.float32, shard)) for shard in shards]
    for name, tensor in whole.items():
        own = [each[name] for each in held if name in each]
        is_row = name.endswith(("o_proj.lora_A.weight", "down_proj.lora_A.weight"))
        is_column = "lora_B" in name and "o_proj" not in name and "down_proj" not in name
        if spreads and ".experts." in name:
            assert len(own) == 1 and torch.equal(own[0], tensor)
        elif is_row or is_column:
            few = own[:: parts // min(parts, shape.num_kv_heads)] if "k_proj" in name or "v_proj" in name else own
            assert torch.equal(torch.cat(few, dim=1 if is_row else 0), tensor)
        else:
            assert all(torch.equal(each, tensor) for each in own) and len(own) == parts
