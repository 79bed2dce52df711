"""Engines, processes, requests and tensors that the engine tests share."""

from __future__ import annotations

import functools
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Engine, EngineSpec, Sampling
from marsrl.rollout.engines.sampler import RowSampling, truncated
from marsrl.rollout.engines.vllm.arguments import vllm_environment
from marsrl.rollout.engines.vllm.engine import VllmEngine
from marsrl.rollout.imports import imports_for_good
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.weights.files import WeightFiles
from marsrl.rollout.weights.layout import box_of, stacked, whole_box
from marsrl.trainer.data.packing import PackedBatch
from marsrl.trainer.learner.other_roundings import Precision
from marsrl.trainer.weights.comparison import TrainerScores


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Read the HF-named tensors of a checkpoint."""
    files = WeightFiles(directory)
    return {name: files[name].clone() for name in files}


def spec_of(model: Path | str, max_model_len: int = 256, kind: str = "local", **more: Any) -> EngineSpec:
    """Return the spec of an engine, in float32 by default."""
    return EngineSpec(kind, str(model), max_model_len=max_model_len, **{"dtype": "float32", **more})


def vllm_of(model: Path, options: dict[str, Any], **more: Any) -> VllmEngine:
    """Start the real vLLM, in float32 by default."""
    os.environ.update(vllm_environment(threads=1))
    with imports_for_good():
        import vllm.entrypoints.llm  # noqa: F401
    vllm_options = VllmOptions.model_validate({"max_num_seqs": 32, "kv_cache_mib": 32, **options})
    return VllmEngine(spec_of(model, kind="vllm", dtype=vllm_options.dtype or "float32", vllm=vllm_options, **more))


@torch.no_grad()
def logprobs_of(model: Any, sequence: np.ndarray) -> np.ndarray:
    """Return the log-probs [N-1], in nats, that a model of transformers computes."""
    ids = torch.from_numpy(sequence.astype(np.int64))[None]
    logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()


def perturbed(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    """Return the tensors, with noise on all whose names contain `part` (at least one)."""
    generator = torch.Generator().manual_seed(0)
    assert any(part in name for name in tensors), (part, sorted(tensors))
    return {n: t + 0.1 * torch.randn(t.shape, generator=generator) if part in n else t for n, t in tensors.items()}


class WholeModel:
    """HeldWeights of a single rank. exported: tensors that a sync by files writes."""

    device = torch.device("cpu")

    def __init__(self, tensors: dict[str, torch.Tensor], exported: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._exported = exported
        self.shapes = stacked({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        boxes = {name: whole_box(shape) for name, shape in self.shapes.items()}
        self.boxes_of_ranks = [boxes]
        self._stacks = {name: torch.empty(box.shape) for name, box in boxes.items()}
        for name, tensor in tensors.items():
            stack, box = box_of(name, tensor.shape)
            box.of(self._stacks[stack]).copy_(whole_box(tensor.shape).of(tensor))

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._exported)

    def stack(self, name: str) -> torch.Tensor:
        return self._stacks[name]


class GivenLearner:
    """The part of a learner that a sync needs: its weights, and scores of the comparison's sequences."""

    vocab_size, align, sleeps = 160, 1, False

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        scores: Callable[[], TrainerScores],
        exported: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        """Create the learner. exported: tensors that a sync by files writes; default: `tensors`."""
        self._held = WholeModel(tensors, tensors.items() if exported is None else exported)
        self._scores = functools.cache(scores)

    def held(self) -> WholeModel:
        return self._held

    def score(self, batches: Sequence[PackedBatch], *, rounded_as: Precision | None = None) -> list[torch.Tensor]:
        """Score the batch of the comparison; no other batch is requested."""
        scores = self._scores()
        logprobs = torch.zeros(batches[0].num_tokens)
        logprobs[batches[0].trained_rows] = torch.from_numpy(
            np.concatenate(scores.logprobs if rounded_as is None else scores.rounded)
        )
        return [logprobs]


# Largest difference, in nats, between two float32 forwards of a tiny model that add in different orders, because their engines or
# batches differ. Two layers and the head each add about 64 products with a sum of about 10: 3 * 2 sqrt(64) 2^-24 * 10 = 3e-5.
ROUNDING = 1e-4


