"""The kept tokens and experts that the local engine records reach the learner, also if a sample has several segments.

With them, the learner computes the rollout's log-probs under top_p or top_k, and router replay R3 forces the recorded experts.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_cases
import megatron_models
import numpy as np
import pytest
import torch
from engine_cases import assert_drawn_from, decoded, pool_of, prompt, spec_of
from letters import AGENTS, letter_problems, make_team
from megatron_models import learner, micro_batches, own_groups  # noqa: F401
from safetensors.torch import load_file, save_file

from marsrl.kernels import PolicyObjective
from marsrl.rollout.config import AgentConfig, LocalOptions, RolloutConfig
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import DecodeRequest, WeightUpdate
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.player.stages import RolloutState, Stages
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Finish, Group, IntArray, Reward, Sample
from marsrl.trainer.config import CreditConfig, MptConfig, OptimizerConfig
from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.models.init_model import SMALL, init_model

LAYERS, EXPERTS, TOP_K = 2, 8, 2
MOST = 12  # maximum tokens kept at a position
CUT = {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model so confident that top_p keeps a few of 320 tokens, but more than MOST at some positions."""
    torch.set_num_threads(1)
    shape = replace(SMALL, num_layers=LAYERS, vocab_size=320, num_experts=EXPERTS, experts_per_token=TOP_K)
    made = init_model(shape, "bytes", tmp_path_factory.mktemp("made") / "model")
    file = made / "model.safetensors"
    save_file({n: w * 8 if n == "lm_head.weight" else w for n, w in load_file(file).items()}, file, {"format": "pt"})
    return made


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    torch.manual_seed(1)
    folder = shutil.copytree(model, tmp_path_factory.mktemp("other") / "model")
    tensors = {n: w * (1 + 0.2 * torch.randn_like(w)) for n, w in load_file(model / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def engine_of(model: Path, max_num_seqs: int = 256) -> LocalEngine:
    return LocalEngine(spec_of(model, 1024, local=LocalOptions(max_num_seqs=max_num_seqs)))


def request(uid: str, tokens: IntArray, num_new: int, experts_from: int | None = 0, **sampling: Any) -> DecodeRequest:
    records = {"top_k": MOST, "records_kept": True}
    return engine_cases.request(
        uid, tokens, num_new, seed=int(uid), experts_from=experts_from, **{**CUT, **records, **sampling}
    )


def chosen(engine: LocalEngine, tokens: IntArray, version: int = 0) -> ExpertArray:
    """Return the experts [tokens, layers, K] that a plain prefill of these tokens chooses."""
    (result,) = decoded(engine, [request("0", tokens, 1)], version=version)
    assert result.routed_experts is not None
    return result.routed_experts


def played(engine: LocalEngine, segments: int = 1, other: Path | None = None, **solver: Any) -> list[Sample]:
    """Return the Solver's samples of one step.

    other: weights that the engine loads after the first segment; the rollout is saved and restored then, too.
    """
    config = RolloutConfig.model_validate(
        {"engine": "local", "prompts_per_step": 2, "group_size": 3, "max_response_tokens": 24, "segments": segments}
    )
    agents = {name: AgentConfig() for name in AGENTS} | {"solver": AgentConfig(**{**CUT, **solver})}
    orchestration = build_orchestration("verifier_corrector", agents, "math", None, config)
    records = {"records_experts": frozenset({"main"}), "max_kept": {"solver": MOST}}
    team = make_team(agents, orchestration, pool_of(engine, slots=32, deadline_s=60), **records)
    rollout = Rollout(Stages(config, team, letter_problems(4), seed=0))
    groups = rollout.next_batch({"main": 0}).groups
    if other is not None:
        assert not groups
        engine.update_weights(WeightUpdate(str(other / "model.safetensors"), 1))
        kept = decode(RolloutState, encode(rollout.snapshot()))
        rollout = Rollout(Stages(config, team, letter_problems(4), seed=0))
        rollout.restore(kept)
        groups = tuple(group for group in rollout.next_batch({"main": 1}).groups if group.rollout_id <= "000002")
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == 6 and all(s.kept_tokens is not None and s.routed_experts is not None for s in samples)
    return samples


def train_sequences(samples: Sequence[Sample]) -> list[TrainSequence]:
    """Return training sequences of the samples, of which every second one counts as right."""
    judged = [replace(sample, reward=Reward(index % 2, index % 2)) for index, sample in enumerate(samples)]
    group = Group("g", "000001", "solver", tuple(judged))
    return list(credit([group], CreditConfig(), {"solver": AgentConfig(**CUT)}).sequences)


def learner_of(model: Path, **options: Any) -> Learner:
    """Return a learner whose updates leave the weights unchanged."""
    given = {"old_policy": "sais", "router_replay": "rollout", "optimizer": OptimizerConfig(lr=0.0), **options}
    return learner(model, objective=PolicyObjective(clip_low=0.01, clip_high=0.01), **given)


def step(model: Path, sequences: list[TrainSequence], **options: Any) -> StepStats:
    stats = megatron_models.step(learner_of(model, **options), micro_batches(sequences, 1))
    parallel.stop()
    return stats


def test_the_engine_records_kept_tokens_and_a_prefill_s_experts(model: Path) -> None:
    engine = engine_of(model, max_num_seqs=4)  # fewer rows than requests, so that rows end and others join
    asks = [
        request(str(i), prompt(5 + 3 * (i // 2), i // 2), 4 + 7 * (i % 4), None if i == 3 else 0,
                top_p=(1.0, 0.9, 0.6)[i % 3], records_kept=i != 4)
        for i in range(9)
    ]  # fmt: skip
    results, prefills = decoded(engine, asks), engine_of(model)
    right = megatron_models.scoring_model(model)
    for ask, result in zip(asks, results, strict=True):
        assert_drawn_from(right, ask, result)
        assert (result.routed_experts is None) == (ask.experts_from is None)
        if result.routed_experts is not None:
            fed = np.concatenate([ask.token_ids, result.token_ids])[:-1]
            assert result.routed_experts.dtype == np.uint8 and result.routed_experts.shape == (len(fed), LAYERS, TOP_K)
            np.testing.assert_array_equal(np.sort(result.routed_experts), np.sort(chosen(prefills, fed)))
    sizes = [count for result in results if result.kept_tokens for count in result.kept_tokens.counts]
    assert max(sizes) == MOST and min(sizes) < MOST / 2
    plain = [replace(a, experts_from=None, sampling=replace(a.sampling, records_kept=False)) for a in asks]
    again = decoded(engine_of(model, max_num_seqs=4), plain)
    assert [r.logprobs.tobytes() for r in again] == [r.logprobs.tobytes() for r in results]


def test_an_aborted_segment_and_the_next_one_leave_no_token_out(model: Path) -> None:
    engine, tokens = engine_of(model), prompt(20, 0)
    engine.submit([request("7", tokens, 40)], version=0)
    for _ in range(5):
        assert engine.collect(0.0) == []
    engine.abort()
    (first,) = engine.collect(0.0)
    assert first.finish is Finish.UNFINISHED and first.kept_tokens is not None and first.routed_experts is not None
    assert len(first.kept_tokens.counts) == len(first.token_ids) == 5
    so_far = np.concatenate([tokens, first.token_ids])
    assert len(first.routed_experts) == len(so_far) - 1
    (rest,) = decoded(engine, [request("7", so_far, 10, len(first.routed_experts))])
    assert rest.routed_experts is not None
    both = np.concatenate([first.routed_experts, rest.routed_experts])
    whole = chosen(engine, np.concatenate([so_far, rest.token_ids])[:-1])
    np.testing.assert_array_equal(np.sort(both), np.sort(whole))


def test_trainer_and_rollout_agree_only_with_the_record(model: Path) -> None:
    samples = played(engine_of(model))
    # top_p keeps several tokens, but never as many as the bound.
    assert 5 < max(s.kept_tokens.counts.max() for s in samples if s.kept_tokens is not None) < MOST
    sequences = train_sequences(samples)
    stats = step(model, sequences)
    assert stats.replay is not None and stats.replay.choices_differ == 0
    assert stats.replay.tokens == sum(len(s.prompt_ids) + len(s.token_ids) - 1 for s in samples)
    assert stats.prob_diff_max < 1e-5 and abs(stats.k3) < 1e-8
    assert sum(stats.agent_sums["clipped_tokens"]) == 0  # ratios to the rollout's log-probs are 1 within a hundredth
    ignored = step(model, [replace(each, kept_tokens=None) for each in sequences])
    assert ignored.prob_diff_max > 0.01 and sum(ignored.agent_sums["clipped_tokens"]) > 0


def test_each_segment_keeps_the_record_of_its_own_weights(model: Path, other: Path) -> None:
    engine, before, differ = engine_of(model), engine_of(model), 0
    samples = played(engine, 2, other)
    for sample in samples:
        first, second = sample.segments
        assert (first.version, second.version) == (0, 1) and (first.end, second.end) == (12, 24)
        assert sample.routed_experts is not None and sample.kept_tokens is not None
        fed = np.concatenate([sample.prompt_ids, sample.token_ids])[:-1]
        cut = len(sample.prompt_ids) + first.end - 1  # the second version feeds the first segment's last token
        old, new = chosen(before, fed), chosen(engine, fed, version=1)
        assert sample.routed_experts.shape == old.shape
        np.testing.assert_array_equal(np.sort(sample.routed_experts[:cut]), np.sort(old[:cut]))
        np.testing.assert_array_equal(np.sort(sample.routed_experts[cut:]), np.sort(new[cut:]))
        differ += int((np.sort(old) != np.sort(new)).any((1, 2)).sum())
        assert len(sample.kept_tokens.counts) == 24 and (sample.kept_tokens.counts > 0).all()
    assert differ > 20  # the two versions choose differently, so the record must be of the right one
    for weights, segment in ((model, slice(0, 12)), (other, slice(12, 24))):
        sequences = train_sequences(samples)
        (batch,) = micro_batches(sequences, 1)
        (scored,) = learner_of(weights, router_replay="none").score([batch])
        ends = np.cumsum([len(sequence.token_ids) for sequence in sequences])
        for sequence, logprobs in zip(sequences, np.split(scored[batch.mask].numpy(), ends[:-1]), strict=True):
            np.testing.assert_allclose(logprobs[segment], sequence.rollout_logprobs[segment], atol=1e-4)
        parallel.stop()
    stats = step(other, train_sequences(samples))
    assert stats.replay is not None and stats.replay.tokens_differ > 0 and stats.prob_diff_max > 0.01


def test_mastered_tokens_follow_the_kept_or_full_distribution(model: Path) -> None:
    sequences = train_sequences(played(engine_of(model), top_k=1))
    stats = step(model, sequences, mpt=MptConfig())  # one token kept: p = 1, entropy 0
    assert stats.gated_samples == 3 and not any(stats.agent_sums["nll"])
    assert stats.grad_norm == 0
    assert step(model, sequences, mpt=MptConfig(temperature=1)).gated_samples == 0
