"""A job of two gloo ranks: a step of two updates with KL, replayed experts and a mean a sample and agent, each layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron_models import averaged, learner, sequences

from marsrl.kernels import PolicyObjective
from marsrl.rollout.state import decode, encode
from marsrl.trainer.config import OptimizerConfig
from marsrl.trainer.data.mini_batches import Average
from marsrl.trainer.data.packing import TrainSequence, pack
from marsrl.trainer.data.scatter import Update
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.trained_tokens import TrainedTokens
from marsrl.trainer.runs.collective import gather_bytes


def forced(samples: list[TrainSequence]) -> list[TrainSequence]:
    """Two random ones of four experts for every token but the last."""
    rng = np.random.default_rng(3)
    return [
        replace(s, routed_experts=rng.random((s.num_tokens - 1, 2, 4)).argsort(-1)[..., :2].astype(np.uint8))
        for s in samples
    ]


Tokens = dict[str, tuple[int, list[float], list[float], list[int]]]


def run(model: str, reference: str, layout: dict[str, int], router_replay: str) -> tuple[list[list[float]], Tokens]:
    """Statistics of two steps on the ranks of this world; the tokens of three samples in the first, from all ranks."""
    policy = learner(
        model,
        objective=PolicyObjective(kl="k3", kl_coef=0.2, clip_low=0.02, clip_high=0.02),
        reference_dir=reference,
        router_replay=router_replay,
        layout=layout,
        optimizer=OptimizerConfig(lr=1e-3, grad_clip=0.5),
        recompute="full",
    )
    samples = forced(sequences(8))
    places = policy.shard(64).data_size
    updates = []
    for part in (samples[:4], samples[4:]):
        update = averaged(part, Average("sequence", "agent"))
        batches = [pack(update.sequences[i::2], align=2) for i in range(2)]
        mine = batches if places == 1 else batches[dist.get_rank() :: places]
        updates.append(Update(tuple(mine), update.normaliser))
    found = []
    tokens: Tokens = {}
    for step in range(2):
        stats = policy.train_step(updates, keep={"s1", "s2", "s6"} if step == 0 else ())
        for told in gather_bytes(encode(stats.tokens)):
            for each in decode(tuple[TrainedTokens, ...], told):
                assert each.uid not in tokens, f"two ranks speak for {each.uid}"
                tokens[each.uid] = each.update, each.logprobs.tolist(), each.entropy.tolist(), each.marks.tolist()
        replay: Any = stats.replay
        counts = [replay.tokens, replay.tokens_differ, replay.choices, replay.choices_differ]
        sums = [sum(stats.agent_sums[name]) for name in ("tokens", "kl")]
        found.append([stats.loss, stats.grad_norm, *sums, *map(float, counts)])
    return found, tokens


def job(
    model: str, reference: str, cases: dict[str, tuple[dict[str, int], str]]
) -> dict[str, tuple[list[list[float]], Tokens]]:
    """What each case gives, by its name."""
    report = {}
    for name, (layout, router_replay) in cases.items():
        report[name] = run(model, reference, layout, router_replay)
        parallel.stop(keep_world=True)
    return report
