"""Steps of the loop on the virtual clock: the scheduler plays, the trainer takes its time, the weights travel.

    rollout stage(s) | train | sync | rollout stage(s) | train | sync          (rollout.overlap 0: one after the other)
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.scheduler import Scheduler
from marsrl.rollout.types import Group

from .cost_model import Constants, CostModel
from .lengths import Lengths, Outcomes
from .simulated_pool import TOKEN_GRAIN, SimulatedReplicas, VirtualClock
from .simulated_team import Problems, last_token, simulated_team

MAX_TOKENS = 65_536  # of a completion: 64k (MarsRL, UloRL)


@dataclass(frozen=True)
class Setting:
    """One simulated run. The trainer has as many GPUs as the engines: the same ones, as nothing overlaps."""

    engines: int = 64
    problems: int = 512
    pipeline: Literal["agentic", "trajectory"] = "agentic"
    segments: int = 1
    is_solver_only: bool = False
    steps: int = 3  # that are measured
    warmup: int | None = None  # steps before them; default: until every agent of the first problems has played

    @property
    def warmup_steps(self) -> int:
        if self.warmup is not None:
            return self.warmup
        agents = 1 if self.is_solver_only or self.pipeline == "trajectory" else 5
        carried = 0 if self.pipeline == "trajectory" else self.segments - 1
        return (agents - 1) * (1 + min(carried, 2)) + carried


@dataclass(frozen=True)
class Outcome:
    """Means over the measured steps. idle_share: engine-seconds without any work; latency: from a sample's first token to
    the end of the update that trains it; staleness: share of the trained samples, by versions."""

    step_s: float
    rollout_s: float
    train_s: float
    idle_share: float
    samples_per_step: float
    s_per_sample: float
    tokens_per_s: float
    latency_mean_s: float
    latency_p90_s: float
    staleness: dict[int, float] = field(default_factory=dict)
    stages_per_step: float = 1.0
    num_preempted: int = 0

    @property
    def staleness_mean(self) -> float:
        return sum(versions * share for versions, share in self.staleness.items())


class Simulation:
    """The scheduler with simulated engines; `step` plays, trains and publishes once."""

    def __init__(self, setting: Setting, constants: Constants, lengths: Lengths, seed: int = 0) -> None:
        self.setting = setting
        self.cost = CostModel(constants)
        self.clock = VirtualClock()
        outcomes = Outcomes(constants.solver_accuracy, constants.verifier_agreement, lengths.seed)
        self.replicas = SimulatedReplicas(
            setting.engines, self.cost, lengths, lambda uid: last_token(outcomes, uid), self.clock
        )
        config = RolloutConfig(
            engine="scripted",
            engines=setting.engines,
            prompts_per_step=setting.problems,
            max_response_tokens=MAX_TOKENS // TOKEN_GRAIN,
            segments=setting.segments,
            pipeline=setting.pipeline,
            max_unfinished=10**9,  # unbounded, so that every row is given the same problems a step
        )
        team = simulated_team(self.replicas, constants, is_solver_only=setting.is_solver_only)
        self.scheduler = Scheduler(config, team, Problems(), seed=seed)
        self.num_gpus = max(1, round(setting.engines * constants.gpus_per_engine))
        self.version = 0

    def step(self) -> tuple[tuple[Group, ...], float, float, int]:
        """(trained groups, seconds of rollout, seconds of training, stages)."""
        start = self.clock.now_s
        batch = self.scheduler.next_batch({"main": self.version})
        rollout_s = self.clock.now_s - start
        lengths = [
            (len(sample.prompt_ids) + len(sample.token_ids)) * TOKEN_GRAIN for g in batch.groups for sample in g.samples
        ]
        train_s = self.cost.train_s(lengths, self.num_gpus)
        self.clock.now_s += train_s
        return batch.groups, rollout_s, train_s, int(batch.metrics["rollout/stages"])

    def publish(self) -> None:
        self.clock.now_s += self.cost.sync_s
        self.version += 1


def play(setting: Setting, constants: Constants, lengths: Lengths) -> Outcome:
    """Warm up, then measure `setting.steps` steps."""
    simulation = Simulation(setting, constants, lengths)
    for _ in range(setting.warmup_steps):
        for group in simulation.step()[0]:
            for sample in group.samples:
                del simulation.replicas.first_token_s[sample.uid]
        simulation.publish()
    load = simulation.replicas.load
    begin, busy, decoded, preempted = simulation.clock.now_s, load.busy_s, load.decoded_tokens, load.num_preempted
    rollout, train, latencies, stages = 0.0, 0.0, [], 0
    staleness: Counter[int] = Counter()
    for _ in range(setting.steps):
        groups, rollout_s, train_s, num_stages = simulation.step()
        rollout, train, stages = rollout + rollout_s, train + train_s, stages + num_stages
        for group in groups:
            for sample in group.samples:
                latencies.append(simulation.clock.now_s - simulation.replicas.first_token_s.pop(sample.uid))
                staleness[simulation.version - sample.oldest_version] += 1
        simulation.publish()
    elapsed, num_samples = simulation.clock.now_s - begin, len(latencies)
    if not num_samples:
        raise ValueError(f"no sample was trained in {setting.steps} steps of {setting}; measure more steps")
    return Outcome(
        step_s=elapsed / setting.steps,
        rollout_s=rollout / setting.steps,
        train_s=train / setting.steps,
        idle_share=1 - (load.busy_s - busy) / (setting.engines * elapsed),
        samples_per_step=num_samples / setting.steps,
        s_per_sample=elapsed / num_samples,
        tokens_per_s=(load.decoded_tokens - decoded) / elapsed,
        latency_mean_s=statistics.fmean(latencies),
        latency_p90_s=statistics.quantiles(latencies, n=10)[-1] if num_samples > 1 else latencies[0],
        staleness={versions: count / num_samples for versions, count in sorted(staleness.items())},
        stages_per_step=stages / setting.steps,
        num_preempted=load.num_preempted - preempted,
    )
