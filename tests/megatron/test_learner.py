"""The learner against transformers and plain PyTorch: same log-probs, same step, whatever the cut; bad steps change nothing."""

from __future__ import annotations

import dataclasses
import math
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from megatron_models import (
    OPTIMIZER,
    averaged,
    gradients,
    hf_logprobs,
    largest_difference,
    learner,
    micro_batches,
    num_trained,
    save,
    save_model,
    sequences,
    step,
    weights,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from marsrl.kernels import PolicyObjective
from marsrl.trainer.config import MptConfig
from marsrl.trainer.data.bad_batches import BadBatch
from marsrl.trainer.data.mini_batches import Average
from marsrl.trainer.data.packing import pack
from marsrl.trainer.data.scatter import Update
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.learner.trained_tokens import GATED, MASKED


def test_the_gradient_does_not_depend_on_the_cut(tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "m")
    samples = sequences(9)
    policy = learner(folder, optimizer=OPTIMIZER.model_copy(update={"lr": 0.0}))
    runs = []
    for cuts in (1, 3, 9):  # 9: one sequence a micro-batch, so packed equals per-sequence
        stats = step(policy, micro_batches(samples, cuts))
        runs.append((stats.loss, gradients(policy)))
    for loss, gradient in runs[1:]:
        assert loss == pytest.approx(runs[0][0], abs=5e-7)
        assert largest_difference(gradient, runs[0][1]) < 3e-6
    twice = pack(samples)
    stats = step(policy, [twice, pack([])])  # an empty micro-batch adds nothing
    assert largest_difference(gradients(policy), runs[0][1]) < 3e-6


@pytest.mark.parametrize(
    ("average", "mpt"),
    [(Average(), MptConfig(scope="batch", entropy=4.0, probability=0.02)), (Average("sequence", "agent"), None)],
)
def test_an_agents_share_of_the_gradient_is_that_of_a_step_in_which_others_have_no_advantage(
    average: Average, mpt: MptConfig | None, tmp_path: Path
) -> None:
    """Without the router's balancing loss, which is no agent's. The step itself is untouched by what is measured."""
    folder = save_model("qwen3_moe", tmp_path / "m")
    whole = averaged(sequences(9), average)
    update = Update(tuple(micro_batches(list(whole.sequences), 1 if mpt else 3)), whole.normaliser)
    plain, measured = (learner(folder, mpt=mpt, router_aux_loss=0.0 if mpt else 0.05) for _ in range(2))
    without, stats = plain.train_step([update]), measured.train_step([update], by_agent=True)
    assert without.agent_grad_norms == ()
    assert (stats.loss, stats.grad_norm, stats.agent_sums) == (without.loss, without.grad_norm, without.agent_sums)
    assert largest_difference(weights(measured), weights(plain)) == 0.0
    assert (sum(stats.agent_sums["masked_tokens"]) > 0) == (mpt is not None)
    for agent, norm in enumerate(stats.agent_grad_norms):
        alone = [s if s.agent == agent else dataclasses.replace(s, advantage=0.0) for s in whole.sequences]
        other = step(learner(folder, mpt=mpt), micro_batches(alone, 1), normaliser=update.normaliser)
        assert norm == pytest.approx(other.grad_norm, rel=1e-5) and other.grad_norm > 0.01


def test_an_agent_without_a_token_has_no_share(tmp_path: Path) -> None:
    samples = [s for s in sequences(6) if s.agent == 1]
    policy = learner(save_model("qwen3", tmp_path / "m"))
    stats = step(policy, micro_batches(samples, 1), normaliser=num_trained(samples), by_agent=True)
    assert stats.agent_grad_norms == (None, pytest.approx(stats.grad_norm, rel=1e-6))


@pytest.mark.parametrize(
    ("correction", "value"), [("none", math.nan), ("tis", math.nan), ("tis", -math.inf), ("icepop", math.nan)]
)
def test_a_step_that_is_not_finite_changes_nothing(correction: Any, value: float, tmp_path: Path) -> None:
    """Of an advantage without a correction, else of the rollout log-prob of one token."""
    folder = save_model("qwen3_moe", tmp_path / "m")
    objective = PolicyObjective(correction=correction, correction_low=0.0)
    samples = sequences(4)
    policy, clean = learner(folder, objective=objective), micro_batches(sequences(4), 1)
    before = weights(policy)
    change: dict[str, Any] = {"advantage": value}
    if correction != "none":
        assert samples[0].rollout_logprobs is not None
        rollout = samples[0].rollout_logprobs.copy()
        rollout[samples[0].is_sampled.nonzero()[0][-1]] = value
        change = {"rollout_logprobs": rollout}
    bad = [dataclasses.replace(samples[0], **change), *samples[1:]]
    assert BadBatch(1, "main", 0, math.nan, math.nan, tuple(bad)).suspects == [samples[0].uid]
    stats = step(policy, micro_batches(bad, 2), normaliser=num_trained(bad))
    assert stats.is_skipped and not stats.is_updated and policy.num_steps == 1
    assert largest_difference(weights(policy), before) == 0.0
    after_bad = step(policy, clean)
    assert after_bad.is_updated
    fresh = learner(folder, objective=objective)
    step(fresh, clean)
    assert largest_difference(weights(policy), weights(fresh)) == 0.0  # no trace of it in the optimizer either


def test_an_empty_step_passes_and_counts(tmp_path: Path) -> None:
    policy = learner(save_model("qwen3_moe", tmp_path / "m"))
    before = weights(policy)
    stats = step(policy, [pack([])], normaliser=0.0)
    assert stats.is_empty and not stats.is_updated and not stats.is_skipped and policy.num_steps == 1
    assert stats.loss == 0.0 and math.isfinite(stats.grad_norm) and set(stats.agent_sums["tokens"]) == {0.0}
    assert largest_difference(weights(policy), before) == 0.0
    with pytest.raises(ValueError, match="normaliser is 0"):
        step(policy, [pack(sequences(2))], normaliser=0.0)


@pytest.mark.parametrize(("dtype", "distributed"), [("float32", True), ("bfloat16", True), ("float32", False)])
def test_a_restored_learner_goes_on_bit_for_bit(dtype: str, distributed: bool, tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "m")
    optimizer = OPTIMIZER.model_copy(update={"warmup_steps": 2, "decay": "cosine", "distributed": distributed})
    batches = [micro_batches(sequences(5, seed=i), 2) for i in range(5)]
    normaliser = 50.0
    unbroken = learner(folder, dtype=dtype, optimizer=optimizer)
    for batch in batches[:3]:
        step(unbroken, batch, normaliser=normaliser)
    save(unbroken, tmp_path / "ckpt")
    expected = [step(unbroken, batch, normaliser=normaliser) for batch in batches[3:]]
    restored = learner(folder, dtype=dtype, optimizer=optimizer)
    restored.load(tmp_path / "ckpt")
    found = [step(restored, batch, normaliser=normaliser) for batch in batches[3:]]
    ours, theirs = ([(s.loss, s.grad_norm, s.lr, s.agent_sums) for s in steps] for steps in (found, expected))
    assert ours == theirs
    assert largest_difference(weights(restored), weights(unbroken)) == 0.0
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        restored.load(tmp_path)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_activations_give_the_same_gradient(recompute: str, tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "m")
    samples = sequences(4)
    found = []
    for mode in ("none", recompute):
        policy = learner(folder, recompute=mode)
        step(policy, [pack(samples)])
        found.append(gradients(policy))
    assert largest_difference(*found) < 1e-7


def test_old_policies(tmp_path: Path) -> None:
    """pois and recompute have ratio 1 at a single update; sais clips against the rollout's log-probs."""
    folder = save_model("qwen3", tmp_path / "m")
    samples = sequences(6)
    batch = pack(samples)
    stats = {}
    for old_policy in ("pois", "recompute", "sais"):
        policy = learner(folder, old_policy=old_policy)
        stats[old_policy] = step(policy, [batch])
    assert stats["recompute"].grad_norm == pytest.approx(stats["pois"].grad_norm, rel=1e-4)
    assert sum(stats["pois"].agent_sums["clipped_tokens"]) == 0 < sum(stats["sais"].agent_sums["clipped_tokens"])
    trainer = stats["pois"].logprobs[0][batch.mask].double()
    rollout = batch.rollout_logprobs[batch.mask].double()  # type: ignore[index]
    difference = (trainer.exp() - rollout.exp()).abs()
    assert stats["pois"].prob_diff_mean == pytest.approx(float(difference.mean()), rel=1e-9)
    assert stats["pois"].prob_diff_max == pytest.approx(float(difference.max()), rel=1e-9)
    x = trainer - rollout
    assert stats["pois"].k3 == pytest.approx(float((x.exp() - 1 - x).mean()), rel=1e-9)
    unknown = pack([dataclasses.replace(s, rollout_logprobs=None) for s in samples])
    assert math.isnan(step(learner(folder), [unknown], normaliser=9.0).k3)
    with pytest.raises(ValueError, match="sais needs rollout log-probs"):
        step(policy, [unknown], normaliser=9.0)


def test_token_advantages_train_as_supervised_learning(tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "m")
    samples = []
    for s in sequences(6):
        weights_of_tokens = np.linspace(1, 3, len(s.token_ids), dtype=np.float32)
        samples.append(dataclasses.replace(s, token_advantages=weights_of_tokens, rollout_logprobs=None))
    policy = learner(folder, router_aux_loss=0.01)
    stats = [step(policy, [pack(samples)]) for _ in range(8)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = 0.0
    with torch.no_grad():
        for s in samples:
            assert s.token_advantages is not None
            expected -= float((hf_logprobs(model, s)[0] * torch.from_numpy(s.token_advantages[s.is_sampled])).sum())
    assert sum(stats[0].agent_sums["weighted_nll"]) == pytest.approx(expected, rel=1e-5)
    assert sum(stats[-1].agent_sums["weighted_nll"]) < 0.8 * sum(stats[0].agent_sums["weighted_nll"])


def test_batch_scope_wants_one_micro_batch(tmp_path: Path) -> None:
    policy = learner(save_model("qwen3", tmp_path / "m"), mpt=MptConfig(scope="batch", entropy=4.0, probability=0.02))
    samples = sequences(6)
    with pytest.raises(ValueError, match="mpt.scope=batch .* a rank has 2"):
        step(policy, micro_batches(samples, 2), normaliser=9.0)
    stats = step(policy, micro_batches(samples, 1), normaliser=9.0)
    assert stats.gated_samples == sum(s.is_positive for s in samples)
    assert sum(stats.agent_sums["masked_tokens"]) > 0


def test_the_tokens_of_an_update_are_transformers_and_keeping_them_changes_no_bit(tmp_path: Path) -> None:
    folder = save_model("qwen2", tmp_path / "m")
    samples = [dataclasses.replace(s, temperature=0.7) for s in sequences(7)]
    mpt = MptConfig(scope="sample", entropy=3.972, probability=0.02, temperature=1)

    def stepped(keep: frozenset[str]) -> tuple[StepStats, dict[str, Tensor]]:
        policy = learner(folder, mpt=mpt)
        stats = step(policy, micro_batches(samples, 2, align=4), normaliser=num_trained(samples), keep=keep)
        return stats, weights(policy)

    stats, kept = stepped(frozenset(s.uid for s in samples))
    without, plain = stepped(frozenset())
    assert largest_difference(kept, plain) == 0 and without.tokens == ()
    assert (stats.loss, stats.grad_norm, stats.agent_sums) == (without.loss, without.grad_norm, without.agent_sums)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {tokens.uid: tokens for tokens in stats.tokens}
    assert len(found) == len(stats.tokens) == len(samples)
    for sample in samples:
        tokens = found[sample.uid]
        with torch.no_grad():
            logprobs, entropy = hf_logprobs(model, sample)
        assert tokens.logprobs == pytest.approx(logprobs.numpy(), abs=1e-5)
        assert tokens.entropy == pytest.approx(entropy.numpy(), abs=1e-5)
        assert set(tokens.marks.tolist()) <= ({0, GATED | MASKED} if sample.is_positive else {0})
    gated = sum(int((tokens.marks == GATED | MASKED).sum()) for tokens in stats.tokens)
    assert gated == sum(stats.agent_sums["masked_tokens"]) > 0
    some = stepped(frozenset({"s1", "s3", "nobody"}))[0].tokens
    assert {tokens.uid for tokens in some} == {"s1", "s3"}


ROOMS = re.compile(r"/(kernels|rollout|trainer|megatron/core)/")
WAITS = {torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense, torch.ops.aten.masked_select}


class Waits(TorchDispatchMode):
    """Files of ours, or of megatron, that called an operation for which a host waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func.overloadpacket in WAITS or is_mask:
            self.found.add(innermost())
        return func(*args, **(kwargs or {}))


def innermost() -> str:
    """The innermost file of ours or of megatron's, without the shim that all goes through."""
    files = (frame.filename for frame in reversed(traceback.extract_stack()[:-2]))
    return next(each for each in files if ROOMS.search(each) and not each.endswith("/shim.py"))


@pytest.mark.parametrize("scope", ["sample", "batch"])
def test_the_head_knows_its_rows_without_the_device(scope: str, tmp_path: Path) -> None:
    policy = learner(save_model("qwen3_moe", tmp_path / "m"), mpt=MptConfig.model_validate({"scope": scope}))
    samples = sequences(6)
    with Waits() as waits:
        batches = micro_batches(samples, 1)
        policy.score(batches)
        stats = step(policy, batches)
    assert stats.is_updated
    # The rest is our kernels' for a CPU, which has nothing to wait for, and the step's own: it waits for what decides whether
    # it is made, and for what it returns.
    of_model = [f"/trainer/learner/megatron/{name}.py" for name in ("head", "attention", "context", "experts", "model")]
    assert not [each for each in waits.found if each.endswith(("/trainer/data/packing.py", *of_model))]
    assert not [
        each for each in waits.found if "/transformer/" in each
    ]  # megatron's layers, with the way to the experts
    assert [
        each for each in waits.found if each.endswith(("/step_stats.py", "/optimizer.py"))
    ]  # the test sees such waits
