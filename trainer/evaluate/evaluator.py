"""Evaluation of a team on held-out problems: each agent, and all of them together.

fixed inputs   prompts of the agents in Orchestration.tried_apart, collected from episodes before RL; each evaluation
               draws new answers to them
system         whole episodes; the team's final answer counts (Orchestration.follow and outcome, purpose "evaluate")

With a folder, finished draws are on disk (draws.py), and an evaluation that was killed resumes with the remaining draws.
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
from marsrl.rollout.player.evaluation import Cast, EvaluationPlay, OnEnd, OnProgress, Played
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.problem_files import HeldOut
from marsrl.rollout.tasks.protocol import EVALUATION_SET, INPUTS_SET, Task
from marsrl.rollout.team import Team
from marsrl.rollout.types import Ask, Finish, Problem
from marsrl.trainer.evaluate.draws import FixedAnswer, Kept, call_of, digest, draw_of, episode_key, fixed_key, packed
from marsrl.trainer.evaluate.score import Scorer
from marsrl.trainer.report.summary import Evaluation
from marsrl.trainer.runs.answers import key_of


@dataclass(frozen=True, slots=True)
class FixedInputs:
    """Inputs that the agents answer in every evaluation.

    inputs: {agent: (episode id, ask) of each input}. episodes: {id: episode that an input comes from}.
    """

    inputs: dict[str, tuple[tuple[str, Ask], ...]] = field(default_factory=dict)
    episodes: dict[str, Episode] = field(default_factory=dict)


@dataclass(slots=True)
class Evaluator:
    """Evaluator of a team. All evaluations use the same problems and fixed inputs, so results are comparable.

    max_tokens: largest number of tokens of a completion.
    seed: seed of the draws.
    fixed: fixed inputs, once collected.
    sets: problems to evaluate on; by default the task's held-out problems.
    identity: JSON that identifies the team, so that saved answers of another team are not used.
    """

    team: Team
    config: EvaluateConfig
    task: Task
    max_tokens: int
    seed: int
    fixed: FixedInputs = field(default_factory=FixedInputs)
    sets: Sequence[HeldOut] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)

    def collect_inputs(
        self, versions: Mapping[str, int], progress: OnProgress | None = None, kept: Kept | None = None
    ) -> FixedInputs:
        """Collect fixed inputs from the current team's episodes.

        Fewer than configured are collected if the team solves or fails too few problems.

        kept: as in `evaluate`.
        """
        if not self.team.orchestration.tried_apart:
            return self.fixed
        store, keyed = (kept or Kept()).episodes, self._input_episodes(versions)
        keys = {episode.id: key for key, episode in keyed.items()}

        def ended(played: Played) -> None:
            store.add(keys[played.episode.id], packed(played.episode), is_whole=_is_whole(played))

        left = [episode for key, episode in keyed.items() if key not in store]
        self.play([(left, {})], "probe", versions, _counted(progress, len(keyed) - len(left)), ended)
        episodes = [store[key] for key in keyed]
        inputs = {agent: self._fixed_inputs(agent, episodes) for agent in self.team.orchestration.tried_apart}
        used = {name for each in inputs.values() for name, _ in each}
        self._stop_if_unjudged("collect")
        self.fixed = FixedInputs(inputs, {episode.id: episode for episode in episodes if episode.id in used})
        return self.fixed

    def _input_episodes(self, versions: Mapping[str, int]) -> dict[str, Episode]:
        """Return the episodes to collect fixed inputs from, by key; {} if no agent is tested on fixed inputs."""
        if not self.team.orchestration.tried_apart:
            return {}
        problems = self.task.held_out(3 * self.config.fixed_inputs, INPUTS_SET)
        # Draws depend on these names and on the seeds' names below: a changed name changes all draws.
        names = [f"probe{i:05d}" for i in range(len(problems))]
        episodes = [Episode(n, n, p, self.seed, "collect") for n, p in zip(names, problems, strict=True)]
        return {episode_key(self._identity(versions), episode): episode for episode in episodes}

    def _stop_if_unjudged(self, purpose: Purpose) -> None:
        model = self.team.judge.model
        if model is not None and (reason := model.too_many_missing(purpose)):
            raise RuntimeError(f"evaluation: {reason}")

    def _fixed_inputs(self, agent: str, episodes: Sequence[Episode]) -> tuple[tuple[str, Ask], ...]:
        asks = [(episode, ask) for episode in episodes for ask in episode.asks.values() if ask.agent == agent]
        size = self.config.fixed_inputs
        if self.team.orchestration.spec(agent).gives_verdicts:
            size //= 2
        by_truth: dict[bool, list[tuple[str, Ask]]] = {True: [], False: []}
        for episode, ask in asks:
            solution = episode.sample(ask.inputs[0])
            if not math.isnan(solution.reward.correct):  # NaN: the solution's judge failed
                by_truth[is_right(solution)].append((episode.id, ask))
        return (*by_truth[True][:size], *by_truth[False][:size])

    def evaluate(
        self, versions: Mapping[str, int], progress: OnProgress | None = None, kept: Kept | None = None
    ) -> Evaluation:
        """Evaluate the team, and return all results. Whole episodes and fixed inputs are played concurrently.

        kept: saved results of this evaluation with these weights. Saved results are not repeated; new ones are added.

        Raises RuntimeError: a judge left more answers unjudged than judge.max_missing_share.
        """
        kept, identity, model = kept or Kept(), self._identity(versions), self.team.judge.model
        sets = {episode.id: (each.name, episode) for each in self.held_out() for episode in self._episodes(each)}
        keys = {name: episode_key(identity, episode) for name, (_, episode) in sets.items()}
        asks = {
            agent: [(self.fixed.episodes[name], ask) for name, ask in inputs]
            for agent, inputs in self.fixed.inputs.items()
        }

        def ended(played: Played) -> None:
            name = played.episode.id
            judged = model.take_counts("evaluate") if model is not None else {}
            draw = draw_of(self.team, sets[name][0], played, judged)
            kept.draws.add(keys[name], draw.model_dump(mode="json"), is_whole=_is_whole(played))

        def said(completion: Completion) -> None:
            episode, ask, sample = completion.episode, completion.of.ask, completion.sample
            assert sample is not None, f"{completion.uid} is not over"
            call = call_of(self.team, episode, ask, sample, completion.seconds, completion.usage)
            answer = FixedAnswer(problem=digest(episode.problem), call=call, prompts=[sample.prompt_text])
            is_whole = sample.finish is not Finish.ERROR
            kept.fixed.add(fixed_key(identity, episode, ask), answer.model_dump(mode="json"), is_whole=is_whole)

        episodes = [episode for name, (_, episode) in sets.items() if keys[name] not in kept.draws]
        play = self._begin(versions, _counted(progress, len(sets) - len(episodes)), ended, said)
        with self._apart():
            play.add(episodes, self._seed("call"))
            for agent, given in asks.items():
                left = [(episode, ask) for episode, ask in given if fixed_key(identity, episode, ask) not in kept.fixed]
                play.ask([(episode.before(ask), ask) for episode, ask in left], self._seed(f"{agent} probe"))
            play.finish()
        for purpose in ("evaluate", "collect"):
            self._stop_if_unjudged(purpose)
        return self.scored(versions, kept)

    def scored(self, versions: Mapping[str, int], kept: Kept) -> Evaluation:
        """Return the results of the draws and fixed answers that have ended so far."""
        identity, model, orchestration = self._identity(versions), self.team.judge.model, self.team.orchestration
        wanted_keys = {
            agent: [fixed_key(identity, self.fixed.episodes[name], ask) for name, ask in inputs]
            for agent, inputs in self.fixed.inputs.items()
        }
        answers = {agent: [kept.fixed[key] for key in keys if key in kept.fixed] for agent, keys in wanted_keys.items()}
        scorer = Scorer(
            orchestration.agents,
            self.team.agents,
            judge=model.config.policy if model is not None else None,
            forms={spec.name: orchestration.form(spec.name) for spec in orchestration.agents},
        )
        return scorer.evaluation([kept.draws[key] for key in self._keys(versions) if key in kept.draws], answers)

    def held_out(self) -> Sequence[HeldOut]:
        """Sets of problems to evaluate on."""
        problems = () if self.sets else self.task.held_out(self.config.num_problems, EVALUATION_SET)
        return self.sets or (HeldOut("", problems, self.config.repeat),)

    def num_kept(self, versions: Mapping[str, int], kept: Kept) -> tuple[int, int]:
        """Return (number of saved draws, number of all draws)."""
        keys = self._keys(versions)
        return sum(key in kept.draws for key in keys), len(keys)

    def ended(self, versions: Mapping[str, int], kept: Kept) -> str:
        """Return the progress as text; "" if there is none.

        Example: "120 of 120 episodes for fixed inputs, 12 of 64 draws".
        """
        inputs, (num_kept, num_draws) = self._input_episodes(versions), self.num_kept(versions, kept)
        num_inputs = sum(key in kept.episodes for key in inputs)
        of_inputs = [f"{num_inputs} of {len(inputs)} episodes for fixed inputs"] if inputs else []
        return ", ".join([*of_inputs, f"{num_kept} of {num_draws} draws"]) if num_inputs or num_kept else ""

    def _keys(self, versions: Mapping[str, int]) -> list[str]:
        identity = self._identity(versions)
        return [episode_key(identity, episode) for each in self.held_out() for episode in self._episodes(each)]

    def _identity(self, versions: Mapping[str, int]) -> str:
        return key_of(identity=self.identity, versions=versions)

    def _episodes(self, held_out: HeldOut) -> list[Episode]:
        prefix = f"eval-{held_out.name}-" if held_out.name else "eval"
        problems = {f"{prefix}{i:05d}": problem for i, problem in enumerate(held_out.problems)}
        return self._draws(problems, held_out.repeat)

    def correctness(
        self, problems: Mapping[str, Problem], repeat: int, versions: Mapping[str, int]
    ) -> dict[str, list[float]]:
        """Return the correctness of `repeat` answers of the whole team to each problem, by the problem's name.

        NaN: unknown, because the judge failed, an engine gave up, or the team's own code raised. A missing answer is wrong.
        A problem's draws depend only on its name, not on the other problems.
        """
        episodes = self._draws(problems, repeat)
        self.play([(episodes, {})], "call", versions, None)
        correctness_of: dict[str, list[float]] = {name: [] for name in problems}
        for episode in episodes:
            outcome = self.team.outcome(episode)
            samples = [sample for each in episode.answers.values() for sample in each]
            is_known = not episode.error and not any(sample.finish is Finish.ERROR for sample in samples)
            correct = 0.0 if outcome is None else outcome.reward.correct
            correctness_of[episode.id.rpartition(".")[0]].append(correct if is_known else math.nan)
        return correctness_of

    def _draws(self, problems: Mapping[str, Problem], repeat: int) -> list[Episode]:
        return [
            Episode(f"{name}.{draw}", f"{name}.{draw}", problem, self.seed, "evaluate")
            for name, problem in problems.items()
            for draw in range(repeat)
        ]

    def play(
        self,
        parts: Sequence[tuple[Sequence[Episode], Cast]],
        name: str,
        versions: Mapping[str, int],
        progress: OnProgress | None,
        on_end: OnEnd | None = None,
    ) -> None:
        """Play the episodes of all parts to their ends.

        parts: pairs of episodes and the adapters that play some agents in them (Cast). name: name of the draws, hashed for the
            seed.
        """
        play = self._begin(versions, progress, on_end)
        with self._apart():
            for episodes, cast in parts:
                play.add(episodes, self._seed(name), cast)
            play.finish()

    def _apart(self) -> AbstractContextManager[None]:
        """In the body, use caches and counts of tools that are separate from those of rollouts."""
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
        # Twice as many open episodes as slots keep all slots busy. With more, the first draws would end, and be saved, later.
        most = None if None in slots else 2 * sum(each or 0 for each in slots)
        return EvaluationPlay(
            self.team, versions, self.max_tokens, sampling,
            progress=progress, on_end=on_end, on_said=on_said, most_open=most,
        )  # fmt: skip

    def _seed(self, name: str) -> int:
        """Return the seed of draws with this name: the same request under another name gives new draws."""
        return derive_seed(self.seed, "evaluate", name)


def _counted(progress: OnProgress | None, num_kept: int) -> OnProgress | None:
    """Return a progress callback that also counts the `num_kept` episodes that an earlier process played."""
    if progress is None:
        return None
    return lambda num_over, total, *more: progress(num_kept + num_over, num_kept + total, *more)


def _is_whole(played: Played) -> bool:
    """Return True if nothing failed in the episode; a resumed evaluation repeats failed episodes."""
    return not played.episode.error and not any(sample.finish is Finish.ERROR for sample in played.samples)
