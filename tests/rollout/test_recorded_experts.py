"""Router replay R3: what the local engine records of a sample's experts reaches the learner, over segments too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import engine_cases
import numpy as np
import pytest
import torch
from engine_cases import decoded, prompt
from letters import AGENTS, LetterRenderer, judge, letter_problems
from safetensors.torch import load_file, save_file
from trained import train_sequences

from marsrl.kernels import PolicyObjective
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import DecodeRequest, WeightUpdate
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.player.stages import RolloutState
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.state import decode, encode
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.types import Finish, IntArray, Sample
from marsrl.trainer.config import MptConfig, OptimizerConfig, PolicyConfig
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import BatchShard, Update, micro_batches
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.models.init_model import InitShape, init_model

LAYERS, EXPERTS, TOP_K = 2, 8, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    shape = InitShape(64, LAYERS, 4, 2, 32, EXPERTS, TOP_K, 48, vocab_size=320)
    return init_model(shape, "bytes", tmp_path_factory.mktemp("made") / "model")


@pytest.fixture(scope="module")
def other_weights(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(1)
    file = tmp_path_factory.mktemp("other") / "model.safetensors"
    save_file({n: w + 0.03 * torch.randn_like(w) for n, w in load_file(model / "model.safetensors").items()}, file)
    return str(file)


@pytest.fixture(autouse=True)
def _own_groups() -> Iterator[None]:
    yield
    parallel.stop()


def engine_of(model: Path, **options: int) -> LocalEngine:
    return LocalEngine(model, dtype="float32", max_model_len=1024, **options)


def request(uid: str, tokens: IntArray, num_new: int, experts_from: int | None = 0) -> DecodeRequest:
    return engine_cases.request(uid, tokens, num_new, seed=int(uid), experts_from=experts_from)


def chosen(engine: LocalEngine, tokens: IntArray, version: int = 0) -> ExpertArray:
    """[tokens, layers, K] of a plain prefill."""
    (result,) = decoded(engine, [request("0", tokens, 1)], version=version)
    assert result.routed_experts is not None
    return result.routed_experts


def test_tokens_decoded_one_by_one_in_a_changing_batch_record_what_a_prefill_chooses(model: Path) -> None:
    engine = engine_of(model, max_num_seqs=4)  # rows end, are dropped, and others join on the way
    asks = [request(str(i), prompt(5 + 3 * (i // 2), i // 2), 4 + 7 * (i % 4), 0 if i != 3 else None) for i in range(9)]
    results = decoded(engine, asks, version=0)
    judge_engine = engine_of(model)
    assert results[3].routed_experts is None
    for ask, result in zip(asks, results, strict=True):
        if ask.experts_from is None:
            continue
        assert result.routed_experts is not None and result.routed_experts.dtype == np.uint8
        fed = np.concatenate([ask.token_ids, result.token_ids])[:-1]
        assert result.routed_experts.shape == (len(fed), LAYERS, TOP_K)
        np.testing.assert_array_equal(np.sort(result.routed_experts), np.sort(chosen(judge_engine, fed)))
    plain = decoded(engine_of(model, max_num_seqs=4), [replace(ask, experts_from=None) for ask in asks], version=0)
    assert [r.logprobs.tobytes() for r in plain] == [r.logprobs.tobytes() for r in results]


def test_an_aborted_segment_and_the_next_one_leave_no_token_out(model: Path) -> None:
    engine, tokens = engine_of(model), prompt(20, 0)
    engine.submit([request("7", tokens, 40)], version=0)
    for _ in range(5):
        assert engine.collect(0.0) == []
    engine.abort()
    (first,) = engine.collect(0.0)
    assert first.finish is Finish.UNFINISHED and first.routed_experts is not None
    so_far = np.concatenate([tokens, first.token_ids])
    assert len(first.routed_experts) == len(so_far) - 1
    (rest,) = decoded(engine, [request("7", so_far, 10, len(first.routed_experts))], version=0)
    assert rest.routed_experts is not None
    both = np.concatenate([first.routed_experts, rest.routed_experts])
    whole = chosen(engine, np.concatenate([so_far, rest.token_ids])[:-1])
    np.testing.assert_array_equal(np.sort(both), np.sort(whole))


def test_a_model_without_experts_says_that_it_records_none(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=300, hidden_size=32, head_dim=16, **sizes)).save_pretrained(tmp_path)
    (result,) = decoded(engine_of(tmp_path), [request("1", prompt(4, 0), 2)], version=0)
    assert result.finish is Finish.ERROR and "Qwen3ForCausalLM has none" in result.error


def team_of(engine: LocalEngine, records: frozenset[str] = frozenset({"main"})) -> Team:
    agents = {name: AgentConfig() for name in AGENTS}
    pool = EnginePool(LocalReplicas([engine]), slots=32, deadline_s=60)
    orchestration = build_orchestration("verifier_corrector", agents, "math", None, RolloutConfig(group_size=3))
    return Team(agents, orchestration, {"main": LetterRenderer()}, {"main": pool}, WatchedJudge(judge), records)  # type: ignore[dict-item]


def played(engine: LocalEngine, segments: int, other_weights: str | None) -> list[Sample]:
    """The Solver's samples of one step; other_weights arrive after the first of their segments, as does a checkpoint."""
    config = RolloutConfig.model_validate(
        {"engine": "local", "prompts_per_step": 2, "group_size": 3, "max_response_tokens": 24, "segments": segments}
    )
    rollout = Rollout(config, team_of(engine), letter_problems(4), seed=0)
    groups = rollout.next_batch({"main": 0}).groups
    if other_weights is not None:
        assert not groups
        engine.update_weights(WeightUpdate(other_weights, 1))
        kept = decode(RolloutState, encode(rollout.snapshot()))
        rollout = Rollout(config, team_of(engine), letter_problems(4), seed=0)
        rollout.restore(kept)
        groups = tuple(group for group in rollout.next_batch({"main": 1}).groups if group.rollout_id <= "000002")
    return [sample for group in groups for sample in group.samples]


