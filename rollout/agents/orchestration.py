"""How a team plays a problem: what each agent reads, what its outputs are worth, and who is asked next.

verifier_corrector   solver -> verifier1 -> corrector1 -> verifier2 -> corrector2    (MarsRL; a Corrector is asked only
                                                                                     about reports that flag an error)
solver               solver                                                          (plain RL of one agent)

ask = team.first_ask(rollout_id, problem)
messages = team.messages(ask)                       -> render, decode a group, decode its text
sample = team.parse(sample)                         -> answer or verdict
reward = team.reward(ask, sample, judged)           -> judged by the task where team.needs_judge(sample)
asks = team.next_asks([(ask, group), ...], rng)     -> once every group of that agent and instance is complete
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from marsrl.rollout.agents.parsers import THINK_OPEN, compat_report, compat_verdict, visible
from marsrl.rollout.agents.picks import is_right, pick
from marsrl.rollout.agents.prompts import PromptSet, prompt_set
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import MISSING, Ask, Finish, Group, Message, Problem, Reward, Sample

FinishedGroup = tuple[Ask, Group]


class Orchestration:
    """A team's rules: agents in a row, the first a Solver, with agentic rewards. No engine, no clock, no random source.

    Args:
        agents: settings by agent name; an agent that is not named has the defaults.
        default_prompts: the task's prompt set, for agents that name none.
        num_picks: outputs of one agent and rollout instance that are handed on.
    """

    name: ClassVar[str]
    agents: ClassVar[tuple[AgentSpec, ...]]

    def __init__(self, agents: Mapping[str, AgentConfig], default_prompts: str, num_picks: int = 2) -> None:
        self._specs = {spec.name: spec for spec in self.agents}
        self.settings = self.whole_team(agents)
        self._prompts: dict[str, PromptSet] = {
            name: prompt_set(settings.prompt or default_prompts) for name, settings in self.settings.items()
        }
        self._num_picks = num_picks

    @classmethod
    def whole_team(cls, agents: Mapping[str, AgentConfig]) -> dict[str, AgentConfig]:
        """Settings of every agent in the order of play, defaults for those not given; ValueError for one that is none."""
        names = [spec.name for spec in cls.agents]
        for name in agents:
            if name not in names:
                raise ValueError(f"agents.{name}: {cls.name} has no such agent; it has {', '.join(names)}")
        return {name: agents.get(name, AgentConfig()) for name in names}

    def role(self, agent: str) -> Role:
        return self._spec(agent).role

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The agents that give verdicts, in the order of play; none in a team without."""
        return tuple(spec.name for spec in self.agents if spec.role is Role.VERIFIER)

    def first_ask(self, rollout_id: str, problem: Problem) -> Ask:
        return Ask(rollout_id, problem, "solver")

    def ask_about(self, agent: str, parent: Sample, parent_ask: Ask) -> Ask:
        """The ask of `agent` about its predecessor's output: for a Corrector, the report and what it reported on."""
        if self.role(agent) is Role.CORRECTOR:
            return Ask(parent_ask.rollout_id, parent_ask.problem, agent, parent, parent_ask.solution, parent)
        return Ask(parent_ask.rollout_id, parent_ask.problem, agent, parent, parent)

    def messages(self, ask: Ask) -> tuple[Message, ...]:
        """The chat that asks; of earlier outputs it shows the visible text only."""
        return self._prompts[self._spec(ask.agent).name].fill(
            self.role(ask.agent),
            problem=ask.problem.question,
            solution=self.shown(ask.solution) if ask.solution else "",
            report=self.shown(ask.report) if ask.report else "",
        )

    def shown(self, sample: Sample) -> str:
        """What other agents see of a sample; "" if it never said anything."""
        if self._is_compat(sample.agent):
            return compat_report(sample.text)
        return visible(sample.text, _starts_in_thought(sample)) or ""

    def parse(self, sample: Sample) -> Sample:
        """The sample with its answer or verdict read. A cut-off completion has neither."""
        prompts = self._prompts[self._spec(sample.agent).name]
        is_verifier = self.role(sample.agent) is Role.VERIFIER
        if self._is_compat(sample.agent):
            return replace(sample, answer=None, verdict=compat_verdict(sample.text))
        text = visible(sample.text, _starts_in_thought(sample)) if sample.finish is Finish.STOP else None
        if text is None:
            return replace(sample, answer=None, verdict=None)
        if is_verifier:
            return replace(sample, answer=None, verdict=prompts.read_verdict(text))
        return replace(sample, answer=prompts.read_answer(text), verdict=None)

    def needs_judge(self, sample: Sample) -> bool:
        """Does `reward` want the task's judgement of this parsed sample's answer?"""
        return (
            self.role(sample.agent) is not Role.VERIFIER and sample.finish is Finish.STOP and sample.answer is not None
        )

    def reward(self, ask: Ask, sample: Sample, judged: Reward | None = None) -> Reward:
        """Agentic verifiable reward of a parsed sample (arXiv 2511.11373, section 3).

        Solver, Corrector: the task's judgement. Verifier: does the verdict agree with the solution's own correctness?
        Overlong and unparsable completions get 0; what cannot be known is missing, never 0.
        """
        if sample.finish is Finish.UNFINISHED:
            raise ValueError(f"reward: sample {sample.uid} is not finished; decode its remaining segments first")
        if sample.finish is Finish.ERROR:
            return Reward(MISSING, MISSING, note="the engine gave the sample up")
        if sample.finish is Finish.LENGTH:
            return Reward(0.0, 0.0, note="overlong")
        if self.role(sample.agent) is Role.VERIFIER:
            return self._verifier_reward(ask, sample)
        if sample.answer is None:
            return Reward(0.0, 0.0, note="no answer")
        if judged is None:
            raise ValueError(f"reward: sample {sample.uid} has an answer but no judgement; ask the task to judge it")
        return judged

    def _verifier_reward(self, ask: Ask, sample: Sample) -> Reward:
        if ask.solution is None:
            raise ValueError(f"reward: the ask of Verifier sample {sample.uid} holds no solution")
        truth = ask.solution.reward
        if truth.is_missing or math.isnan(truth.correct):
            return Reward(MISSING, MISSING, note=f"the solution judged ({ask.solution.uid}) has no reward")
        # compat reads a verdict into anything; a text that strictly has none is a format failure there too.
        if sample.verdict is None or (self._is_compat(sample.agent) and visible(sample.text) is None):
            return Reward(0.0, 0.0, note="no verdict")
        agrees = float(sample.verdict == is_right(ask.solution))
        return Reward(agrees, agrees, {"verdict": agrees})

    def is_eligible(self, sample: Sample, for_agent: str) -> bool:
        """May `for_agent` be asked about this sample? Finished, parsable, rewarded; for a Corrector: flagged wrong.

        With agents.<name>.pick_unparsable also one that says something, but no answer or no verdict.
        """
        if sample.finish is not Finish.STOP or sample.reward.is_missing or math.isnan(sample.reward.correct):
            return False
        may_be_unparsable = self.settings[for_agent].pick_unparsable and self.shown(sample) != ""
        if self.role(for_agent) is Role.CORRECTOR:
            is_flagged = sample.verdict is None and self.settings[sample.agent].missing_verdict == "wrong"
            return sample.verdict is False or (may_be_unparsable and is_flagged)
        return sample.answer is not None or may_be_unparsable

    def next_asks(self, finished: Sequence[FinishedGroup], rng: random.Random) -> list[Ask]:
        """The asks of the next agent about one agent's finished groups of one rollout instance, sorted by parent uid.

        Picks are counted over all the groups together. Give a generator that derives from (run seed, rollout_id,
        agent); then the outcome does not depend on the order in which groups or instances finished.
        """
        if not finished:
            return []
        instances = {(ask.rollout_id, ask.agent) for ask, _ in finished}
        if len(instances) > 1:
            raise ValueError(
                f"next_asks: groups of one agent of one rollout instance are wanted, found {sorted(instances)}"
            )
        agent = finished[0][0].agent
        successor = next((spec for spec in self.agents if spec.predecessor == agent), None)
        if successor is None:
            return []
        ask_of = {sample.uid: ask for ask, group in finished for sample in group.samples}
        candidates = [s for _, group in finished for s in group.samples if self.is_eligible(s, successor.name)]
        # A Verifier learns most from wrong solutions, a Corrector from reports that found a real error.
        prefers_right = successor.role is Role.CORRECTOR
        chosen = pick(candidates, self._num_picks, self.settings[successor.name].pick, prefers_right, rng)
        return [self.ask_about(successor.name, sample, ask_of[sample.uid]) for sample in chosen]

    def _is_compat(self, agent: str) -> bool:
        return self.role(agent) is Role.VERIFIER and self.settings[agent].parser == "compat"

    def _spec(self, agent: str) -> AgentSpec:
        if agent not in self._specs:
            raise ValueError(f"{self.name} has no agent {agent!r}; it has {', '.join(self._specs)}")
        return self._specs[agent]


