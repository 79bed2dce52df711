"""How good the team is on held-out problems: each agent, and all of them together.

fixed inputs   of the agents that the orchestration has tried apart, from episodes that are played once, before RL; each
               evaluation asks them anew
system         episodes that end in the answer that counts (Orchestration.follow and outcome, purpose "evaluate")

Where a folder is given, what has ended is on disk (draws.py), and an evaluation that was killed goes on with the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from marsrl.rollout.agents.orchestration import is_right
from marsrl.rollout.config import EvaluateConfig
from marsrl.rollout.engines.protocol import Sampling
from marsrl.rollout.episode import Episode, Purpose
from marsrl.rollout.player.completion import Completion
from marsrl.rollout.player.evaluation import EvaluationPlay, OnEnd, OnProgress, Played
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.problem_files import HeldOut
from marsrl.rollout.tasks.protocol import EVALUATION_SET, INPUTS_SET, Task
from marsrl.rollout.team import Team
from marsrl.rollout.types import Ask, Finish, Problem
from marsrl.trainer.config import PolicyConfig
from marsrl.trainer.evaluate.draws import (
    Draw,
    FixedAnswer,
    Kept,
    call_of,
    digest,
    draw_of,
    episode_key,
    fixed_key,
    packed,
)
from marsrl.trainer.evaluate.score import Answered, Scorer
from marsrl.trainer.report.summary import Evaluation
from marsrl.trainer.runs.answers import key_of


@dataclass(frozen=True, slots=True)
class AgentInputs:
    """What one agent is asked in every evaluation: (id of the episode, ask), apart by whether the first input is right."""

    right: tuple[tuple[str, Ask], ...] = ()
    wrong: tuple[tuple[str, Ask], ...] = ()


@dataclass(frozen=True, slots=True)
class FixedInputs:
    """The fixed inputs by agent, and the episodes that hold what they show."""

    inputs: dict[str, AgentInputs] = field(default_factory=dict)
    episodes: dict[str, Episode] = field(default_factory=dict)


@dataclass(slots=True)
class Evaluator:
    """Evaluates a team. Problems and fixed inputs do not depend on `seed`, the draws on nothing else: before and after compare.

    max_tokens: of one completion. policies: settings of those that answer. sets: what to evaluate on; by default the task's
    held-out problems. identity: what tells its answers from another team's, as JSON, for what is kept.
    """

    team: Team
    config: EvaluateConfig
    task: Task
    max_tokens: int
    seed: int
    fixed: FixedInputs = field(default_factory=FixedInputs)
    policies: Mapping[str, PolicyConfig] = field(default_factory=dict)  # for their prices
    sets: Sequence[HeldOut] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)

    def collect_inputs(
        self, versions: Mapping[str, int], progress: OnProgress | None = None, kept: Kept | None = None
    ) -> FixedInputs:
        """Inputs from the team as it is now. Fewer than wanted where it has not solved (or missed) enough problems.

        kept: as in `evaluate`.
        """
        if not self.team.orchestration.tried_apart:
            return self.fixed
        problems = self.task.held_out(3 * self.config.fixed_inputs, INPUTS_SET)
        # What is drawn follows from these names, as from those of the seeds below: others would draw anew.
        names = [f"probe{i:05d}" for i in range(len(problems))]
        episodes = [Episode(n, n, p, self.seed, "collect") for n, p in zip(names, problems, strict=True)]
        identity, left = self._identity(versions), episodes
        if kept is not None:
            held = [kept.episodes.get(episode_key(identity, episode)) for episode in episodes]
            left = [each for each, there in zip(episodes, held, strict=True) if there is None]
            episodes = [there or each for each, there in zip(episodes, held, strict=True)]

        def ended(played: Played) -> None:
            if kept is not None and _is_whole(played):
                kept.episodes.add(episode_key(identity, played.episode), packed(played.episode))

        self._play(left, "probe", versions, progress, ended)
        inputs = {agent: self._fixed_inputs(agent, episodes) for agent in self.team.orchestration.tried_apart}
        used = {name for each in inputs.values() for name, _ in (*each.right, *each.wrong)}
        self._stop_if_unjudged("collect")
        self.fixed = FixedInputs(inputs, {episode.id: episode for episode in episodes if episode.id in used})
        return self.fixed

    def _stop_if_unjudged(self, purpose: Purpose) -> None:
        model = self.team.judge.model
        if model is not None and (reason := model.too_many_missing(purpose)):
            raise RuntimeError(f"evaluation: {reason}")

    def _fixed_inputs(self, agent: str, episodes: Sequence[Episode]) -> AgentInputs:
        asks = [(episode, ask) for episode in episodes for ask in episode.asks.values() if ask.agent == agent]
        size = self.config.fixed_inputs
        if self.team.orchestration.spec(agent).gives_verdicts:
            size //= 2
        by_truth: dict[bool, list[tuple[str, Ask]]] = {True: [], False: []}
        for episode, ask in asks:
            solution = episode.sample(ask.inputs[0])
            if not math.isnan(solution.reward.correct):  # else its judge failed, and it is neither
                by_truth[is_right(solution)].append((episode.id, ask))
        return AgentInputs(tuple(by_truth[True][:size]), tuple(by_truth[False][:size]))

    def evaluate(
        self, versions: Mapping[str, int], progress: OnProgress | None = None, kept: Kept | None = None
    ) -> Evaluation:
        """Every number of the before / after table. Whole episodes and fixed inputs are played side by side.

        kept: what is there of this evaluation, by these weights, and is not played again; what ends is added.

        Raises:
            RuntimeError: a judge left more answers unjudged than judge.max_missing_share.
        """
        notes = _Notes(self.team, self._identity(versions), kept)
        play = self._begin(versions, progress, notes.ended, notes.said)
        places = [(each.name, episode) for each in self.held_out() for episode in self._episodes(each)]
        notes.sets = {episode.id: name for name, episode in places}
        with self._apart():
            play.add([episode for _, episode in places if not notes.has(episode)], self._seed("call"))
            for agent, fixed in self.fixed.inputs.items():
                inputs = (*fixed.right, *fixed.wrong)
                self._ask(play, agent, [each for each in inputs if not notes.has_said(*self._input(each))])
            play.finish()
        for purpose in ("evaluate", "collect"):
            self._stop_if_unjudged(purpose)
        fixed_answers = {
            agent: Answered(
                *([notes.answer(*self._input(each)) for each in part] for part in (fixed.right, fixed.wrong))
            )
            for agent, fixed in self.fixed.inputs.items()
        }
        judge = self.team.judge.model
        scorer = Scorer(
            self.team.orchestration.agents, self.team.agents, self.policies, judge.config.policy if judge else None
        )
        return scorer.evaluation([notes.draw(episode) for _, episode in places], fixed_answers)

    def held_out(self) -> Sequence[HeldOut]:
        """What is evaluated."""
        problems = () if self.sets else self.task.held_out(self.config.num_problems, EVALUATION_SET)
        return self.sets or (HeldOut("", problems, self.config.repeat),)

    def num_kept(self, versions: Mapping[str, int], kept: Kept) -> tuple[int, int]:
        """(draws that are kept, of how many)."""
        identity = self._identity(versions)
        keys = [episode_key(identity, episode) for each in self.held_out() for episode in self._episodes(each)]
        return sum(key in kept.draws for key in keys), len(keys)

    def _identity(self, versions: Mapping[str, int]) -> str:
        return key_of(identity=self.identity, versions=versions)

    def _episodes(self, held_out: HeldOut) -> list[Episode]:
        prefix = f"eval-{held_out.name}-" if held_out.name else "eval"
        problems = {f"{prefix}{i:05d}": problem for i, problem in enumerate(held_out.problems)}
        return self._draws(problems, held_out.repeat)

    def _input(self, fixed: tuple[str, Ask]) -> tuple[Episode, Ask]:
        return self.fixed.episodes[fixed[0]], fixed[1]

    def correctness(
        self, problems: Mapping[str, Problem], repeat: int, versions: Mapping[str, int]
    ) -> dict[str, list[float]]:
        """How right each of `repeat` answers of the whole team is, by the problem's name; NaN where that is not known:
        the judge failed, an engine gave up, the team's own code raised. No answer at all is wrong.

        A problem's draws follow from its name, whatever is asked beside it.
        """
        episodes = self._draws(problems, repeat)
        self._play(episodes, "call", versions, None)
        found: dict[str, list[float]] = {name: [] for name in problems}
        for episode in episodes:
            found[episode.id.rpartition(".")[0]].append(self._correct(episode))
        return found

    def _correct(self, episode: Episode) -> float:
        outcome = self.team.outcome(episode)
        samples = [sample for each in episode.answers.values() for sample in each]
        if episode.error or any(sample.finish is Finish.ERROR for sample in samples):
            return math.nan
        return 0.0 if outcome is None else outcome.reward.correct

    def _draws(self, problems: Mapping[str, Problem], repeat: int) -> list[Episode]:
        return [
            Episode(f"{name}.{draw}", f"{name}.{draw}", problem, self.seed, "evaluate")
            for name, problem in problems.items()
            for draw in range(repeat)
        ]

    def _play(
        self,
        episodes: Sequence[Episode],
        name: str,
        versions: Mapping[str, int],
        progress: OnProgress | None,
        on_end: OnEnd | None = None,
    ) -> None:
        play = self._begin(versions, progress, on_end)
        with self._apart():
            play.add(episodes, self._seed(name))
            play.finish()

    def _apart(self) -> AbstractContextManager[None]:
        """In the body the tools' caches and counts are not the rollouts'."""
        return nullcontext() if self.team.tools is None else self.team.tools.apart()

    def _begin(
        self,
        versions: Mapping[str, int],
        progress: OnProgress | None,
        on_end: OnEnd | None,
        on_said: Callable[[Completion], None] | None = None,
    ) -> EvaluationPlay:
        sampling = Sampling(self.config.temperature, self.config.top_p, self.config.top_k)
        slots = [pool.num_slots for pool in self.team.pools.values()]
        # twice as many as have a slot: one that is free is used, and draws end, and are kept, from early on
        most = None if None in slots else 2 * sum(each or 0 for each in slots)
        return EvaluationPlay(
            self.team, versions, self.max_tokens, sampling,
            progress=progress, on_end=on_end, on_said=on_said, most_open=most,
        )  # fmt: skip

    def _seed(self, name: str) -> int:
        """Asking the same thing under another name draws anew."""
        return derive_seed(self.seed, "evaluate", name)

    def _ask(self, play: EvaluationPlay, agent: str, fixed: Sequence[tuple[str, Ask]]) -> None:
        """Begin a completion to each of these fixed inputs."""
        asks = [(self.fixed.episodes[name].before(ask), ask) for name, ask in fixed]
        play.ask(asks, self._seed(f"{agent} probe"))


class _Notes:
    """What has ended of an evaluation, in memory and, where it is kept, on disk. sets: of each episode, by id."""

    def __init__(self, team: Team, identity: str, kept: Kept | None) -> None:
        self._team, self._identity, self._kept = team, identity, kept
        self._draws: dict[str, Draw] = {}
        self._fixed: dict[str, FixedAnswer] = {}
        self.sets: Mapping[str, str] = {}

    def has(self, episode: Episode) -> bool:
        key = episode_key(self._identity, episode)
        if self._kept is not None and (draw := self._kept.draws.get(key)) is not None:
            self._draws[key] = draw
        return key in self._draws

    def has_said(self, episode: Episode, ask: Ask) -> bool:
        key = fixed_key(self._identity, episode, ask)
        if self._kept is not None and (answer := self._kept.fixed.get(key)) is not None:
            self._fixed[key] = answer
        return key in self._fixed

    def draw(self, episode: Episode) -> Draw:
        return self._draws[episode_key(self._identity, episode)]

    def answer(self, episode: Episode, ask: Ask) -> FixedAnswer:
        return self._fixed[fixed_key(self._identity, episode, ask)]

    def ended(self, played: Played) -> None:
        model = self._team.judge.model
        judged = model.take_counts("evaluate") if model is not None else {}
        key = episode_key(self._identity, played.episode)
        self._draws[key] = draw = draw_of(self._team, self.sets[played.episode.id], played, judged)
        if self._kept is not None and _is_whole(played):
            self._kept.draws.add(key, draw.model_dump(mode="json"))

    def said(self, each: Completion) -> None:
        key = fixed_key(self._identity, each.episode, each.of.ask)
        assert each.sample is not None, f"{each.uid} is not over"
        call = call_of(each.episode, each.of.ask, each.sample, each.seconds)
        self._fixed[key] = answer = FixedAnswer(problem=digest(each.episode.problem), call=call)
        if self._kept is not None and each.sample.finish is not Finish.ERROR:
            self._kept.fixed.add(key, answer.model_dump(mode="json"))


def _is_whole(played: Played) -> bool:
    """Did nothing fail in it? What an engine gave up is played again where an evaluation goes on."""
    return not played.episode.error and not any(sample.finish is Finish.ERROR for sample in played.samples)
