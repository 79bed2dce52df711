"""Steps of the loop on the virtual clock: stages, training and weight syncs.

overlap 0:   rollout stage(s) | train | sync | rollout stage(s) | train | sync
overlap 1:   rollout ...........................................................
                      | train |sync          | train |sync                          engines pause for the sync only
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import MOST_TOKENS, RolloutConfig
from marsrl.rollout.engines.texts import Texts as EngineTexts
from marsrl.rollout.player.stages import Stages, StepBatch
from marsrl.rollout.types import Group, IntArray
from simulation.cost_model import Constants, CostModel
from simulation.lengths import Lengths
from simulation.simulated_pool import TOKEN_GRAIN, SimulatedReplicas, VirtualClock, Written
from simulation.simulated_team import one_token_texts, outcomes_of, problem_stream, simulated_team

MAX_TOKENS = 65_536  # longest completion (MarsRL, UloRL)


Pipeline = Literal["agentic", "trajectory"]
StageSize = Literal["new", "total"]


@dataclass(frozen=True)
class Setting:
    """Settings of a simulated run.

    trainer_gpus: number of the trainer's GPUs; None: as many as the engines have. With overlap 0 trainer and engines share GPUs,
    otherwise their GPUs are separate. max_tokens: longest completion.
    """

    engines: int = 64
    problems: int = 512
    pipeline: Pipeline = "agentic"
    segments: int = 1
    overlap: int = 0
    is_solver_only: bool = False
    group_size: int = 8
    stage_size: StageSize = "new"
    steps: int = 3  # measured steps
    warmup: int | None = None  # steps before the measured ones; None: until every agent has played the first problems
    trainer_gpus: int | None = None
    max_tokens: int = MAX_TOKENS

    @property
    def warmup_steps(self) -> int:
        if self.warmup is not None:
            return self.warmup
        if self.pipeline == "trajectory":
            return 0
        # A round of groups waits for its longest sample, which takes about 0.8 of the possible segments. In runs of 24 steps, the
        # number of samples per step stopped growing after the returned number of steps.
        stages_a_round = max(1, round(0.8 * self.segments))
        return self.segments if self.is_solver_only else 4 * stages_a_round + self.segments


@dataclass(frozen=True)
class Outcome:
    """Means over the measured steps.

    idle_share: share of engine-seconds without work. latency: from a sample's first token to the end of the update that trains
    it. staleness: share of the trained samples, by number of versions.
    """

    step_s: float
    rollout_s: float
    train_s: float
    idle_share: float
    samples_per_step: float
    s_per_sample: float
    gpu_s_per_sample: float
    tokens_per_s: float
    latency_mean_s: float
    latency_p90_s: float
    staleness: dict[int, float] = field(default_factory=dict)
    stages_per_step: float = 1.0
    preempted_per_step: float = 0.0

    @property
    def staleness_mean(self) -> float:
        return sum(versions * share for versions, share in self.staleness.items())


@dataclass(frozen=True)
class Step:
    """Result of a step.

    groups: groups that the step trained. version: version of the weights before the update.
    trained_s: time at the end of the update.
    """

    groups: tuple[Group, ...]
    version: int
    rollout_s: float
    train_s: float
    trained_s: float
    stages: int


@dataclass(frozen=True)
class Texts:
    """Texts for a simulation with real prompts and completions; without them, a completion's last token stands for its text.

    written: returns the tokens that an engine decodes; each stands for `grain` real tokens. told: returns the text that an engine
    makes from the tokens of a completion. question: returns the question of the n-th problem.
    """

    renderer: ChatRenderer
    written: Written
    told: Callable[[IntArray], str]
    grain: int
    question: Callable[[int], str]


class Simulation:
    """Stages with simulated engines; `step` plays, trains and publishes once."""

    def __init__(
        self, setting: Setting, constants: Constants, lengths: Lengths, seed: int = 0, texts: Texts | None = None
    ) -> None:
        self.cost = CostModel(constants)
        self.clock = VirtualClock()
        if texts is None:
            written, grain, prompt_grain = one_token_texts(outcomes_of(constants, lengths)), TOKEN_GRAIN, TOKEN_GRAIN
        else:
            written, grain, prompt_grain = texts.written, texts.grain, 1
        of_engines = None if texts is None else EngineTexts(texts.told)
        self.replicas = SimulatedReplicas(
            setting.engines, self.cost, lengths, written, self.clock, grain, prompt_grain, of_engines
        )
        config = RolloutConfig(
            engines=setting.engines,
            prompts_per_step=setting.problems,
            stage_size=setting.stage_size,
            group_size=setting.group_size,
            max_response_tokens=setting.max_tokens // grain,
            segments=setting.segments,
            pipeline=setting.pipeline,
            overlap=setting.overlap,
            max_unfinished=MOST_TOKENS,  # a limit that is never reached, so that all rows have equally many problems per step
        )
        team = simulated_team(
            self.replicas,
            constants,
            config,
            is_solver_only=setting.is_solver_only,
            renderer=None if texts is None else texts.renderer,
        )
        source = problem_stream() if texts is None else problem_stream(texts.question)
        self.stages = Stages(config, team, source, seed=seed)
        self._is_beside = setting.overlap > 0
        self.num_gpus = setting.trainer_gpus or max(1, round(setting.engines * constants.gpus_per_engine))
        self.version = 0

    def step(self) -> Step:
        """Run one step, until the engines have the new weights."""
        start = self.clock.now_s
        batch = self._next_batch()
        played_s = self.clock.now_s
        prompt_grain, grain = self.replicas.prompt_grain, self.replicas.grain
        lengths = [
            len(sample.prompt_ids) * prompt_grain + len(sample.token_ids) * grain
            for group in batch.groups
            for sample in group.samples
        ]
        train_s = self.cost.train_s(lengths, self.num_gpus)
        if self._is_beside:
            self._play_until(played_s + train_s)
            self.stages.rest()
        self.clock.now_s = played_s + train_s
        version, trained_s = self.version, self.clock.now_s
        self.clock.now_s += self.cost.sync_s
        self.version += 1
        return Step(batch.groups, version, played_s - start, train_s, trained_s, int(batch.metrics["rollout/stages"]))

    def _next_batch(self) -> StepBatch:
        self.stages.resume({"main": self.version})
        self.stages.want()
        while (batch := self.stages.take()) is None:
            self.stages.advance(math.inf)
        return batch

    def _play_until(self, end_s: float) -> None:
        """Run the engines until end_s, when the update ends."""
        while self.clock.now_s < end_s:
            self.stages.player.submit()
            if not self.stages.player.is_decoding:
                break  # decoding is as far ahead as rollout.overlap allows
            self.stages.absorb(self.stages.player.collect(end_s - self.clock.now_s))


def play(setting: Setting, constants: Constants, lengths: Lengths) -> Outcome:
    """Warm up, then measure `setting.steps` steps."""
    simulation = Simulation(setting, constants, lengths)
    replicas = simulation.replicas
    for _ in range(setting.warmup_steps):
        for group in simulation.step().groups:
            for sample in group.samples:
                del replicas.first_token_s[sample.uid]
    begin, busy, decoded, preempted = (
        simulation.clock.now_s,
        replicas.busy_s,
        replicas.decoded_tokens,
        replicas.num_preempted,
    )
    steps, latencies = [], []
    staleness: Counter[int] = Counter()
    for _ in range(setting.steps):
        step = simulation.step()
        for group in step.groups:
            for sample in group.samples:
                latencies.append(step.trained_s - replicas.first_token_s.pop(sample.uid))
                staleness[step.version - sample.oldest_version] += 1
        steps.append(replace(step, groups=()))
    elapsed, num_samples = simulation.clock.now_s - begin, len(latencies)
    if not num_samples:
        raise ValueError(f"no sample was trained in {setting.steps} steps of {setting}; measure more steps")
    num_gpus = simulation.num_gpus
    if setting.overlap:  # Engines then have GPUs besides the trainer's.
        num_gpus += round(setting.engines * constants.gpus_per_engine)
    return Outcome(
        step_s=elapsed / setting.steps,
        rollout_s=statistics.fmean(step.rollout_s for step in steps),
        train_s=statistics.fmean(step.train_s for step in steps),
        idle_share=1 - (replicas.busy_s - busy) / (setting.engines * elapsed),
        samples_per_step=num_samples / setting.steps,
        s_per_sample=elapsed / num_samples,
        gpu_s_per_sample=elapsed * num_gpus / num_samples,
        tokens_per_s=(replicas.decoded_tokens - decoded) / elapsed,
        latency_mean_s=statistics.fmean(latencies),
        latency_p90_s=statistics.quantiles(latencies, n=10)[-1] if num_samples > 1 else latencies[0],
        staleness={versions: count / num_samples for versions, count in sorted(staleness.items())},
        stages_per_step=statistics.fmean(step.stages for step in steps),
        preempted_per_step=(replicas.num_preempted - preempted) / setting.steps,
    )
