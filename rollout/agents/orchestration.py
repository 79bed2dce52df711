"""Teams: which agent is asked next, with which prompt, and how its completions are parsed and rewarded.

    class TwoSolvers(Orchestration):
        agents = (AgentSpec("first"), AgentSpec("second"))

        def follow(self, episode):
            first = episode.ask("first")
            said = episode.said(first)
            return [first] if said is None else [first, episode.ask("second", said)]

The same class plays in training, in evaluation and in `marsrl try`. Built-in teams are in rollout/orchestrations.
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
    """Rules of a team. It has no engine, clock or state: every method is a function of its arguments.

    A rollout instance (one draw of a problem) is group_size independent episodes with one sample per ask. If is_one_episode, an
    instance is one episode with group_size samples per ask.

    Args:
        agents: settings by agent name; agents that are not named have the defaults.
        default_prompts: the task's prompt set, for agents that name none.
        options: values of Options.
        rollout: settings of rollouts, such as group_size (G) and picks (number of an agent's outputs in a rollout instance that
            are passed to the next agent).
        evaluate: settings of `follow` in evaluation episodes.
        tools: names of the tools that the config sets.
        renderers: chat renderers by agent, for teams that count tokens.
    """

    class Options(Settings):
        """Settings of this team under orchestration_options."""

    name: ClassVar[str] = ""
    agents: tuple[AgentSpec, ...] = ()
    is_one_episode: ClassVar[bool] = False
    plays_sessions: ClassVar[bool] = False
    """True if an external program plays the episodes and calls agents at any time."""
    tools: tuple[str, ...] = ()
    """Names of tools that `follow` calls (episode.call); all must be set in the config's `tools`."""
    optional_tools: ClassVar[tuple[str, ...]] = ()
    """Names of further tools that `follow` calls if the config sets them.

    The object's attribute `tools` then includes these names; it also includes its agents' tools (agents.<name>.tools)."""
    tried_apart: ClassVar[tuple[str, ...]] = ()
    """Agents that are evaluated on fixed inputs, collected from episodes played before RL."""

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
        """Return settings of every agent in the order of play, with defaults for missing ones.

        Raises ValueError for an unknown agent.
        """
        names = [spec.name for spec in cls.agents]
        for name in agents:
            if name not in names:
                raise ValueError(f"agents.{name}: {cls.name} has no such agent; expected one of {', '.join(names)}")
        return {name: agents.get(name, AgentConfig()) for name in names}

    def _prompts_of(self, name: str, default: str) -> PromptSet:
        """Return the prompt set of an agent; ValueError if it lacks the agent's chat or parser.

        A default set may lack a chat for the agent: a user's team may write its own.
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
                f"agents.{name}.parser is {settings.parser}, which reads answers, but {name} gives none; remove it"
            )
        return replace(prompts, parsers={**prompts.parsers, "answer": parser})

    def _compat_of(self, name: str) -> Compat:
        """Return the published code's parser for this Verifier; ValueError if the prompt does not ask for the parser's marker."""
        compat = self._prompts[name].compat()
        if compat is None:
            known = ", ".join(f"{each.marker} ({paper})" for paper, each in COMPATS.items())
            raise ValueError(
                f"agents.{name}.parser is compat, but agents.{name}.prompt ({self._prompts[name].name}) does not ask its "
                f"Verifier for a marker of published code; expected {known}: use the paper's prompt in a file "
                "(docs/prompts.md), or set parser=strict"
            )
        return compat

    # Rules, which a team may override.

    def follow(self, episode: Episode) -> Sequence[Ask | ToolCall]:
        """Return all asks and tool calls that are possible in this episode as it stands; may include earlier ones.

        The episode ends once all asks and calls are answered.
        """
        raise NotImplementedError(f"{type(self).__name__}.follow is not defined; return the asks of an episode")

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        """Return the ask's chat.

        By default this is the prompt of the agent's role with the problem and, if there are any, the first two inputs."""
        solution, report = (*(sample.shown for sample in episode.inputs(ask)), "", "")[:2]
        return self.prompt(ask.agent, self.spec(ask.agent).role, episode, solution, report, others=report)

    def continuation(self, episode: Episode, sample: Sample) -> str | Sequence[Message] | None:
        """Return the continuation of a sample that `parse` marked as Finish.WAITING, or None.

        The continuation is text to append to the sample or, if the sample ended its turn, the messages that follow. Return None
        until the answers and outputs that the sample waits for (asks and calls of `follow`) are available.

        sample: has the text so far, and `turn`, the number of earlier continuations.
        """
        raise NotImplementedError(
            f"sample {sample.uid} waits, but {type(self).__name__}.continuation is not defined; return its continuation"
        )

    def parse(self, sample: Sample) -> Sample:
        """Return the sample with the text that others see and its answer or verdict; a truncated completion has neither.

        Set finish to WAITING if the sample paused for a tool or another agent.
        """
        role, prompts = self.spec(sample.agent).role, self._prompts[sample.agent]
        if compat := self._compats.get(sample.agent):
            return replace(sample, shown=compat.report(sample.text), answer=None, verdict=compat.verdict(sample.text))
        shown = visible(sample.turn_text, sample.in_thought)
        if shown is None or sample.finish is not Finish.STOP or role not in READS:
            return replace(sample, shown=shown or "", answer=None, verdict=None)
        parsed = prompts.parsers[READS[role]].read(shown)
        if isinstance(parsed, bool):
            return replace(sample, shown=shown, answer=None, verdict=parsed)
        return replace(sample, shown=shown, answer=parsed, verdict=None)

    def reward(self, episode: Episode, ask: Ask, sample: Sample, judged: Reward | None = None) -> Reward:
        """Return the agent's own reward of a parsed sample (agentic verifiable rewards, arXiv 2511.11373, section 3).

        judged: the task's judgement of the answer; None without an answer.

        The reward of an answer is `judged`. The reward of a verdict is 1 if it agrees with the correctness of the first input,
        else 0. An adviser's reward is missing until the episode has ended, and then is the episode's outcome. A helper's text
        gets 1 if it is readable, with unknown correctness. Overlong and unparsable completions get 0; an unknown reward is
        missing, never 0.
        """
        spec = self.spec(sample.agent)
        if sample.finish in (Finish.UNFINISHED, Finish.WAITING):
            raise ValueError(f"reward: sample {sample.uid} is not finished; decode its remaining segments first")
        if sample.finish is Finish.ERROR:
            return Reward(MISSING, MISSING, note="the engine failed on the sample")
        if spec.helps:
            readable = float(sample.finish is Finish.STOP and self.is_readable(sample))
            return Reward(readable, MISSING, {"readable": readable}, "" if readable else "no readable output")
        if sample.finish is Finish.LENGTH:
            return Reward(0.0, 0.0, note="overlong")
        if spec.gives_verdicts:
            return self._agreement(episode, ask, sample)
        if spec.advises:
            return Reward(MISSING, MISSING, note="the episode has no outcome yet")
        if sample.answer is None:
            return Reward(0.0, 0.0, note="no answer")
        if judged is None:
            raise ValueError(f"reward: sample {sample.uid} has an answer but no judgement; ask the task to judge it")
        return judged

    def turn_rewards(self, episode: Episode, sample: Sample) -> Sequence[float]:
        """Return a reward for each turn of a sample that paused and continued, or () if single turns are not rewarded.

        These rewards are added to the sample's reward. With credit.turns=returns, each counts for its turn and earlier turns."""
        return ()

    @classmethod
    def reward_rule(cls, agent: AgentSpec) -> str:
        """Describe the agent's reward rule; for a team that overrides `reward`, quote the first line of its docstring."""
        if cls.reward is not Orchestration.reward:
            return (cls.reward.__doc__ or f"what {cls.__name__}.reward returns").strip().partition("\n")[0]
        if agent.advises:
            return "the outcome of the episode"
        if agent.helps:
            return "1 if readable; only the outcome measures its value"
        if agent.gives_verdicts:
            return "1 if the verdict on its first input is right, 0 if it is wrong or missing"
        return "the task's score of the answer, 0 without an answer"

    def outcome(self, episode: Episode) -> Sample | None:
        """Return the sample whose answer counts in a finished episode.

        By default this is the last of `follow`'s samples with an answer (a query is not an answer)."""
        asks = [each for each in self.follow(episode) if isinstance(each, Ask) and not self.spec(each.agent).helps]
        samples = [sample for ask in asks for sample in episode.samples(ask)]
        return next((sample for sample in reversed(samples) if sample.answer is not None), None)

    def alone(self, episode: Episode) -> Sample | None:
        """Return the first agent's answer in a finished episode, given before any other agent answered; None without one.

        Evaluations compare it with `outcome` if the first agent solves problems (AgentSpec.solves)."""
        return next(
            (s for each in self.follow(episode)[:1] if isinstance(each, Ask) for s in episode.samples(each)), None
        )

    def redrawn(self, episode: Episode) -> Collection[str]:
        """Return uids of the samples in a finished episode that were replaced by a later draw of the same agent.

        Evaluations do not count their correctness."""
        return ()

    def outcomes(self, episode: Episode) -> dict[str, float]:
        """Return rewards of a finished episode under credit.reward_scheme=outcome, by uid: by default one outcome for all.

        Without an answer the outcome is 0. It is NaN if the judge failed, or if an engine failed and there is no answer.
        """
        samples = [sample for answer in episode.answers.values() for sample in answer]
        last = returned.sample_or_none(self.outcome(episode))
        value = MISSING if any(sample.finish is Finish.ERROR for sample in samples) else 0.0
        if last is not None:
            value = last.reward.correct
        return {sample.uid: value for sample in samples}

    def metrics(self, episode: Episode) -> Mapping[str, float]:
        """Return metrics of a finished episode, under names that the team chooses.

        team/<name> is the mean over a step's finished episodes."""
        return {}

    def most_samples(self) -> dict[str, int]:
        """Return an upper bound on each agent's samples in a rollout instance, for `marsrl plan`; {} if unknown."""
        return {}

    # Helpers for teams.

    def prompt(
        self, agent: str, role: Role, episode: Episode, solution: str = "", report: str = "", **values: str
    ) -> tuple[Message, ...]:
        """Return the chat of a role from the agent's prompt set. values: further placeholders (roles.PLACEHOLDERS)."""
        require_words(self._prompts[agent], role)
        values |= {"problem": episode.problem.question, "solution": solution, "report": report}
        return self._prompts[agent].fill(role, **values)

    def check_words(self, agent: str, messages: Sequence[Message]) -> None:
        """Raise ValueError if a chat lacks agents.<name>.system or suffix (up to its first brace), which `prompt` inserts."""
        for key, role in (("system", "system"), ("suffix", "user")):
            text = (getattr(self.settings[agent], key) or "").partition("{")[0]
            if text and not any(text in message.content for message in messages if message.role == role):
                raise ValueError(
                    f"agents.{agent}.{key} is set, but {type(self).__name__}.messages does not show it; build the chat with "
                    f"self.prompt(...), or use self.settings[{agent!r}].{key} there"
                )

    def accepts(self, report: Sample) -> bool:
        """Return True if the verdict is "correct", or is missing and agents.<name>.missing_verdict is "correct"."""
        return self.settings[report.agent].missing_verdict == "correct" if report.verdict is None else report.verdict

    # Used by players.

    def unasked(self, problems: Sequence[Problem], read: Mapping[str, Sequence[str]]) -> list[str]:
        """Return warnings about agents whose chats, in most of these problems, do not show a form that their parsers accept.

        read: texts of each agent's chats, if the team overrides `messages`. Parsers without an example, and prompt sets whose
        form a warm start teaches, are not checked.
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
                        f"the prompt of agents.{name}, as {role}, does not show the form of its {READS[role]}, {parser.form}, "
                        f"in {num_without} of {len(chats)} problem(s) checked; other forms cannot be parsed. Ask for the form in "
                        f"the agent's prompt ({prompts.name}), or with agents.{name}.suffix"
                    )
        return warnings

    def spec(self, agent: str) -> AgentSpec:
        if agent not in self.specs:
            raise ValueError(f"{self.name} has no agent {agent!r}; expected one of {', '.join(self.specs)}")
        return self.specs[agent]

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Agents that give verdicts, in the order of play."""
        return tuple(spec.name for spec in self.agents if spec.gives_verdicts)

    def to_judge(self, episode: Episode, sample: Sample) -> str | None:
        """Return the text that the task judges for this parsed sample's `reward`; None if it needs no judgement."""
        spec = self.spec(sample.agent)
        is_judged = sample.finish is Finish.STOP and not (spec.gives_verdicts or spec.helps)
        return sample.answer if is_judged else None

    def is_readable(self, sample: Sample) -> bool:
        """Return True if this parsed sample has an answer, a verdict or, for a role that gives neither, a text.

        With `parser: compat`, which always finds a verdict, True if the format is valid."""
        if compat := self._compats.get(sample.agent):
            return compat.is_valid(sample.text)
        if self.spec(sample.agent).role not in READS:
            return bool(sample.shown.strip())
        return sample.answer is not None or sample.verdict is not None

    def form(self, agent: str) -> str:
        """Describe the form that the agent's parser expects, such as "answer in the form \\boxed{...}".

        Returns "" for a role without a parser.
        """
        kind = READS.get(self.spec(agent).role)
        if kind is None:
            return ""
        parser, compat = self._prompts[agent].parsers.get(kind), self._compats.get(agent)
        form = compat.marker if compat else parser.form if parser else ""
        if not form or not type(self).parse.__module__.startswith("marsrl."):  # a user's team may parse differently
            return f"{kind} that its parser finds"
        return f"{kind} in the form {form}"

    def _agreement(self, episode: Episode, ask: Ask, sample: Sample) -> Reward:
        if not ask.inputs:
            raise ValueError(
                f"reward: the ask of Verifier sample {sample.uid} has no input; expected a solution to verify"
            )
        solution = episode.sample(ask.inputs[0])
        truth = solution.reward
        if truth.is_missing or math.isnan(truth.correct):
            return Reward(MISSING, MISSING, note=f"the solution judged ({solution.uid}) has no reward")
        if not self.is_readable(sample):
            return Reward(0.0, 0.0, note="no verdict")
        agrees = float(sample.verdict == is_right(solution))
        return Reward(agrees, agrees, {"verdict": agrees})


def is_right(sample: Sample) -> bool:
    """Return True if the sample is right before penalties.

    The task's judgement decides or, for a Verifier, the agreement of its verdict with that judgement.
    """
    return sample.reward.correct >= 1
