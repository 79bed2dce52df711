"""The learner matches transformers and plain PyTorch for every split; bad steps change nothing."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import megatron_models as tiny
import numpy as np
import pytest
import torch
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.trainer.config import MptConfig
from marsrl.trainer.data.bad_steps import BadBatch
from marsrl.trainer.data.mini_batches import Average
from marsrl.trainer.data.packing import pack
from marsrl.trainer.data.scatter import Update
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.learner.trained_tokens import GATED, MASKED


def test_the_gradient_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    samples = tiny.sequences(9)
    policy = tiny.learner(folder, optimizer=tiny.OPTIMIZER.model_copy(update={"lr": 0.0}))
    runs = []
    for cuts in (1, 3, 9):  # 9: one sequence per micro-batch, so packed equals unpacked
        stats = tiny.step(policy, tiny.micro_batches(samples, cuts))
        runs.append((stats.loss, tiny.gradients(policy)))
    for loss, gradient in runs[1:]:
        assert loss == pytest.approx(runs[0][0], abs=5e-7)
        assert tiny.largest_difference(gradient, runs[0][1]) < 3e-6
    tiny.step(policy, [pack(samples), pack([])])  # an empty micro-batch adds nothing
    assert tiny.largest_difference(tiny.gradients(policy), runs[0][1]) < 3e-6


@pytest.mark.parametrize(
    ("average", "mpt"),
    [(Average(), MptConfig(scope="batch", entropy=4.0, probability=0.02)), (Average("sequence", "agent"), None)],
)
def test_an_agents_gradient_equals_a_step_of_that_agent_alone(
    average: Average, mpt: MptConfig | None, tmp_path: Path
) -> None:
    """The router's balancing loss is off, because it belongs to no agent. Measuring does not change the step."""
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    whole = tiny.averaged(tiny.sequences(9), average)
    update = Update(tuple(tiny.micro_batches(list(whole.sequences), 1 if mpt else 3)), whole.normaliser)
    plain, measured = (tiny.learner(folder, mpt=mpt, router_aux_loss=0.0 if mpt else 0.05) for _ in range(2))
    without, stats = plain.train_step([update]), measured.train_step([update], by_agent=True)
    assert without.agent_grad_norms == ()
    assert (stats.loss, stats.grad_norm, stats.agent_sums) == (without.loss, without.grad_norm, without.agent_sums)
    assert tiny.largest_difference(tiny.weights(measured), tiny.weights(plain)) == 0.0
    assert (sum(stats.agent_sums["masked_tokens"]) > 0) == (mpt is not None)
    for agent, norm in enumerate(stats.agent_grad_norms):
        alone = [s if s.agent == agent else dataclasses.replace(s, advantage=0.0) for s in whole.sequences]
        other = tiny.step(tiny.learner(folder, mpt=mpt), tiny.micro_batches(alone, 1), normaliser=update.normaliser)
        assert norm == pytest.approx(other.grad_norm, rel=1e-5) and other.grad_norm > 0.01


def test_an_agent_without_a_token_has_no_share(tmp_path: Path) -> None:
    samples = [s for s in tiny.sequences(6) if s.agent == 1]
    policy = tiny.learner(tiny.save_model("qwen3", tmp_path / "m"))
    stats = tiny.step(policy, tiny.micro_batches(samples, 1), by_agent=True)
    assert stats.agent_grad_norms == (None, pytest.approx(stats.grad_norm, rel=1e-6))


