"""Teams: which agent answers next, its prompt, and how its completions are parsed and rewarded.

    class TwoSolvers(Orchestration):
        agents = (AgentSpec("first"), AgentSpec("second"))

        def follow(self, episode):
            first = episode.ask("first")
            said = episode.said(first)
            return [first] if said is None else [first, episode.ask("second", said)]

The same class plays in training, in evaluation and in `marsrl try`. Those that ship are in rollout/orchestrations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from marsrl.rollout.agents import returned
from marsrl.rollout.agents.parsers import COMPATS, PARSERS, Compat, visible
from marsrl.rollout.agents.prompts import TAUGHT, PromptSet, prompt_set, require_words
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import READS, AgentSpec, Role
from marsrl.rollout.config import AgentConfig, EvaluateConfig, RolloutConfig, Settings
from marsrl.rollout.episode import Episode
from marsrl.rollout.types import MISSING, Ask, Finish, Message, Problem, Reward, Sample, ToolCall


class Orchestration:
    """Rules of a team. No engine, no clock, no state; every method is a function of its arguments.

    A rollout instance (one draw of a problem) is group_size independent episodes with one sample an ask; or, if is_one_episode,
    one episode with group_size samples an ask.

    Args:
        agents: settings by agent name; an agent that is not named has the defaults.
        default_prompts: the task's prompt set, for agents that name none.
        options: values of Options.
        rollout: group_size, G; picks, the number of an agent's outputs in a rollout instance that go to the next agent.
        evaluate: settings of `follow` in evaluation episodes.
        tools: those that the config has set.
        renderers: by agent, for teams that count tokens.
    """

    class Options(Settings):
        """orchestration_options of this team."""

    name: ClassVar[str] = ""
    agents: tuple[AgentSpec, ...] = ()
    is_one_episode: ClassVar[bool] = False
    plays_sessions: ClassVar[bool] = False
    """True if an external program plays the episodes and calls agents at any time."""
    tools: tuple[str, ...] = ()
    """Names of tools that `follow` calls (episode.call); all must be set in the config's `tools`."""
    optional_tools: ClassVar[tuple[str, ...]] = ()
    """Further tools that `follow` calls if the config sets them. An instance's `tools` includes those, and its agents' own
    (agents.<name>.tools)."""
    tried_apart: ClassVar[tuple[str, ...]] = ()
    """Agents that are evaluated on fixed inputs, from episodes played before RL for that purpose."""

    def __init__(
        self,
        agents: Mapping[str, AgentConfig],
        default_prompts: str,
        options: Settings | None = None,
        rollout: RolloutConfig | None = None,
        evaluate: EvaluateConfig | None = None,
        tools: Collection[str] = (),
        renderers: Mapping[str, ChatRenderer] | None = None,
    ) -> None:
        self.options = self.Options() if options is None else options
        rollout = rollout or RolloutConfig()
        self.group_size, self.num_picks = rollout.group_size, rollout.picks
        self.max_response_tokens = rollout.max_response_tokens
        self.evaluate = evaluate or EvaluateConfig()
        self.renderers = dict(renderers or {})
        self.specs = {spec.name: spec for spec in self.agents}
        self.settings = self.whole_team(agents)
        of_agents = [name for agent in self.settings.values() for name in agent.tools]
        optional = [name for name in self.optional_tools if name in tools]
        self.tools = tuple(dict.fromkeys((*self.tools, *optional, *of_agents)))
        self._prompts: dict[str, PromptSet] = {name: self._prompts_of(name, default_prompts) for name in self.settings}
        compats = [name for name in self.verifiers if self.settings[name].parser == "compat"]
        self._compats = {name: self._compat_of(name) for name in compats}

    @classmethod
    def whole_team(cls, agents: Mapping[str, AgentConfig]) -> dict[str, AgentConfig]:
        """Settings of every agent in the order of play, with defaults for those not given; ValueError for an unknown agent."""
        names = [spec.name for spec in cls.agents]
        for name in agents:
            if name not in names:
                raise ValueError(f"agents.{name}: {cls.name} has no such agent; it has {', '.join(names)}")
        return {name: agents.get(name, AgentConfig()) for name in names}

    def _prompts_of(self, name: str, default: str) -> PromptSet:
        """The prompt set of an agent; ValueError if it lacks the agent's chat or parser.

        A default set need not have a chat for the agent: a user's team may write its own.
        """
        spec, settings = self.specs[name], self.settings[name]
        roles = (spec.role, *spec.also)
        try:
            prompts = prompt_set(settings.prompt or default)
            for role in roles:
                if settings.prompt is not None or (role in READS and READS[role] not in prompts.parsers):
                    require_words(prompts, role)
        except ValueError as error:
            raise ValueError(f"agents.{name}.prompt: {error}") from error
        try:
            prompts = prompts.with_words(roles, settings.system, settings.suffix)
        except ValueError as error:
            raise ValueError(f"agents.{name}.{error}") from error
        if (parser := PARSERS["answer"].get(settings.parser)) is None:
            return prompts
        if not self.plays_sessions and "answer" not in [READS.get(role) for role in roles]:
            raise ValueError(
                f"agents.{name}.parser is {settings.parser}, which reads answers, and {name} gives none: leave it out"
            )
        return replace(prompts, parsers={**prompts.parsers, "answer": parser})

    def _compat_of(self, name: str) -> Compat:
        """The published code's parser for this Verifier; ValueError if the prompt does not ask for the marker that it looks
        for."""
        compat = self._prompts[name].compat()
        if compat is None:
            known = ", ".join(f"{each.marker} ({paper})" for paper, each in COMPATS.items())
            raise ValueError(
                f"agents.{name}.parser is compat, and agents.{name}.prompt ({self._prompts[name].name}) does not ask its "
                f"Verifier for what published code looks for: {known}; give the paper's prompt in a file (docs/prompts.md), or "
                "set parser=strict"
            )
        return compat

    # The rules, which a team may override.

    def follow(self, episode: Episode) -> Sequence[Ask | ToolCall]:
        """All asks and tool calls that are possible in this episode as it stands; may include earlier ones.

        The episode has ended once all of them are answered.
        """
        raise NotImplementedError(f"{type(self).__name__}.follow: say who is asked")

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        """The ask's chat: by default the prompt of the agent's role with the problem and, if there are any, the first two
        inputs."""
        solution, report = (*(sample.shown for sample in episode.inputs(ask)), "", "")[:2]
        return self.prompt(ask.agent, self.spec(ask.agent).role, episode, solution, report, others=report)

    def continuation(self, episode: Episode, sample: Sample) -> str | Sequence[Message] | None:
        """The continuation of a sample that `parse` marked Finish.WAITING: text appended to its own or, if it ended its turn, the
        messages that follow. None until the answers and outputs that it waits for (asks and calls of `follow`) have come.

        sample: has the text so far, and `turn`, the number of earlier continuations.
        """
        raise NotImplementedError(f"{type(self).__name__}.continuation: sample {sample.uid} waits; say what for")

    def parse(self, sample: Sample) -> Sample:
        """The sample with the text that others see and its answer or verdict; a truncated completion has neither.

        finish WAITING if it paused for a tool or another agent.
        """
        role, prompts = self.spec(sample.agent).role, self._prompts[sample.agent]
        if compat := self._compats.get(sample.agent):
            return replace(sample, shown=compat.report(sample.text), answer=None, verdict=compat.verdict(sample.text))
        shown = visible(sample.turn_text, sample.in_thought)
        if shown is None or sample.finish is not Finish.STOP or role not in READS:
            return replace(sample, shown=shown or "", answer=None, verdict=None)
        said = prompts.parsers[READS[role]].read(shown)
        if isinstance(said, bool):
            return replace(sample, shown=shown, answer=None, verdict=said)
        return replace(sample, shown=shown, answer=said, verdict=None)

    def reward(self, episode: Episode, ask: Ask, sample: Sample, judged: Reward | None = None) -> Reward:
        """The agent's own reward of a parsed sample (agentic verifiable rewards, arXiv 2511.11373, section 3).

        An answer gets the task's judgement (judged; None without an answer). A verdict gets 1 if it agrees with the first
        input's correctness. An adviser's reward is missing until the episode has ended, then its outcome. A helper's text gets
        1 if it is readable; its correctness is unknown. Overlong and unparsable completions get 0; an unknown reward is
        missing, never 0.
        """
        spec = self.spec(sample.agent)
        if sample.finish in (Finish.UNFINISHED, Finish.WAITING):
            raise ValueError(f"reward: sample {sample.uid} is not finished; decode its remaining segments first")
        if sample.finish is Finish.ERROR:
            return Reward(MISSING, MISSING, note="the engine gave the sample up")
        if spec.helps:
            readable = float(sample.finish is Finish.STOP and self.is_readable(sample))
            return Reward(readable, MISSING, {"readable": readable}, "" if readable else "nothing that can be read")
        if sample.finish is Finish.LENGTH:
            return Reward(0.0, 0.0, note="overlong")
        if spec.gives_verdicts:
            return self._agreement(episode, ask, sample)
        if spec.advises:
            return Reward(MISSING, MISSING, note="its episode has no outcome yet")
        if sample.answer is None:
            return Reward(0.0, 0.0, note="no answer")
        if judged is None:
            raise ValueError(f"reward: sample {sample.uid} has an answer but no judgement; ask the task to judge it")
        return judged

    @classmethod
    def reward_rule(cls, agent: AgentSpec) -> str:
        """The agent's reward rule as text; for a team that overrides `reward`, the first line of its docstring."""
        if cls.reward is not Orchestration.reward:
            return (cls.reward.__doc__ or f"what {cls.__name__}.reward returns").strip().partition("\n")[0]
        if agent.advises:
            return "the outcome of its episode"
        if agent.helps:
            return "1 where it can be read; what it was worth, only the outcome tells"
        if agent.gives_verdicts:
            return "1 where its verdict is right about its first input, 0 where it is wrong or there is none"
        return "what the task says its answer is worth, 0 without an answer"

    def outcome(self, episode: Episode) -> Sample | None:
        """The sample whose answer counts in a finished episode: by default the last of `follow`'s with an answer (a query is
        none)."""
        asks = [each for each in self.follow(episode) if isinstance(each, Ask) and not self.spec(each.agent).helps]
        samples = [sample for ask in asks for sample in episode.samples(ask)]
        return next((sample for sample in reversed(samples) if sample.answer is not None), None)

    def alone(self, episode: Episode) -> Sample | None:
        """The first agent's own answer in a finished episode, before any other agent answered; None without one. Evaluations
        compare it with `outcome` if the first agent solves problems (AgentSpec.solves)."""
        return next(
            (s for each in self.follow(episode)[:1] if isinstance(each, Ask) for s in episode.samples(each)), None
        )

    def redrawn(self, episode: Episode) -> Collection[str]:
        """Uids of samples in a finished episode that a later draw of the same agent replaced; evaluations do not count their
        correctness."""
        return ()

    def outcomes(self, episode: Episode) -> dict[str, float]:
        """Rewards of a finished episode under credit.reward_scheme=outcome, by uid: by default one outcome for all.

        NaN if the judge of the outcome failed, or the engine of a sample and there is no answer; otherwise 0 without an answer.
        """
        samples = [sample for answer in episode.answers.values() for sample in answer]
        last = returned.sample_or_none(self.outcome(episode))
        value = MISSING if any(sample.finish is Finish.ERROR for sample in samples) else 0.0
        if last is not None:
            value = last.reward.correct
        return {sample.uid: value for sample in samples}

    def metrics(self, episode: Episode) -> Mapping[str, float]:
        """Numbers of a finished episode, by names of the team's choice; team/<name> is the mean over a step's finished
        episodes."""
        return {}

    def most_samples(self) -> dict[str, int]:
        """Upper bound of each agent's samples in a rollout instance, for plans; {} if unknown."""
        return {}

    # Helpers for teams.

    def prompt(
        self, agent: str, role: Role, episode: Episode, solution: str = "", report: str = "", **values: str
    ) -> tuple[Message, ...]:
        """The chat of a role from the agent's prompt set. values: of further placeholders (roles.PLACEHOLDERS)."""
        require_words(self._prompts[agent], role)
        values |= {"problem": episode.problem.question, "solution": solution, "report": report}
        return self._prompts[agent].fill(role, **values)

    def check_words(self, agent: str, messages: Sequence[Message]) -> None:
        """Raise ValueError if a chat lacks agents.<name>.system or suffix, which `prompt` puts into it, up to its first brace."""
        for key, role in (("system", "system"), ("suffix", "user")):
            text = (getattr(self.settings[agent], key) or "").partition("{")[0]
            if text and not any(text in message.content for message in messages if message.role == role):
                raise ValueError(
                    f"agents.{agent}.{key} is set, and {type(self).__name__}.messages does not show it: write the chat with "
                    f"self.prompt(...), or read self.settings[{agent!r}].{key} there"
                )

    def accepts(self, report: Sample) -> bool:
        """True if the verdict is "correct", or is missing and agents.<name>.missing_verdict is "correct"."""
        return self.settings[report.agent].missing_verdict == "correct" if report.verdict is None else report.verdict

    # Used by players.

    def unasked(self, problems: Sequence[Problem], read: Mapping[str, Sequence[str]]) -> list[str]:
        """Warnings about agents whose chats, in most of these problems, show no form that their parsers look for.

        read: by agent, the chats that it read, where the team writes `messages` itself. Parsers without an example are not
        checked, nor prompt sets for policies that are taught here.
        """
        warnings = []
        is_own = not type(self).messages.__module__.startswith("marsrl.")
        for name, spec in self.specs.items():
            prompts = self._prompts[name]
            for role in [role for role in (spec.role, *spec.also) if role in READS and prompts.name not in TAUGHT]:
                if is_own or role not in prompts.turns:
                    chats = read.get(name, ())
                else:
                    filled = (prompts.fill(role, problem=problem.question) for problem in problems)
                    chats = ["\n".join(message.content for message in chat) for chat in filled]
                parser = prompts.parsers[READS[role]]
                num_without = sum(not parser.is_shown(chat) for chat in chats) if parser.markers else 0
                if 2 * num_without > len(chats) and name not in self._compats:
                    warnings.append(
                        f"agents.{name} reads, as {role}, nothing that shows the form of its {READS[role]}, {parser.form}, in "
                        f"{num_without} of {len(chats)} problem(s) looked at; in another form it is not read. Ask for it in the "
                        f"agent's prompt ({prompts.name}), or by agents.{name}.suffix"
                    )
        return warnings

    def spec(self, agent: str) -> AgentSpec:
        if agent not in self.specs:
            raise ValueError(f"{self.name} has no agent {agent!r}; it has {', '.join(self.specs)}")
        return self.specs[agent]

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The agents that give verdicts, in the order of play."""
        return tuple(spec.name for spec in self.agents if spec.gives_verdicts)

    def to_judge(self, episode: Episode, sample: Sample) -> str | None:
        """The text that the task judges for this parsed sample's `reward`; None if it needs no judgement."""
        spec = self.spec(sample.agent)
        is_judged = sample.finish is Finish.STOP and not (spec.gives_verdicts or spec.helps)
        return sample.answer if is_judged else None

    def is_readable(self, sample: Sample) -> bool:
        """True if this parsed sample has an answer, a verdict or, of a role that gives neither, a text; with `parser: compat`,
        which always finds a verdict, if its format is valid."""
        if compat := self._compats.get(sample.agent):
            return compat.is_valid(sample.text)
        if self.spec(sample.agent).role not in READS:
            return bool(sample.shown.strip())
        return sample.answer is not None or sample.verdict is not None

    def form(self, agent: str) -> str:
        """Return what the agent's parser looks for, such as "answer in the form \\boxed{...}"; "" for a role without a parser."""
        kind = READS.get(self.spec(agent).role)
        if kind is None:
            return ""
        parser, compat = self._prompts[agent].parsers.get(kind), self._compats.get(agent)
        form = compat.marker if compat else parser.form if parser else ""
        if not form or not type(self).parse.__module__.startswith("marsrl."):  # a user's team may read otherwise
            return f"{kind} that its parser finds"
        return f"{kind} in the form {form}"

    def _agreement(self, episode: Episode, ask: Ask, sample: Sample) -> Reward:
        if not ask.inputs:
            raise ValueError(f"reward: the ask of Verifier sample {sample.uid} holds no solution")
        solution = episode.sample(ask.inputs[0])
        truth = solution.reward
        if truth.is_missing or math.isnan(truth.correct):
            return Reward(MISSING, MISSING, note=f"the solution judged ({solution.uid}) has no reward")
        if not self.is_readable(sample):
            return Reward(0.0, 0.0, note="no verdict")
        agrees = float(sample.verdict == is_right(solution))
        return Reward(agrees, agrees, {"verdict": agrees})


def is_right(sample: Sample) -> bool:
    """True if the sample is right before penalties: by the task's judgement, or for a Verifier by its verdict's agreement."""
    return sample.reward.correct >= 1
