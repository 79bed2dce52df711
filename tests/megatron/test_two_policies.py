"""Two policies on the same ranks: each is trained by its own agents' samples, as it would be alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from letters import group_of
from megatron_models import VOCAB, largest_difference, learner, save_model, weights
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.rollout.player.stages import StepBatch
from marsrl.trainer.config import RunConfig
from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.mini_batches import mini_batches
from marsrl.trainer.data.scatter import scatter
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.run import Run
from marsrl.trainer.runs.directory import RunDirectory

AGENT_OF = {"a": "solver", "b": "verifier1"}  # that a batch has groups of


def config(*policies: str) -> RunConfig:
    """The Solver is policy `a`, the Verifier policy `b`, each with a reference of its own; one policy alone is all agents."""
    optimizer = {"a": {"lr": 1e-2}, "b": {"lr": 3e-3, "decay": "linear"}}
    names = ("solver", "verifier1", "corrector1", "verifier2", "corrector2")
    agents = {name: {"policy": policies[-1] if name.startswith("verifier") else policies[0]} for name in names}
    return RunConfig.model_validate(
        {
            "policies": {n: {"dtype": "float32", "optimizer": optimizer[n], "reference": "start"} for n in policies},
            "agents": agents,
            "loss": {"kl": "k3", "kl_coef": 0.1},
            "trainer": {"updates_per_step": 2, "router_replay": "recompute"},
        }
    )


def stage(seed: int) -> StepBatch:
    """Four groups of each agent."""
    rng, groups = np.random.default_rng(seed), []
    for agent in AGENT_OF.values():
        for g in range(4):
            group = group_of(f"{seed}{g}/{agent}", [float(i == g % 3) for i in range(3)], agent, tokens=8)
            ids = rng.integers(0, VOCAB, (3, 8)).astype(np.int32)
            samples = tuple(replace(s, token_ids=own) for s, own in zip(group.samples, ids, strict=True))
            groups.append(replace(group, samples=samples))
    return StepBatch(tuple(groups), {})


def trained(settings: RunConfig, models: dict[str, Path], folder: Path) -> dict[str, dict[str, Tensor]]:
    """The weights of every policy of `settings` after three steps of the loop's own calls."""
    learners = {}
    for name, policy in settings.policies.items():
        learners[name] = learner(
            models[name],
            objective=PolicyObjective(kl=settings.loss.kl, kl_coef=settings.loss.kl_coef),
            reference_dir=models[name],
            router_replay=settings.trainer.router_replay,
            **policy.model_dump(),
        )
    run = Run(settings, RunDirectory(folder), RunConsole(1), learners, {}, None, {})
    for step in range(1, 4):
        credited = credit(stage(step).groups, settings.credit, run.agents, keep_zero=run.keeps_zero)
        for name, own in learners.items():
            mine = credited.of(run.agents_of(name) if len(learners) > 1 else [AGENT_OF[name]])
            batches = mini_batches(mine, settings.trainer.updates_per_step, run.average, seed=0, step=step)
            stats = own.train_step(scatter(batches, own.shard(settings.trainer.max_tokens_per_micro_batch)))
            assert stats.num_updates == 2 and sum(stats.agent_sums["tokens"]) > 0
    return {name: weights(own) for name, own in learners.items()}


def test_two_policies_train_as_two_runs_bit_for_bit(tmp_path: Path) -> None:
    models = {"a": save_model("qwen3_moe", tmp_path / "a"), "b": save_model("qwen3_moe", tmp_path / "b", seed=1)}
    (tmp_path / "run").mkdir()
    both = trained(config("a", "b"), models, tmp_path / "run")
    for name in ("a", "b"):
        parallel.stop(keep_world=True)
        alone = trained(config(name), models, tmp_path / "run")
        assert largest_difference(alone[name], both[name]) == 0.0
    assert largest_difference(weights(learner(models["a"])), both["a"]) > 1e-3