def _starts_in_thought(sample: Sample) -> bool:
    """Did the chat template open the thought, as those of thinking-only models do?"""
    return sample.prompt_text.rstrip().endswith(THINK_OPEN)


class VerifierCorrector(Orchestration):
    """The Verifier-Corrector reasoning system (arXiv:2511.11373): five agents."""

    name = "verifier_corrector"
    agents = (
        AgentSpec("solver", Role.SOLVER, None),
        AgentSpec("verifier1", Role.VERIFIER, "solver"),
        AgentSpec("corrector1", Role.CORRECTOR, "verifier1"),
        AgentSpec("verifier2", Role.VERIFIER, "corrector1"),
        AgentSpec("corrector2", Role.CORRECTOR, "verifier2"),
    )


class Solver(Orchestration):
    """One agent: plain RL (UloRL, arXiv:2507.19766; "only Solver's samples" of arXiv:2511.11373, Table 2)."""

    name = "solver"
    agents = (AgentSpec("solver", Role.SOLVER, None),)


ORCHESTRATIONS: Mapping[str, type[Orchestration]] = {kind.name: kind for kind in (VerifierCorrector, Solver)}


def agent_names(orchestration: str) -> tuple[str, ...]:
    """Those of the orchestration of this name, in the order of play."""
    return tuple(spec.name for spec in _find(orchestration).agents)


def whole_team(orchestration: str, agents: Mapping[str, AgentConfig]) -> dict[str, AgentConfig]:
    """Settings of every agent of the orchestration of this name, defaults for those not given."""
    return _find(orchestration).whole_team(agents)


def build_orchestration(
    name: str, agents: Mapping[str, AgentConfig], default_prompts: str, num_picks: int = 2
) -> Orchestration:
    """The orchestration of this name; ValueError names the ones there are."""
    return _find(name)(agents, default_prompts, num_picks)


def _find(name: str) -> type[Orchestration]:
    if name not in ORCHESTRATIONS:
        raise ValueError(f"orchestration is {name!r}; there are {', '.join(sorted(ORCHESTRATIONS))}")
    return ORCHESTRATIONS[name]