def assert_drawn_from(model: Any, ask: DecodeRequest, result: DecodeResult) -> None:
    """Check that log-probs and kept tokens follow the distribution of our sampler on transformers' logits."""
    whole, n = np.concatenate([ask.token_ids, result.token_ids]).astype(np.int64), len(result.token_ids)
    with torch.no_grad():
        logits = model(torch.from_numpy(whole)[None]).logits[0, len(ask.token_ids) - 1 : -1]
    scaled = truncated(logits, RowSampling.of([ask.sampling] * n, torch.device("cpu")))
    right = scaled.log_softmax(-1).gather(-1, torch.from_numpy(whole[-n:])[:, None])[:, 0]
    np.testing.assert_allclose(result.logprobs, right.numpy(), atol=ROUNDING, rtol=0)
    assert (result.kept_tokens is not None) == ask.sampling.records_kept
    if result.kept_tokens is not None:
        kept = [np.flatnonzero(row > -np.inf) for row in scaled.numpy()]
        np.testing.assert_array_equal(result.kept_tokens.counts, [len(ids) for ids in kept])
        np.testing.assert_array_equal(result.kept_tokens.ids, np.concatenate(kept))


def request(
    uid: str, token_ids: np.ndarray, num_new: int, *, seed: int = 0, experts_from: int | None = None, **sampling: Any
) -> DecodeRequest:
    ids, group = token_ids.astype(np.int32), uid.split(".")[0]
    return DecodeRequest(uid, ids, num_new, Sampling(**sampling), seed, group, experts_from=experts_from)


def pool_of(*engines: Engine, **options: Any) -> EnginePool:
    """Return a pool of these engines in this process."""
    return EnginePool(LocalReplicas(engines), **options)


def decoded(engine: Engine, requests: Sequence[DecodeRequest], version: int = 0) -> list[DecodeResult]:
    """Decode all requests to their ends on this engine alone."""
    return generate(pool_of(engine), requests, version)


def generate(
    pool: EnginePool,
    requests: Sequence[DecodeRequest],
    version: int = 0,
    progress: Callable[[int], None] = lambda tokens: None,
    *,
    at_once: bool = True,
) -> list[DecodeResult]:
    """Submit all requests, as a stage does; return their results in the same order.

    progress: called with the number of tokens decoded so far.
    """
    before, others = sum(pool.num_decoded()), pool.num_under_way
    pool.give_weights()
    pool.submit(requests, version=version, at_once=at_once)
    results: dict[str, DecodeResult] = {}
    while len(results) < len(requests):
        ended = pool.collect(0.2, is_urgent=not at_once)
        assert not results.keys() & {result.uid for result in ended}
        results.update((result.uid, result) for result in ended)
        assert pool.num_under_way == others + len(requests) - len(results)
        progress(sum(pool.num_decoded()) - before)
    return [results[request.uid] for request in requests]


def assert_same(results: Iterable[DecodeResult], expected: Sequence[DecodeResult]) -> None:
    """Check that the results, in any order, equal the expected ones; log-probs may differ by ROUNDING."""
    by_uid = {result.uid: result for result in results}
    for right in expected:
        result = by_uid[right.uid]
        np.testing.assert_array_equal(result.token_ids, right.token_ids)
        np.testing.assert_allclose(result.logprobs, right.logprobs, atol=ROUNDING)
        assert (result.finish, result.version) == (right.finish, right.version)
        kept = [each and (each.counts.tolist(), each.ids.tolist()) for each in (result.kept_tokens, right.kept_tokens)]
        assert kept[0] == kept[1]


def prompt(length: int, seed: int = 0, vocab_size: int = 160) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, vocab_size, length).astype(np.int32)


def after(condition: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    """Start a thread that waits for the condition, then acts."""

    def run() -> None:
        while not condition():
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files, so that writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def descendants(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the descendants of a process (default: this one)."""
    return (process or psutil.Process()).children(recursive=True)


def actors(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the engine processes among the descendants of a process (default: this one), oldest first."""
    processes = []
    for each in descendants(process):
        with suppress(psutil.NoSuchProcess):  # the process has ended meanwhile
            if each.name().startswith("ray::Engine"):
                processes.append(each)
    return sorted(processes, key=lambda each: each.create_time())
