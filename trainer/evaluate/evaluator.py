"""How good the team is on held-out problems: each agent, and all of them together.

probe     fixed inputs of the agents that the orchestration has probed, from episodes that are played once, before RL; each
          evaluation asks them anew
system    episodes that end in the answer that counts (Orchestration.follow and outcome, purpose "evaluate")
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from marsrl.rollout.agents.picks import is_right
from marsrl.rollout.config import EvaluateConfig
from marsrl.rollout.engines.protocol import Sampling
from marsrl.rollout.episode import Episode, Purpose
from marsrl.rollout.schedule.at_once import AtOnce, Completion, OnProgress
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.team import Team
from marsrl.rollout.types import Ask, Finish, Problem, Sample
from marsrl.trainer.config import PolicyConfig
from marsrl.trainer.report.cost import judge_usage, usage
from marsrl.trainer.report.summary import AgentEstimate, Confusion, Estimate, Evaluation, JudgeUsage, estimate

EVALUATION_SET, PROBE_SET = 0, 1
"""Seeds of the two held-out draws: the same problems whatever run.seed is, and not the same in both."""


@dataclass(frozen=True, slots=True)
class FixedInputs:
    """What one agent is asked in every evaluation: (id of the episode, ask), apart by whether the first input is right."""

    right: tuple[tuple[str, Ask], ...] = ()
    wrong: tuple[tuple[str, Ask], ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """The fixed inputs by agent, and the episodes that hold what they show."""

    inputs: dict[str, FixedInputs] = field(default_factory=dict)
    episodes: dict[str, Episode] = field(default_factory=dict)


@dataclass(slots=True)
class Evaluator:
    """Evaluates a team. Problems and probe do not depend on `seed`, the draws on nothing else: before and after compare.

    max_tokens: of one completion. policies: settings of those that answer.
    """

    team: Team
    config: EvaluateConfig
    task: Task
    max_tokens: int
    seed: int
    probe: Probe = field(default_factory=Probe)
    policies: Mapping[str, PolicyConfig] = field(default_factory=dict)  # for their prices

    def make_probe(self, versions: Mapping[str, int], progress: OnProgress | None = None) -> Probe:
        """Inputs from the team as it is now. Fewer than wanted where it has not solved (or missed) enough problems."""
        if not self.team.orchestration.probed:
            return self.probe
        problems = self.task.held_out(3 * self.config.probe_size, PROBE_SET)
        names = [f"probe{i:05d}" for i in range(len(problems))]
        episodes = [Episode(n, n, p, self.seed, "probe") for n, p in zip(names, problems, strict=True)]
        self._play(episodes, "probe", versions, progress)
        inputs = {agent: self._fixed_inputs(agent, episodes) for agent in self.team.orchestration.probed}
        used = {name for each in inputs.values() for name, _ in (*each.right, *each.wrong)}
        self._stop_if_unjudged("probe")
        self.probe = Probe(inputs, {episode.id: episode for episode in episodes if episode.id in used})
        return self.probe

    def _stop_if_unjudged(self, purpose: Purpose) -> None:
        model = self.team.judge.model
        if model is not None and (reason := model.too_many_missing(purpose)):
            raise RuntimeError(f"evaluation: {reason}")

    def _judge_usage(self) -> JudgeUsage | None:
        model = self.team.judge.model
        if model is None:
            return None
        name = model.config.policy
        return judge_usage(model.take_counts("evaluate"), name, self.policies[name].price)

    def _fixed_inputs(self, agent: str, episodes: Sequence[Episode]) -> FixedInputs:
        asks = [(episode, ask) for episode in episodes for ask in episode.asks.values() if ask.agent == agent]
        size = self.config.probe_size
        if self.team.orchestration.spec(agent).gives_verdicts:
            size //= 2
        by_truth: dict[bool, list[tuple[str, Ask]]] = {True: [], False: []}
        for episode, ask in asks:
            solution = episode.sample(ask.inputs[0])
            if not math.isnan(solution.reward.correct):  # else its judge failed, and it is neither
                by_truth[is_right(solution)].append((episode.id, ask))
        return FixedInputs(tuple(by_truth[True][:size]), tuple(by_truth[False][:size]))

    def evaluate(self, versions: Mapping[str, int], progress: OnProgress | None = None) -> Evaluation:
        """Every number of the before / after table. Whole episodes and fixed inputs are played side by side.

        Raises:
            RuntimeError: a judge left more answers unjudged than judge.max_missing_share.
        """
        held_out = self.task.held_out(self.config.num_problems, EVALUATION_SET)
        episodes = self._draws({f"eval{i:05d}": problem for i, problem in enumerate(held_out)}, self.config.repeat)
        player = self._player(versions, progress)
        player.play(episodes, self._seed("call"))
        asked = {agent: self._ask(player, agent, fixed) for agent, fixed in self.probe.inputs.items()}
        player.finish()
        agents = {}
        for spec in self.team.orchestration.agents:
            calls = [
                (e, ask, s)
                for e in episodes
                for ask in e.asks.values()
                if ask.agent == spec.name
                for s in e.samples(ask)
            ]
            loop = _confusion(calls) if spec.gives_verdicts else None
            if spec.name in asked:
                measure = _balanced if spec.gives_verdicts else _repairs
                agents[spec.name] = measure(asked[spec.name]).model_copy(update={"loop_confusion": loop})
            elif calls:
                found = _accuracy([sample for _, _, sample in calls])
                agents[spec.name] = AgentEstimate(**found.model_dump(), loop_confusion=loop)
        for purpose in ("evaluate", "probe"):
            self._stop_if_unjudged(purpose)
        return Evaluation(
            agents=agents,
            system=_accuracy([self.team.outcome(episode) for episode in episodes]),
            num_episodes=len(episodes),
            usage=usage(player.answered, self.team.agents, self.policies),
            judge=self._judge_usage(),
            team=self._team_metrics(episodes),
        )

    def _team_metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        total: Counter[str] = Counter()
        for episode in episodes:
            total.update(self.team.metrics(episode))
        return {name: value / len(episodes) for name, value in total.items()}

    def correctness(
        self,
        problems: Mapping[str, Problem],
        repeat: int,
        versions: Mapping[str, int],
        progress: OnProgress | None = None,
    ) -> dict[str, list[float]]:
        """How right each of `repeat` answers of the whole team is, by the problem's name; NaN where that is not known:
        the judge failed, an engine gave up, the team's own code raised. No answer at all is wrong.

        A problem's draws follow from its name, whatever is asked beside it.
        """
        episodes = self._draws(problems, repeat)
        self._play(episodes, "call", versions, progress)
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
        self, episodes: Sequence[Episode], name: str, versions: Mapping[str, int], progress: OnProgress | None
    ) -> None:
        player = self._player(versions, progress)
        player.play(episodes, self._seed(name))
        player.finish()

    def _player(self, versions: Mapping[str, int], progress: OnProgress | None) -> AtOnce:
        sampling = Sampling(self.config.temperature, self.config.top_p, self.config.top_k)
        return AtOnce(self.team, versions, self.max_tokens, sampling, progress)

    def _seed(self, name: str) -> int:
        """Asking the same thing under another name draws anew."""
        return derive_seed(self.seed, "evaluate", name)

    def _ask(self, player: AtOnce, agent: str, fixed: FixedInputs) -> _Asked:
        """Begin a completion to each fixed input."""
        right, wrong = (
            player.ask(
                [(self.probe.episodes[name].before(ask), ask) for name, ask in asks], self._seed(f"{agent} probe")
            )
            for asks in (fixed.right, fixed.wrong)
        )
        return _Asked(right, wrong)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The completions to an agent's fixed inputs."""

    right: Sequence[Completion]
    wrong: Sequence[Completion]


