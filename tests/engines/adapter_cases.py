"""Adapters with random numbers, and their judge: PEFT on transformers, float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import GivenLearner

from marsrl.rollout.adapter import AdapterConfig, tensor_shapes, write_adapter
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.model_shape import ModelShape, read_shape
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
