"""A job of two gloo ranks, which trains the same steps under every layout. See test_layouts.

Each layout trains two steps, saves a checkpoint and trains a third step. Some also train two steps of two updates each. Then
every checkpoint is resumed under other layouts. Two adapters on one base also train together, are saved and resumed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_models as tiny
import numpy as np
import pytest
import torch
import torch.distributed as dist

from marsrl.kernels import PolicyObjective
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.state import decode, encode
from marsrl.trainer.config import MptConfig, OptimizerConfig
from marsrl.trainer.data.mini_batches import Average
from marsrl.trainer.data.packing import PackedBatch, TrainSequence, pack
from marsrl.trainer.data.scatter import MiniBatch, joined, scatter
from marsrl.trainer.learner.learner import Learner, groups
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.megatron.hf_files import HfReader
from marsrl.trainer.learner.other_roundings import Precision
from marsrl.trainer.learner.trained_tokens import TrainedTokens
from marsrl.trainer.runs import collective
from marsrl.trainer.runs.collective import gather_bytes

SAMPLES = 8


def new_learner(model: str, layout: dict[str, int]) -> Learner:
    return tiny.learner(
        model,
        mpt=MptConfig(scope="sample", entropy=3.98, probability=0.02),
        layout=layout,
        router_aux_loss=0.05 if "moe" in model else 0.0,
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, grad_clip=0.5),
    )


def batches_of_this_rank(layout: dict[str, int]) -> list[PackedBatch]:
    """Return four batches for a single data-parallel rank, or one of twice the size for each of two.

    Sequences have arbitrary lengths, so a layout that requires a multiple pads them.
    """
    samples = tiny.sequences(SAMPLES, seed=1)
    sharers = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1)
    ranks_of_data = dist.get_world_size() // sharers
    if ranks_of_data == 1:
        return [pack(samples[i::4], align=2) for i in range(4)]
    return [pack(samples[dist.get_rank() :: ranks_of_data], align=2)]


def third_step(policy: Learner, layout: dict[str, int], checkpoint: Path | None = None) -> list[float]:
    """Return loss and gradient norm of one more step, and of the next, which depends on the optimizer's restored state.

    checkpoint: directory to load first, saved after the second step under any layout; None: go on from the policy's own state.
    """
    if checkpoint:
        policy.load(checkpoint)
    numbers = []
    for _ in range(2):
        stats = tiny.step(policy, batches_of_this_rank(layout), tiny.num_trained(tiny.sequences(SAMPLES, seed=1)))
        numbers += [stats.loss, stats.grad_norm]
    return numbers


def run(model: str, layout: dict[str, int], checkpoint: Path) -> dict[str, Any]:
    """Train two steps on this world's ranks, save a checkpoint, and train a third step.

    Returns the steps' statistics, sums of the scores and of their rounding noise, weights before and after, the third step, and
    [how many numbers this rank read from files, how many parameters it has].
    """
    read, read_file = list[int](), HfReader._read

    def counted(self: HfReader, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        read.append((tensor := read_file(self, name, index)).numel())
        return tensor

    with mock.patch.object(HfReader, "_read", counted):
        policy = new_learner(model, layout)
    loaded = [sum(read), sum(p.numel() for p in policy.model.parameters())]
    samples, batches = tiny.sequences(SAMPLES, seed=1), batches_of_this_rank(layout)
    untouched = tiny.weights(policy)
    stats = []
    for _ in range(2):
        s = tiny.step(policy, batches, normaliser=tiny.num_trained(samples), by_agent=True)
        norms = [norm or 0.0 for norm in s.agent_grad_norms]
        stats.append(
            [
                s.loss,
                s.grad_norm,
                s.gated_samples,
                *itertools.chain(*s.agent_sums.values()),
                s.k3,
                *norms,
                *(s.load or ()),
            ]
        )
    scored = zip(policy.score(batches), policy.score(batches, rounded_as=Precision(torch.bfloat16)), strict=True)
    sums = [(logprobs.sum(), (rounded - logprobs).abs().sum()) for logprobs, rounded in scored]
    total = torch.stack([torch.stack(each) for each in sums]).sum(0)
    is_split = len(batches) < 2  # samples are split over the data-parallel ranks
    total /= 1 if is_split else dist.get_world_size()
    dist.all_reduce(total)
    tiny.save(policy, checkpoint)
    return {
        "stats": stats,
        "scores": total.tolist(),
        "weights": tiny.weights(policy),
        "third": third_step(policy, layout),
        "untouched": untouched,
        "loaded": loaded,
    }


def forced(samples: list[TrainSequence]) -> list[TrainSequence]:
    """Return the samples with random experts, and with kept tokens where the token id is odd."""

    def kept(s: TrainSequence) -> KeptTokens:
        ids = [np.unique(np.array([token, 5, 40], np.int32))[: 3 * (token % 2)] for token in s.token_ids]
        return KeptTokens.of(ids)

    return [replace(s, kept_tokens=kept(s)) for s in tiny.with_random_experts(samples)]


Tokens = dict[str, tuple[int, list[float], list[float], list[int]]]


def updates(
    model: str, reference: str, layout: dict[str, int], router_replay: str
) -> tuple[list[list[float]], Tokens, list[str]]:
    """Train two steps on batches that rank 0 scatters.

    Returns the steps' statistics; log-probs, entropies and marks of three samples in the first step, from all ranks; and each
    rank's error for a batch that cannot be packed. The last update has one sample, so one of two data ranks gets an empty part.
    """
    policy = tiny.learner(
        model,
        objective=PolicyObjective(kl="k3", kl_coef=0.2, clip_low=0.02, clip_high=0.02),
        reference_dir=reference,
        reward_kl_coef=0.01,
        router_replay=router_replay,
        layout=layout,
        optimizer=OptimizerConfig(lr=1e-3, grad_clip=0.5),
        recompute="full",
    )
    samples = forced(tiny.sequences(8, multiple=4))
    batches = tuple(tiny.averaged(part, Average("sequence", "agent")) for part in (samples[:7], samples[7:]))
    with mock.patch.object(collective, "SCATTER_BYTES", 1000):  # sent in pieces
        with pytest.raises((RuntimeError, ValueError)) as refusal:
            scatter(batches if dist.get_rank() == 0 else None, policy.shard(8))
        errors = [each.decode() for each in gather_bytes(str(refusal.value).encode())]
        local_updates = scatter(batches if dist.get_rank() == 0 else None, policy.shard(64))
    numbers = []
    tokens: Tokens = {}
    for number in range(2):
        stats = policy.train_step(local_updates, keep={"s1", "s2", "s7"} if number == 0 else ())
        for content in gather_bytes(encode(stats.tokens)):
            for each in decode(tuple[TrainedTokens, ...], content):
                assert each.uid not in tokens, f"two ranks returned tokens of {each.uid}"
                tokens[each.uid] = each.update, each.logprobs.tolist(), each.entropy.tolist(), each.marks.tolist()
        replay: Any = stats.replay
        counts = [replay.tokens, replay.tokens_differ, replay.choices, replay.choices_differ]
        sums = [sum(stats.agent_sums[name]) for name in ("tokens", "kl")]
        numbers.append([stats.loss, stats.grad_norm, *sums, *map(float, counts)])
    return numbers, tokens, errors


POLICIES = ("a", "b")  # policies of agents 0 and 1
MOE = {"rank": 4, "expert_rank": 2, "alpha": 8, "targets": ["attention", "experts"]}
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {"a": {"rank": 8, "alpha": 16}, "b": {"rank": 4, "alpha": 2, "targets": ["mlp"]}},
    "qwen3_moe": {"a": MOE, "b": {**MOE, "targets": ["attention"]}},
}


def adapted(model: str, kind: str, layout: dict[str, int], recompute: str) -> dict[str, Learner]:
    optimizers = {name: {"lr": 1e-2, "grad_clip": 0.5, "weight_decay": 0.1} for name in POLICIES}
    options: dict[str, Any] = {"objective": PolicyObjective(kl="k3", kl_coef=0.1), "reference": "past"}
    return tiny.on_one_base(model, ADAPTERS[kind], optimizers, layout=layout, recompute=recompute, **options)


def train_together(learners: dict[str, Learner], steps: range) -> list[float]:
    """Train these steps; return losses and gradient norms. References are refreshed after step 0."""
    (group,) = groups(learners, POLICIES)
    numbers = []
    for number in steps:
        samples = tiny.sequences(8, seed=number, multiple=4)
        samples_of_policies = [tuple(s for s in samples if POLICIES[s.agent] == name) for name in learners]
        parts = joined([(MiniBatch(each, tiny.num_trained(list(each))),) for each in samples_of_policies])
        stats = group.train_step(scatter(parts if dist.get_rank() == 0 else None, group.shard(64)))
        numbers += [value for each in stats.values() for value in (each.loss, each.grad_norm)]
        for policy in learners.values() if number == 0 else ():
            policy.refresh_reference()
    return numbers


def run_adapters(model: str, kind: str, layout: dict[str, int], recompute: str, folder: Path) -> dict[str, Any]:
    """Train two steps of both adapters, save checkpoints, and train a third step."""
    learners = adapted(model, kind, layout, recompute)
    base = [parameter.clone() for parameter in learners["a"].model.parameters()]
    results: dict[str, Any] = {"numbers": train_together(learners, range(2))}
    for name, policy in learners.items():
        results[name] = tiny.weights(policy)
        tiny.save(policy, folder / name)
    results["base stays"] = all(map(torch.equal, base, learners["a"].model.parameters()))
    results["third"] = train_together(learners, range(2, 3))
    return results


def resume_adapters(model: str, kind: str, layout: dict[str, int], folder: Path) -> list[float]:
    """Load adapters that were saved after two steps, under any layout; return numbers of the third step."""
    learners = adapted(model, kind, layout, "none")
    for name, policy in learners.items():
        policy.load(folder / name)
    return train_together(learners, range(2, 3))


def job(
    out: str,
    models: dict[str, str],
    layouts: dict[str, dict[str, dict[str, int]]],
    resumed: dict[str, list[tuple[str, str]]],
    updated: dict[str, list[str]],
    adapters: dict[str, dict[str, list[Any]]],
    resumed_adapters: dict[str, list[tuple[str, str]]],
) -> None:
    """Write the results to the file `out`, on rank 0.

    resumed, resumed_adapters: {kind: [[layout of the checkpoint, layout of the resumed run], ...]}. updated: {layout: values of
    router_replay}, for updates() of the model "qwen3_moe" with the reference "reference". adapters: {kind: {name: [layout,
    recompute]}}.
    """
    folder = Path(out).parent
    report: dict[str, Any] = {}

    def did(name: str, results: Any) -> None:
        report[name] = results
        parallel.stop(keep_world=True)

    for kind in layouts:
        for name, layout in layouts[kind].items():
            did(f"{kind}/{name}", run(models[kind], layout, folder / "checkpoints" / kind / name))
            for replay in updated.get(name, []) if kind == "qwen3_moe" else []:
                did(f"{name}, {replay}", updates(models[kind], models["reference"], layout, replay))
        for before, after in resumed[kind]:
            layout, checkpoint = layouts[kind][after], folder / "checkpoints" / kind / before
            did(f"{kind}/{before} -> {after}", third_step(new_learner(models[kind], layout), layout, checkpoint))
    for kind in adapters:
        for name, (layout, recompute) in adapters[kind].items():
            checkpoint = folder / "adapters" / kind / name
            did(f"adapters, {kind}/{name}", run_adapters(models[kind], kind, layout, recompute, checkpoint))
        for before, after in resumed_adapters[kind]:
            (layout, _), checkpoint = adapters[kind][after], folder / "adapters" / kind / before
            did(f"adapters, {kind}/{before} -> {after}", resume_adapters(models[kind], kind, layout, checkpoint))
    if dist.get_rank() == 0:
        torch.save(report, out)
