"""A job of two gloo ranks: two adapters on one base train together under every layout, and are saved.

See test_adapter_layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_models import learner, num_trained, save, sequences

from marsrl.trainer.data.scatter import MiniBatch, joined, scatter
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.together import groups

POLICIES = ("a", "b")  # of the agents
MOE = {"rank": 4, "expert_rank": 2, "alpha": 8, "targets": ["attention", "experts"]}
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {"a": {"rank": 8, "alpha": 16}, "b": {"rank": 4, "alpha": 2, "targets": ["mlp"]}},
    "qwen3_moe": {"a": MOE, "b": {**MOE, "targets": ["attention"]}},
}


def policies(model: str, kind: str, layout: dict[str, int], recompute: str) -> dict[str, Learner]:
    learners: dict[str, Learner] = {}
    for name, adapter in ADAPTERS[kind].items():
        base = learners["a"].base if learners else None
        optimizer = {"lr": 1e-2, "grad_clip": 0.5, "weight_decay": 0.1}
        learners[name] = learner(
            model, adapter=adapter, base=base, layout=layout, recompute=recompute, optimizer=optimizer
        )
    return learners


def train(learners: dict[str, Learner], steps: range) -> list[float]:
    """Losses and gradient norms."""
    (group,) = groups(learners, POLICIES)
    found = []
    for step in steps:
        samples = sequences(8, seed=step, multiple=4)
        own = [tuple(s for s in samples if POLICIES[s.agent] == name) for name in learners]
        parts = joined([(MiniBatch(each, num_trained(list(each))),) for each in own])
        stats = group.train_step(scatter(parts if dist.get_rank() == 0 else None, group.shard(64)))
        found += [value for each in stats.values() for value in (each.loss, each.grad_norm)]
    return found


def run(model: str, kind: str, layout: dict[str, int], recompute: str, folder: Path) -> dict[str, Any]:
    learners = policies(model, kind, layout, recompute)
    base = [parameter.clone() for parameter in learners["a"].model.parameters()]
    found: dict[str, Any] = {"numbers": train(learners, range(2))}
    for name, policy in learners.items():
        found[name] = dict(policy.held_adapter().export())
        save(policy, folder / name)
    found["base moved"] = sum(
        not torch.equal(a, b) for a, b in zip(base, learners["a"].model.parameters(), strict=True)
    )
    found["third"] = train(learners, range(2, 3))
    return found


def resume(model: str, kind: str, layout: dict[str, int], folder: Path) -> list[float]:
    """The third step of adapters that were saved after their second one, under this layout or another."""
    learners = policies(model, kind, layout, "none")
    for name, policy in learners.items():
        policy.load(folder / name)
    return train(learners, range(2, 3))


def job(out: str, models: dict[str, str], layouts: dict[str, dict[str, list[Any]]]) -> None:
    """Into the file `out`, by rank 0. layouts: {kind: {name: [layout, recompute]}}."""
    report: dict[str, Any] = {}
    for kind in layouts:
        for name, (layout, recompute) in layouts[kind].items():
            place = Path(out).parent / kind / name
            report[f"{kind}/{name}"] = run(models[kind], kind, layout, recompute, place)
            parallel.stop(keep_world=True)
            report[f"{kind}/{name}, resumed"] = resume(models[kind], kind, layout, place)
            parallel.stop(keep_world=True)
    if dist.get_rank() == 0:
        torch.save(report, out)