def learner_of(model: Path, router_replay: str = "rollout", old_policy: str = "pois") -> Learner:
    return Learner(
        PolicyConfig(dtype="float32", optimizer=OptimizerConfig(lr=0.0)),
        model,
        objectives=[PolicyObjective()],
        mpt=MptConfig(scope="off"),
        total_steps=2,
        seed=0,
        old_policy=old_policy,  # type: ignore[arg-type]
        router_replay=router_replay,  # type: ignore[arg-type]
    )


def update(sequences: list[TrainSequence]) -> Update:
    return Update(tuple(micro_batches(sequences, BatchShard(0, 1, 4000, 1))), 100.0)


def test_under_the_same_weights_no_expert_differs_and_log_probs_agree(model: Path) -> None:
    samples = played(engine_of(model), 1, None)
    assert len(samples) == 6 and all(s.routed_experts is not None for s in samples)
    learner = learner_of(model)
    stats = learner.train_step([update(train_sequences(samples, 1.0))])
    assert stats.replay is not None and stats.replay.choices_differ == 0
    assert stats.replay.tokens == sum(len(s.prompt_ids) + len(s.token_ids) - 1 for s in samples)
    assert stats.prob_diff_max < 1e-5 and abs(stats.k3) < 1e-8


def test_a_segment_that_is_carried_over_keeps_the_experts_of_the_weights_that_decoded_it(
    model: Path, other_weights: str
) -> None:
    engine = engine_of(model)
    samples = played(engine, 2, other_weights)
    assert len(samples) == 6
    before, differ = engine_of(model), 0
    for sample in samples:
        assert sample.routed_experts is not None
        (first, second) = sample.segments
        assert (first.version, second.version) == (0, 1) and (first.end, second.end) == (12, 24)
        fed = np.concatenate([sample.prompt_ids, sample.token_ids])[:-1]
        cut = len(sample.prompt_ids) + first.end - 1  # the last token of the first segment is fed by the second version
        old, new = chosen(before, fed), chosen(engine, fed, version=1)
        assert sample.routed_experts.shape == old.shape
        np.testing.assert_array_equal(np.sort(sample.routed_experts[:cut]), np.sort(old[:cut]))
        np.testing.assert_array_equal(np.sort(sample.routed_experts[cut:]), np.sort(new[cut:]))
        differ += int((np.sort(old) != np.sort(new)).any((1, 2)).sum())
    assert differ > 20  # the two versions choose differently, so the record could have been of either
    stats = learner_of(model).train_step([update(train_sequences(samples, 1.0))])
    assert stats.replay is not None and stats.replay.tokens_differ > 0


def test_old_log_probs_are_of_the_forced_experts_too(model: Path, other_weights: str) -> None:
    """Else the ratio of the first update would not be 1, and the loss not that of the pseudo on-policy."""
    sequences = train_sequences(played(engine_of(model), 2, other_weights), 1.0)
    losses, clipped = [], []
    for old_policy in ("pois", "recompute"):
        learner = learner_of(model, old_policy=old_policy)
        whole = update(sequences)
        (batch,) = whole.micro_batches
        stats = learner.train_step([whole])
        losses.append(stats.loss)
        clipped.append(sum(stats.agent_sums["clipped_tokens"]))
        if old_policy == "recompute":
            (own,) = learner.score([batch])
            assert float((own - stats.logprobs[0])[batch.mask].abs().max()) > 1e-4  # forcing changes something
        parallel.stop()
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and clipped[1] == 0
