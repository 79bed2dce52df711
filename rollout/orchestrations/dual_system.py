"""One policy in two roles: System 2 reasons and calls tools, System 1 condenses their outputs (MARS, arXiv:2510.04935)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pydantic import Field

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.parsers import tagged
from marsrl.rollout.agents.prompts import NEXT_TURN, NOTHING_READ, TOOLS, tool_response
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.config import Count, Settings, Tokens
from marsrl.rollout.episode import Episode
from marsrl.rollout.fitting import first_fit_decreasing
from marsrl.rollout.types import MISSING, Ask, Finish, Message, Sample, ToolCall, ToolOutput

_BETWEEN = "\n\n"  # separator of outputs in a bin
_PACKED = 1024  # calls whose bins are cached; enough for one call in each of MARS's 32 x 16 episodes of two steps
_READ_ITSELF = ("python",)  # tools whose output System 2 reads directly


class DualSystem(Orchestration):
    """Team in which System 2, in each turn, thinks and then calls a tool, answers, or does neither and continues.

        system2 -call-> tool -outputs-> bins -> system1, once per bin -distillates-> system2 -call-> ... -> answer

    Outputs of search, scholar and visit are packed into bins by first-fit-decreasing on their tokens. A bin's capacity is
    System 1's input limit minus its instructions, the question and the purpose; a longer output is cut, and gets its own
    bin. System 1 reads all bins in parallel. Its texts, in the bins' order, are System 2's next message: not sampled, but
    counted in System 2's length. System 2 reads Python's output, and all errors, directly.

    In a turn with a call and an answer, the call wins. If a call is invalid, or its tool is not set in the config, its output is
    an error text. The last turn cannot call a tool: the episode ends with its answer, or with outcome 0 if it has none. Both
    systems are trained on that outcome (credit.reward_scheme=outcome).
    """

    class Options(Settings):
        max_turns: Count = Field(10, description="maximum turns of System 2")
        distil: bool = True
        """false: no System 1; System 2 reads all outputs itself (max_found_tokens)"""
        max_found_tokens: Tokens = 8192
        """without System 1: maximum tokens of a call's outputs; the longest lose their ends first, down to a common length"""
        show_purpose: bool = True
        """show System 1 the purpose of a call (MARS, equation 2); the paper's template E.1 does not"""

    name = "dual_system"
    agents = (AgentSpec("system2", Role.REASONER), AgentSpec("system1", Role.DISTILLER))
    optional_tools = ("search", "scholar", "visit", "python")
    options: DualSystem.Options

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # Cached, because the bins are needed for the asks, and again for each prompt and its parsing.
        self._bins = lru_cache(_PACKED)(self._pack)

    def follow(self, episode: Episode) -> Sequence[Ask | ToolCall]:
        requests: list[Ask | ToolCall] = [episode.ask("system2")]
        for sample in (each for each in episode.waiting.values() if each.agent == "system2"):
            reading_plan = self._wanted(episode, sample)
            if isinstance(reading_plan, tuple):
                requests += [reading_plan[0], *(ask for ask, _ in self._readings(episode, sample, *reading_plan))]
        return requests

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        role = self.spec(ask.agent).role
        if ask.agent == "system2":
            return self.prompt(ask.agent, role, episode, tools="\n".join(TOOLS[name] for name in self.tools))
        (sample,) = episode.inputs(ask)
        reading_plan = self._wanted(episode, sample)
        assert isinstance(reading_plan, tuple)
        (found,) = (text for each, text in self._readings(episode, sample, *reading_plan) if each.id == ask.id)
        return self.prompt(ask.agent, role, episode, output=found, purpose=reading_plan[1])

    def continuation(self, episode: Episode, sample: Sample) -> Sequence[Message] | None:
        reading_plan = self._wanted(episode, sample)
        if reading_plan is None:
            return (Message("user", NEXT_TURN),)
        text = (
            f"error: {reading_plan}" if isinstance(reading_plan, str) else self._found(episode, sample, *reading_plan)
        )
        return None if text is None else (Message("user", tool_response(text)),)

    def _found(self, episode: Episode, sample: Sample, call: ToolCall, purpose: str) -> str | None:
        """Return the text that System 2 reads of a call's output; None until all of it is available."""
        output = episode.output(call)
        if output is None:
            return None
        if output.is_error or call.tool in _READ_ITSELF:
            return output.text
        if not self.options.distil:
            return self._cut(output)
        asks = [ask for ask, _ in self._readings(episode, sample, call, purpose)]
        if not all(episode.is_over(ask) for ask in asks):
            return None
        said = [episode.said(ask) for ask in asks]
        read = [NOTHING_READ if each is None or not each.shown else each.shown for each in said]
        return _BETWEEN.join(read) or NOTHING_READ

    def parse(self, sample: Sample) -> Sample:
        """Set `shown`, for System 2 to the text of its current turn. A turn with a call or without an answer is WAITING."""
        read = super().parse(sample)
        if sample.agent == "system1" or read.finish is not Finish.STOP or sample.turn + 1 >= self.options.max_turns:
            return read
        if read.answer is None or tagged("tool_call", read.shown) is not None:
            return replace(read, answer=None, finish=Finish.WAITING)
        return read

    def outcomes(self, episode: Episode) -> dict[str, float]:
        """Return the correctness of System 2's answer for every sample, by uid.

        It is 0 without an answer, and NaN if System 2's engine or the judge failed.
        """
        (last,) = episode.samples(episode.ask("system2")) or (None,)
        value = MISSING if last is None else last.reward.correct
        return {sample.uid: value for answer in episode.answers.values() for sample in answer}

    def metrics(self, episode: Episode) -> Mapping[str, float]:
        """Return counts of an episode.

        turns: System 2's turns. answered: 1 if there is an answer. calls/NAME: calls of a tool. pages, papers: number found by
        tools. failed_calls: calls whose output is an error. turns_without_call: turns that continued without a valid call.
        distillates: System 1's texts, one per bin. distillates_at_once: the most bins of one call, which are read in parallel.
        """
        reasoned = episode.samples(episode.ask("system2"))
        num_waits = sum(sample.turn for sample in reasoned)
        tools = [call.tool for call in episode.calls.values()]
        num_parts = Counter[str]()
        for name, output in episode.outputs.items():
            num_parts[episode.calls[name].tool] += len(output.parts)
        num_found = {"pages": num_parts["search"] + num_parts["visit"], "papers": num_parts["scholar"]}
        # Ids of these asks end in /system1, /system1#TURN or /system1#TURN.BIN; the bins of one call share the turn.
        turns = (ask.id.rpartition("/system1")[2] for ask in episode.asks.values() if ask.agent == "system1")
        bins = Counter(int(turn.lstrip("#").partition(".")[0] or 0) for turn in turns)
        return {
            "turns": num_waits + len(reasoned),
            "answered": sum(sample.answer is not None for sample in reasoned),
            "turns_without_call": num_waits - len(tools),
            "failed_calls": sum(output.is_error for output in episode.outputs.values()),
            "distillates": bins.total(),
            "distillates_at_once": max(bins.values(), default=0),
            **{f"calls/{name}": tools.count(name) for name in self.tools},
            **num_found,
        }

    def _wanted(self, episode: Episode, sample: Sample) -> tuple[ToolCall, str] | str | None:
        """Return (the call in System 2's current turn, its purpose if shown to System 1), or an error text; None without a
        call."""
        text = tagged("tool_call", sample.shown)
        if text is None:
            return None
        try:
            call = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"the call is not JSON ({str(error)[:100]})"
        if not isinstance(call, dict) or not {"tool", "arguments"} <= call.keys() <= {"tool", "arguments", "purpose"}:
            return 'the call must be {"tool": ..., "arguments": {...}, "purpose": ...}'
        tool, arguments, purpose = call["tool"], call["arguments"], call.get("purpose", "")
        if tool not in self.tools:
            return f"there is no tool {str(tool)[:100]!r}; expected one of {', '.join(self.tools) or 'none'}"
        if not isinstance(arguments, dict) or not isinstance(purpose, str):
            return '"arguments" must be an object, and "purpose" text'
        return episode.call(tool, sample, **arguments), purpose if self.options.show_purpose else ""

    def _readings(self, episode: Episode, sample: Sample, call: ToolCall, purpose: str) -> list[tuple[Ask, str]]:
        """Return System 1's asks about this call's outputs, each with its bin; empty until the outputs are available."""
        output = episode.output(call)
        if output is None or output.is_error or call.tool in _READ_ITSELF or not self.options.distil:
            return []
        found = self._bins(episode.problem.question, purpose, output)
        return [
            (episode.ask("system1", sample, turn=sample.turn, index=index), text) for index, text in enumerate(found)
        ]

    def _pack(self, question: str, purpose: str, output: ToolOutput) -> tuple[str, ...]:
        """Pack a tool's output into bins; () if question and purpose leave System 1 no room."""
        renderer, settings = self.renderers["system1"], self.settings["system1"]
        empty = self._prompts["system1"].fill(Role.DISTILLER, problem=question, purpose=purpose)
        capacity = settings.max_input_tokens - len(renderer.render(empty, **settings.template_options)[0])
        between = renderer.num_tokens(_BETWEEN)
        if capacity <= between:
            return ()
        texts = [renderer.first_tokens(text, capacity - between) for text in _texts(output)]
        sizes = [min(capacity, renderer.num_tokens(text) + between) for text in texts]
        return tuple(
            _BETWEEN.join(texts[i] for i in sorted(members)) for members in first_fit_decreasing(sizes, capacity)
        )

    def _cut(self, output: ToolOutput) -> str:
        """Cut a tool's whole output to max_found_tokens."""
        renderer, texts = self.renderers["system2"], _texts(output)
        room = self.options.max_found_tokens - (len(texts) - 1) * renderer.num_tokens(_BETWEEN)
        return _BETWEEN.join(filter(None, renderer.cut_longest(texts, max(0, room))))


def _texts(output: ToolOutput) -> Sequence[str]:
    """Return the parts of a tool's output: pages, papers, or the whole text."""
    return output.parts or (output.text,)