def _balanced(asked: _Asked) -> AgentEstimate:
    """Balanced accuracy: the mean of the two classes' accuracies, no verdict counting as an error.

    The probe has equally many of both classes unless the team could not provide them; n is their sum.
    """
    confusion = _confusion([(each.episode, each.ask, each.sample) for each in (*asked.right, *asked.wrong)])
    right, wrong = len(asked.right), len(asked.wrong)
    n = right + wrong
    if not right or not wrong:
        return AgentEstimate(**estimate(0, 0).model_dump(), confusion=confusion)
    balanced = (confusion.right_correct / right + confusion.wrong_wrong / wrong) / 2
    return AgentEstimate(**estimate(balanced * n, n).model_dump(), confusion=confusion)


def _repairs(asked: _Asked) -> AgentEstimate:
    repaired, kept = (_accuracy([each.sample for each in group]) for group in (asked.wrong, asked.right))
    broken = estimate(kept.n - (kept.mean or 0.0) * kept.n, kept.n)
    return AgentEstimate(**repaired.model_dump(), breaks=broken)


def _accuracy(samples: Sequence[Sample | None]) -> Estimate:
    """Mean correctness, the share of right samples where a task knows right and wrong alone.

    None (no answer at all) is wrong; a sample whose judge failed is not counted.
    """
    correct = [0.0 if sample is None else sample.reward.correct for sample in samples]
    known = [value for value in correct if not math.isnan(value)]
    return estimate(math.fsum(known), len(known))


def _confusion(calls: Sequence[tuple[Episode, Ask, Sample]]) -> Confusion:
    """Counts of (actual correctness of the first input, verdict); a solution whose judge failed is not counted."""
    counts = {"right_correct": 0, "right_wrong": 0, "wrong_correct": 0, "wrong_wrong": 0, "none": 0}
    for episode, ask, sample in calls:
        solution = episode.sample(ask.inputs[0])
        if math.isnan(solution.reward.correct):
            continue
        if sample.verdict is None:
            counts["none"] += 1
        else:
            counts[f"{'right' if is_right(solution) else 'wrong'}_{'correct' if sample.verdict else 'wrong'}"] += 1
    return Confusion(**counts)
