"""Adapters with random numbers, and their judge: PEFT on transformers, float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import GivenLearner, generate, prompt

from marsrl.rollout.adapter import AdapterConfig, tensor_shapes, write_adapter
from marsrl.rollout.engines.protocol import AdapterUpdate, DecodeRequest, DecodeResult
from marsrl.rollout.model_shape import ModelShape, read_shape
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.types import Finish
from marsrl.trainer.weights.comparison import TrainerScores

# alpha / rank rounds what it multiplies
CONFIG = AdapterConfig.model_validate({"rank": 8, "alpha": 13.0})
OF_EXPERTS = AdapterConfig.model_validate({"rank": 8, "alpha": 13.0, "targets": ["attention", "experts"]})


def random_tensors(shape: ModelShape, config: AdapterConfig, seed: int, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """A and B, both normal."""
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(size, generator=generator) for n, size in tensor_shapes(shape, config).items()}


def written(folder: Path, model: Path, config: AdapterConfig, seed: int) -> Path:
    """A new PEFT directory of random_tensors."""
    shape = read_shape(model)
    folder.mkdir(parents=True)
    write_adapter(folder, shape, config, random_tensors(shape, config, seed), str(model))
    return folder


def peft_logprobs(model: Path, adapter: Path | None, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """[N-1] of each sequence, nats."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    judge: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        judge = PeftModel.from_pretrained(judge, str(adapter)).eval()
    found = []
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.from_numpy(sequence.astype(np.int64))[None]
            logprobs = judge(ids).logits[0, :-1].log_softmax(-1)
            found.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy())
    return found


def assert_decoded_with(
    model: Path, folders: dict[str, Path], asks: Sequence[DecodeRequest], results: Sequence[DecodeResult]
) -> None:
    """Each result's log-probs are PEFT's with the request's adapter; those without a folder are of the bare model."""
    for adapter in dict.fromkeys(ask.adapter for ask in asks):
        own = [(ask, result) for ask, result in zip(asks, results, strict=True) if ask.adapter == adapter]
        whole = [np.concatenate([ask.token_ids, result.token_ids]) for ask, result in own]
        for (ask, result), right in zip(own, peft_logprobs(model, folders.get(adapter), whole), strict=True):
            assert len(result.token_ids) and result.version == (ask.adapter_version if adapter else 0), result
            of_tokens = right[len(ask.token_ids) - 1 :]
            np.testing.assert_allclose(result.logprobs, of_tokens, atol=1e-4, rtol=0, err_msg=ask.uid)


def assert_replaced_beside_others(
    pool: EnginePool,
    model: Path,
    folders: dict[str, Path],
    update: AdapterUpdate,
    own: Sequence[DecodeRequest],
    others: Sequence[DecodeRequest],
) -> int:
    """Requests of the adapter go on under its new version, with no key of the one before; those of others are undisturbed.

    Returns the number of tokens that the others got while the adapter came and was scored.
    """
    undisturbed = generate(pool, others, version=0)
    pool.submit(own, version=0)
    pool.submit(others, version=0)
    before = sum(pool.num_decoded())
    while sum(pool.num_decoded()) < before + 3 * len([*own, *others]):
        assert not pool.collect(0.0)
    parts = {result.uid: result for result in pool.drain(update.name)}
    assert set(parts) == {ask.uid for ask in own} and pool.num_under_way == len(others)
    for part in parts.values():
        assert part.finish is Finish.UNFINISHED and len(part.token_ids), part
        assert part.version == own[0].adapter_version
    before = sum(pool.num_decoded())
    pool.update_adapter(update)
    new, probe = {**folders, update.name: Path(update.path)}, [prompt(70, seed=3), prompt(41, seed=5)]
    for found in pool.score(probe, update.name):
        for logprobs, right in zip(found, peft_logprobs(model, Path(update.path), probe), strict=True):
            np.testing.assert_allclose(logprobs, right, atol=1e-4, rtol=0)
    num_beside = sum(pool.num_decoded()) - before
    rest = []
    for ask in own:
        known = np.concatenate([ask.token_ids, parts[ask.uid].token_ids])
        left = ask.max_new_tokens - len(parts[ask.uid].token_ids)
        rest.append(replace(ask, token_ids=known, max_new_tokens=left, adapter_version=update.version))
    pool.submit(rest, version=0)
    ended: dict[str, DecodeResult] = {}
    while pool.num_under_way:
        ended |= {result.uid: result for result in pool.collect(0.2)}
    for right in undisturbed:
        np.testing.assert_array_equal(ended[right.uid].token_ids, right.token_ids)
        np.testing.assert_allclose(ended[right.uid].logprobs, right.logprobs, atol=1e-4)
    asks = [*rest, *others]
    assert_decoded_with(model, new, asks, [ended[ask.uid] for ask in asks])
    assert min(ended[ask.uid].num_cached_tokens for ask in own) == 0  # the first of a group
    return num_beside


class GivenAdapter:
    """An adapter of the only rank."""

    def __init__(self, shape: ModelShape, adapter: AdapterConfig, tensors: dict[str, torch.Tensor]) -> None:
        self.shape, self.adapter, self.tensors = shape, adapter, tensors

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


class GivenAdapterLearner(GivenLearner):
    """A learner as far as the sync of an adapter needs one."""

    def __init__(self, held: GivenAdapter, scores: Callable[[], TrainerScores]) -> None:
        super().__init__({}, scores)
        self._adapter = held

    def held_adapter(self) -> GivenAdapter:
        return self._adapter