@pytest.mark.parametrize(
    ("correction", "value"), [("none", math.nan), ("tis", math.nan), ("tis", -math.inf), ("icepop", math.nan)]
)
def test_a_step_that_is_not_finite_changes_nothing(correction: Any, value: float, tmp_path: Path) -> None:
    """Without a correction, the bad number is an advantage; with one, it is the rollout log-prob of a token."""
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    objective = PolicyObjective(correction=correction, correction_low=0.0)
    samples = tiny.sequences(4)
    policy, clean = tiny.learner(folder, objective=objective), tiny.micro_batches(tiny.sequences(4), 1)
    before = tiny.weights(policy)
    change: dict[str, Any] = {"advantage": value}
    if correction != "none":
        assert samples[0].rollout_logprobs is not None
        rollout = samples[0].rollout_logprobs.copy()
        rollout[samples[0].is_sampled.nonzero()[0][-1]] = value
        change = {"rollout_logprobs": rollout}
    bad = [dataclasses.replace(samples[0], **change), *samples[1:]]
    assert BadBatch(1, "main", 0, math.nan, math.nan, tuple(bad)).suspects == [samples[0].uid]
    stats = tiny.step(policy, tiny.micro_batches(bad, 2), normaliser=tiny.num_trained(bad))
    assert stats.is_skipped and not stats.is_updated and policy.num_steps == 1
    assert tiny.largest_difference(tiny.weights(policy), before) == 0.0
    fresh = tiny.learner(folder, objective=objective)
    assert tiny.step(policy, clean).is_updated and tiny.step(fresh, clean).is_updated
    # The bad step left no trace in the optimizer either.
    assert tiny.largest_difference(tiny.weights(policy), tiny.weights(fresh)) == 0.0


def test_an_empty_step_passes_and_counts(tmp_path: Path) -> None:
    policy = tiny.learner(tiny.save_model("qwen3_moe", tmp_path / "m"))
    before = tiny.weights(policy)
    stats = tiny.step(policy, [pack([])], normaliser=0.0)
    assert stats.is_empty and not stats.is_updated and not stats.is_skipped and policy.num_steps == 1
    assert stats.loss == 0.0 and math.isfinite(stats.grad_norm) and set(stats.agent_sums["tokens"]) == {0.0}
    assert tiny.largest_difference(tiny.weights(policy), before) == 0.0
    with pytest.raises(ValueError, match="normaliser is 0"):
        tiny.step(policy, [pack(tiny.sequences(2))], normaliser=0.0)


