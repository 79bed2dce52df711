"""Trained agents with top_p or top_k: what the sampler kept reaches the learner, whose log-probs are then the rollout's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import decoded
from letters import AGENTS, LetterRenderer, judge, letter_problems
from safetensors.torch import load_file, save_file
from trained import train_sequences

from marsrl.kernels import PolicyObjective
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import DecodeRequest, Sampling, WeightUpdate
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.player.completion import Completion
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.player.stages import RolloutState
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.state import decode, encode
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.types import Finish, Sample
from marsrl.trainer.config import MptConfig, OptimizerConfig, PolicyConfig
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import Update, micro_batches
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.models.init_model import InitShape, init_model

MOST = 12
SOLVER = AgentConfig(temperature=0.8, top_p=0.9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sure enough of itself that top_p leaves a few of 320 tokens, and more than MOST at some places."""
    torch.set_num_threads(1)
    made = init_model(
        InitShape(64, 2, 4, 2, 32, 4, 2, 48, vocab_size=320), "bytes", tmp_path_factory.mktemp("made") / "model"
    )
    file = made / "model.safetensors"
    save_file({n: w * 8 if n == "lm_head.weight" else w for n, w in load_file(file).items()}, file, {"format": "pt"})
    return made


@pytest.fixture(scope="module")
def other_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    other = tmp_path_factory.mktemp("other") / "model"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tensors = {n: w * (1 + 0.2 * torch.randn_like(w)) for n, w in load_file(model / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    return other


@pytest.fixture(autouse=True)
def _own_groups() -> Iterator[None]:
    yield
    parallel.stop()


def engine_of(model: Path, **options: int) -> LocalEngine:
    return LocalEngine(model, dtype="float32", max_model_len=1024, **options)


def played(engine: LocalEngine, segments: int = 1, other: Path | None = None, **solver: object) -> list[Sample]:
    """The Solver's samples of one step; the other weights arrive after the first of their segments, as does a checkpoint."""
    config = RolloutConfig.model_validate(
        {"engine": "local", "prompts_per_step": 2, "group_size": 3, "max_response_tokens": 24, "segments": segments}
    )
    agents = {name: AgentConfig() for name in AGENTS} | {"solver": SOLVER.model_copy(update=solver)}
    orchestration = build_orchestration("verifier_corrector", agents, "math", None, config)
    pool = EnginePool(LocalReplicas([engine]), slots=32, deadline_s=60)
    team = Team(
        agents,
        orchestration,
        {"main": LetterRenderer()},
        {"main": pool},
        WatchedJudge(judge),
        max_kept={"solver": MOST},  # type: ignore[dict-item, arg-type]
    )
    rollout = Rollout(config, team, letter_problems(4), seed=0)
    groups = rollout.next_batch({"main": 0}).groups
    if other is not None:
        assert not groups
        engine.update_weights(WeightUpdate(str(other / "model.safetensors"), 1))
        kept = decode(RolloutState, encode(rollout.snapshot()))
        rollout = Rollout(config, team, letter_problems(4), seed=0)
        rollout.restore(kept)
        groups = tuple(group for group in rollout.next_batch({"main": 1}).groups if group.rollout_id <= "000002")
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == 6 and decode(Sample, encode(samples[0])).kept_tokens is not None
    return samples


def step(
    model: Path,
    sequences: list[TrainSequence],
    objective: PolicyObjective | None = None,
    mpt: MptConfig | None = None,
    old_policy: str = "sais",
    reference: Path | None = None,
) -> StepStats:
    """The statistics of an update that leaves the weights as they are."""
    learner = Learner(
        PolicyConfig(dtype="float32", optimizer=OptimizerConfig(lr=0.0)),
        model,
        objectives=[objective or PolicyObjective(clip_low=0.01, clip_high=0.01)],
        mpt=mpt or MptConfig(scope="off"),
        total_steps=2,
        seed=0,
        old_policy=old_policy,  # type: ignore[arg-type]
        reference_dir=reference,
    )
    stats = learner.train_step([Update(tuple(micro_batches(sequences, learner.shard(4000))), 100.0)])
    parallel.stop()
    return stats


def scaled_logits(engine: LocalEngine, prompt: np.ndarray, completion: np.ndarray) -> torch.Tensor:
    """[N, V] float64 logits over temperature at the completion's places."""
    with torch.inference_mode():
        hidden = engine._prefill([np.concatenate([prompt, completion])], None)[len(prompt) - 1 : -1]
        return engine._model.logits(hidden).double() / SOLVER.temperature


def nucleus(logits: torch.Tensor, top_p: float, most: int) -> set[int]:
    """The likeliest tokens, `most` at most, until they have top_p of what these have."""
    order = logits.argsort(descending=True)[:most]
    reached = logits[order].softmax(0).cumsum(0)
    return set(order[: int((reached < top_p).sum()) + 1].tolist())


def test_the_engine_says_what_it_drew_from_and_log_probs_are_of_that(model: Path) -> None:
    engine = engine_of(model, max_num_seqs=3)  # rows end, are dropped, and others join on the way
    rng = np.random.default_rng(0)
    asks = [
        DecodeRequest(
            str(i),
            rng.integers(2, 256, 9 + i).astype(np.int32),
            4 + 5 * (i % 4),
            Sampling(SOLVER.temperature, (1.0, 0.9, 0.6)[i % 3], MOST, records_kept=i != 3),
            i,
            str(i),
        )
        for i in range(8)
    ]
    results = decoded(engine, asks, version=0)
    sizes = []
    for ask, result in zip(asks, results, strict=True):
        if not ask.sampling.records_kept:
            assert result.kept_tokens is None
            continue
        kept = result.kept_tokens
        assert kept is not None and len(kept.counts) == len(result.token_ids)
        rows = np.split(kept.ids, kept.counts.cumsum()[:-1])
        for row, logits, token, logprob in zip(
            rows, scaled_logits(engine, ask.token_ids, result.token_ids), result.token_ids, result.logprobs, strict=True
        ):
            assert set(row.tolist()) == nucleus(logits, ask.sampling.top_p, MOST) and int(token) in set(row.tolist())
            share = logits[row.astype(np.int64)].softmax(0)[row.tolist().index(token)]
            assert float(share.log()) == pytest.approx(float(logprob), abs=1e-4)
        sizes += kept.counts.tolist()
    assert max(sizes) == MOST and min(sizes) < MOST / 2
    plain = [replace(ask, sampling=replace(ask.sampling, records_kept=False)) for ask in asks]
    again = decoded(engine_of(model, max_num_seqs=3), plain, version=0)
    assert [r.logprobs.tobytes() for r in again] == [r.logprobs.tobytes() for r in results]


def test_an_aborted_segment_and_the_next_one_leave_no_place_out(model: Path) -> None:
    engine, tokens = engine_of(model), np.arange(5, 25, dtype=np.int32)
    ask = DecodeRequest("7", tokens, 40, Sampling(top_p=0.9, records_kept=True), 7, "7")
    engine.submit([ask], version=0)
    for _ in range(5):
        assert engine.collect(0.0) == []
    engine.abort()
    (first,) = engine.collect(0.0)
    assert first.finish is Finish.UNFINISHED and first.kept_tokens is not None
    assert len(first.kept_tokens.counts) == len(first.token_ids) == 5
    completion = Completion()
    completion.extend(first)
    completion.go_on_with(np.array([9, 9], np.int32))
    unrecorded = replace(first, token_ids=first.token_ids[:1], logprobs=first.logprobs[:1], kept_tokens=None)
    completion.extend(unrecorded)  # of a sampler that left nothing out
    assert completion.kept_tokens is not None
    assert completion.kept_tokens.counts.tolist() == [*first.kept_tokens.counts.tolist(), 0, 0, 0]
    assert completion.kept_tokens.ids.tolist() == first.kept_tokens.ids.tolist()


def test_under_the_same_weights_trainer_and_rollout_agree_and_would_not_without_what_was_kept(model: Path) -> None:
    samples = played(engine_of(model))
    # 0.9 of the bound's
    assert 5 < max(s.kept_tokens.counts.max() for s in samples if s.kept_tokens is not None) < MOST
    stats = step(model, train_sequences(samples, SOLVER.temperature))
    assert stats.prob_diff_max < 1e-5 and abs(stats.k3) < 1e-8
    assert sum(stats.agent_sums["clipped_tokens"]) == 0  # ratios to the rollout's log-probs are 1 within a hundredth
    ignored = step(model, [replace(each, kept_tokens=None) for each in train_sequences(samples, SOLVER.temperature)])
    assert ignored.prob_diff_max > 0.01 and sum(ignored.agent_sums["clipped_tokens"]) > 0
    one_less = train_sequences(samples, SOLVER.temperature)
    one_less = [replace(one_less[0], kept_tokens=without_one(one_less[0])), *one_less[1:]]
    assert step(model, one_less).prob_diff_max > 1e-3


def without_one(sequence: TrainSequence) -> KeptTokens:
    """The kept tokens without the first one that was not drawn at its place."""
    kept = sequence.kept_tokens
    assert kept is not None
    place = np.arange(len(kept.counts)).repeat(kept.counts)
    at = int(np.flatnonzero(kept.ids != sequence.token_ids[place])[0])
    counts = kept.counts.copy()
    counts[place[at]] -= 1
    return KeptTokens(np.delete(kept.ids, at), counts)


def test_a_segment_that_is_carried_over_keeps_what_the_weights_that_decoded_it_kept(
    model: Path, other_model: Path
) -> None:
    engine = engine_of(model)
    samples = played(engine, 2, other_model)
    for sample in samples:
        first, second = sample.segments
        assert (first.version, second.version) == (0, 1) and (first.end, second.end) == (12, 24)
        assert sample.kept_tokens is not None and (sample.kept_tokens.counts > 0).all()
        rows = np.split(sample.kept_tokens.ids, sample.kept_tokens.counts.cumsum()[:-1])
        old, new = (scaled_logits(each, sample.prompt_ids, sample.token_ids) for each in (engine_of(model), engine))
        right = [nucleus(logits, 0.9, MOST) for logits in torch.cat([old[:12], new[12:]])]
        assert [set(row.tolist()) for row in rows] == right
        assert right[:12] != [nucleus(logits, 0.9, MOST) for logits in new[:12]]
    # the first segment is of other weights
    assert step(other_model, train_sequences(samples, SOLVER.temperature)).prob_diff_max > 0.01


def test_recomputed_log_probs_and_a_reference_are_of_what_was_kept_too(model: Path, other_model: Path) -> None:
    """Under the same weights the ratio is 1 and the divergence 0, however little was kept."""
    sequences = train_sequences(played(engine_of(model)), SOLVER.temperature)
    objective = PolicyObjective(clip_low=1e-4, clip_high=1e-4, kl="k3", kl_coef=0.1)
    stats = step(model, sequences, objective, old_policy="recompute", reference=model)
    assert sum(stats.agent_sums["clipped_tokens"]) == 0 and abs(sum(stats.agent_sums["kl"])) < 1e-6
    stats = step(model, sequences, objective, old_policy="recompute", reference=other_model)
    assert sum(stats.agent_sums["kl"]) > 0.1


def test_mastered_tokens_are_found_by_what_was_kept_or_by_the_model_s_own_distribution(model: Path) -> None:
    sequences = train_sequences(played(engine_of(model), top_k=1), SOLVER.temperature)
    stats = step(model, sequences, mpt=MptConfig())  # one token kept: p = 1, entropy 0
    assert stats.gated_samples == 3 and not any(logprobs.any() for logprobs in stats.logprobs)
    assert stats.grad_norm == 0
    assert step(model, sequences, mpt=MptConfig(temperature=1)).gated_samples == 0