@pytest.mark.parametrize(("dtype", "distributed"), [("float32", True), ("bfloat16", True), ("float32", False)])
def test_a_restored_learner_goes_on_bit_for_bit(dtype: str, distributed: bool, tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    optimizer = tiny.OPTIMIZER.model_copy(update={"warmup_steps": 2, "decay": "cosine", "distributed": distributed})
    batches = [tiny.micro_batches(tiny.sequences(5, seed=i), 2) for i in range(5)]
    unbroken = tiny.learner(folder, dtype=dtype, optimizer=optimizer)
    for batch in batches[:3]:
        tiny.step(unbroken, batch, normaliser=50.0)
    tiny.save(unbroken, tmp_path / "ckpt")
    expected = [tiny.step(unbroken, batch, normaliser=50.0) for batch in batches[3:]]
    restored = tiny.learner(folder, dtype=dtype, optimizer=optimizer)
    restored.load(tmp_path / "ckpt")
    found = [tiny.step(restored, batch, normaliser=50.0) for batch in batches[3:]]
    ours, theirs = ([(s.loss, s.grad_norm, s.lr, s.agent_sums) for s in steps] for steps in (found, expected))
    assert ours == theirs
    assert tiny.largest_difference(tiny.weights(restored), tiny.weights(unbroken)) == 0.0
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        restored.load(tmp_path)


@pytest.mark.parametrize("settings", [{}, {"optimizer": {"distributed": False}}, {"adapter": {"rank": 4}}], ids=str)
def test_one_rank_sends_itself_nothing(
    settings: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on one rank is bitwise equal to training with Megatron's collectives."""
    folder, batches = tiny.save_model("qwen3_moe", tmp_path / "m"), tiny.micro_batches(tiny.sequences(4), 2)
    if "optimizer" in settings:
        settings = {"optimizer": tiny.OPTIMIZER.model_copy(update=settings["optimizer"])}
    policy, sending = (tiny.learner(folder, **settings) for _ in range(2))
    from megatron.core.distributed import param_and_grad_buffer as buffers  # imported after the learners' shim

    wrapped = getattr(sending.optimizer, "_model", None)  # Adapters are not wrapped.
    for group in wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups if wrapped else ():
        del group.start_grad_sync, group.start_param_sync
    sent = []

    def note(*tensors: Any, call: Any, **options: Any) -> Any:
        if tensors[0].numel() > 1000:  # gradients or weights; statistics are summed over all ranks anyway
            sent.append(tensors)
        return call(*tensors, **options)

    for module, name in (
        (buffers, "dist_reduce_scatter_func"),
        (buffers, "dist_all_gather_func"),
        (torch.distributed, "all_reduce"),
        (torch.distributed, "reduce_scatter_tensor"),
        (torch.distributed, "all_gather_into_tensor"),
    ):
        monkeypatch.setattr(module, name, partial(note, call=getattr(module, name)))
    found = [tiny.step(policy, batches).grad_norm for _ in range(2)]
    assert not sent
    assert [tiny.step(sending, batches).grad_norm for _ in range(2)] == found and (sent or not wrapped)
    assert tiny.largest_difference(tiny.weights(sending), tiny.weights(policy)) == 0.0


@pytest.mark.parametrize("recompute", ["none", "selective", "full_but_attention", "full"])
def test_recomputation_and_overlap_give_the_same_gradient(recompute: str, tmp_path: Path) -> None:
    """Kernels add the gradients of experts and head to DDP's buffer; DDP adds all others.

    DDP's hooks, which overlap the reduction, see each weight once per micro-batch.
    """
    folder, batches = tiny.save_model("qwen3_moe", tmp_path / "m"), tiny.micro_batches(tiny.sequences(4), 2)
    optimizer = tiny.OPTIMIZER.model_copy(update={"overlap_grad_reduce": True})
    plain, policy = tiny.learner(folder), tiny.learner(folder, recompute=recompute, optimizer=optimizer)
    for each in (plain, policy):
        tiny.step(each, batches)
    assert tiny.largest_difference(tiny.gradients(policy), tiny.gradients(plain)) < 1e-7
    found = {name for name, weight in policy.model.named_parameters() if weight.grad_added_to_main_grad}  # type: ignore[attr-defined]
    experts = {f"decoder.layers.{layer}.mlp.experts.{which}" for layer in range(2) for which in ("gate_up", "down")}
    assert found == {"output_layer.weight"} | experts


def test_each_old_policy_clips_by_its_own_ratio(tmp_path: Path) -> None:
    """pois and recompute have ratio 1 for a single update; sais clips relative to the rollout's log-probs."""
    folder, samples = tiny.save_model("qwen3", tmp_path / "m"), tiny.sequences(6)
    batch, stats = pack(samples), {}
    for old_policy in ("pois", "recompute", "sais"):
        policy = tiny.learner(folder, old_policy=old_policy)
        stats[old_policy] = tiny.step(policy, [batch], keep=batch.uids)
    assert stats["recompute"].grad_norm == pytest.approx(stats["pois"].grad_norm, rel=1e-4)
    assert sum(stats["pois"].agent_sums["clipped_tokens"]) == 0 < sum(stats["sais"].agent_sums["clipped_tokens"])
    trainer = torch.from_numpy(np.concatenate([each.logprobs for each in stats["pois"].tokens])).double()
    rollout = batch.rollout_logprobs[batch.mask].double()  # type: ignore[index]
    difference = (trainer.exp() - rollout.exp()).abs()
    assert stats["pois"].prob_diff_mean == pytest.approx(float(difference.mean()), rel=1e-9)
    assert stats["pois"].prob_diff_max == pytest.approx(float(difference.max()), rel=1e-9)
    x = trainer - rollout
    assert stats["pois"].k3 == pytest.approx(float((x.exp() - 1 - x).mean()), rel=1e-9)
    unknown = pack([dataclasses.replace(s, rollout_logprobs=None) for s in samples])
    assert math.isnan(tiny.step(tiny.learner(folder), [unknown], normaliser=9.0).k3)
    with pytest.raises(ValueError, match="sais needs rollout log-probs"):
        tiny.step(policy, [unknown], normaliser=9.0)


def test_token_advantages_train_as_supervised_learning(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    samples, expected, model = [], 0.0, tiny.scoring_model(folder)
    for s in tiny.sequences(6):
        weight = np.linspace(1, 3, len(s.token_ids), dtype=np.float32)
        samples.append(dataclasses.replace(s, token_advantages=weight, rollout_logprobs=None))
        logprobs = tiny.hf_logprobs(model, s)[0].detach()
        expected -= float((logprobs * torch.from_numpy(weight[s.is_sampled])).sum())
    policy = tiny.learner(folder, router_aux_loss=0.01)
    stats = [tiny.step(policy, [pack(samples)]) for _ in range(8)]
    assert sum(stats[0].agent_sums["weighted_nll"]) == pytest.approx(expected, rel=1e-5)
    assert sum(stats[-1].agent_sums["weighted_nll"]) < 0.8 * sum(stats[0].agent_sums["weighted_nll"])


def test_a_deeper_second_policy_trains_in_the_same_process(tmp_path: Path) -> None:
    for layers in (1, 3):
        folder = tiny.save_model("qwen3_moe", tmp_path / str(layers), num_hidden_layers=layers)
        assert tiny.step(tiny.learner(folder, router_aux_loss=0.05), [pack(tiny.sequences(6))]).grad_norm > 0


def test_batch_scope_needs_one_micro_batch(tmp_path: Path) -> None:
    mpt, samples = MptConfig(scope="batch", entropy=4.0, probability=0.02), tiny.sequences(6)
    policy = tiny.learner(tiny.save_model("qwen3", tmp_path / "m"), mpt=mpt)
    with pytest.raises(ValueError, match="mpt.scope=batch .* a rank has 2"):
        tiny.step(policy, tiny.micro_batches(samples, 2), normaliser=9.0)
    stats = tiny.step(policy, tiny.micro_batches(samples, 1), normaliser=9.0)
    assert stats.gated_samples == sum(s.is_positive for s in samples)
    assert sum(stats.agent_sums["masked_tokens"]) > 0


def test_logged_tokens_match_transformers_and_change_no_bit(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen2", tmp_path / "m")
    samples = [dataclasses.replace(s, temperature=0.7) for s in tiny.sequences(7)]
    mpt = MptConfig(scope="sample", entropy=3.972, probability=0.02, temperature=1)

    def stepped(keep: frozenset[str]) -> tuple[StepStats, dict[str, Tensor]]:
        policy = tiny.learner(folder, mpt=mpt)
        stats = tiny.step(policy, tiny.micro_batches(samples, 2, align=4), keep=keep)
        return stats, tiny.weights(policy)

    stats, kept = stepped(frozenset(s.uid for s in samples))
    without, plain = stepped(frozenset())
    assert tiny.largest_difference(kept, plain) == 0 and without.tokens == ()
    assert (stats.loss, stats.grad_norm, stats.agent_sums) == (without.loss, without.grad_norm, without.agent_sums)
    model = tiny.scoring_model(folder)
    found = {tokens.uid: tokens for tokens in stats.tokens}
    assert len(found) == len(stats.tokens) == len(samples)
    for sample in samples:
        tokens = found[sample.uid]
        with torch.no_grad():
            logprobs, entropy = tiny.hf_logprobs(model, sample)
        assert tokens.logprobs == pytest.approx(logprobs.numpy(), abs=1e-5)
        assert tokens.entropy == pytest.approx(entropy.numpy(), abs=1e-5)
        assert set(tokens.marks.tolist()) <= ({0, GATED | MASKED} if sample.is_positive else {0})
    gated = sum(int((tokens.marks == GATED | MASKED).sum()) for tokens in stats.tokens)
    assert gated == sum(stats.agent_sums["masked_tokens"]) > 0
    some = stepped(frozenset({"s1", "s3", "nobody"}))[0].tokens
    assert {tokens.uid for tokens in some} == {"s1", "s3"}
