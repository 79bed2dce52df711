"""Record of one team's work on one problem: the asks and answers so far.

There is no other state: the next asks and tool calls depend on the episode alone (Orchestration.follow). So an episode can be
resumed after kill -9, or replayed, from its saved answers in any order, and a table of answers suffices to test a team.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from marsrl.rollout.seed import derive_seed
from marsrl.rollout.types import Ask, Finish, Problem, Sample, ToolCall, ToolOutput

Purpose = Literal["train", "evaluate", "collect"]
"""Purpose of an episode. Outside training, built-in teams draw one sample per ask. evaluate: up to the final answer. collect:
only to obtain the fixed inputs of evaluations."""


@dataclass(slots=True)
class Episode:
    """One team's work on one problem.

        solver = episode.ask("solver", num_samples=8)           # episode.id is "000017"
        episode.samples(solver)                                 # once over: 8 samples, "000017/solver:0" to "000017/solver:7"

    id: "000017", or "000017.3" if a rollout instance has several episodes. rollout_id: id of the instance.
    seed: run.seed. asks: asks so far, by id, in order. answers: {id of a finished ask: its samples, in order of index, without
    tokens}; () if the ask's prompt was too long or no sample finished. calls: tool calls by id. outputs: outputs of finished
    calls, by id. waiting: unfinished samples, by uid, that paused for an answer or an output. error: why the episode failed, if
    the team's code raised.
    """

    id: str
    rollout_id: str
    problem: Problem
    seed: int = 0
    purpose: Purpose = "train"
    asks: dict[str, Ask] = field(default_factory=dict)
    answers: dict[str, tuple[Sample, ...]] = field(default_factory=dict)
    calls: dict[str, ToolCall] = field(default_factory=dict)
    outputs: dict[str, ToolOutput] = field(default_factory=dict)
    waiting: dict[str, Sample] = field(default_factory=dict)
    error: str = ""

    # Used by an orchestration's `follow`.

    def ask(
        self, agent: str, *inputs: Sample, num_samples: int = 1, turn: int = 0, index: int = 0, group: str | None = None
    ) -> Ask:
        """Create an ask of an agent whose prompt shows these samples.

        Args:
            turn: distinguishes asks of one agent with the same last input.
            index: distinguishes asks of one turn with different prompts.
            group: name of the group in which samples are compared, unique in the rollout instance. Default: the ask's own
                samples if the instance is this one episode, else all samples of this agent in the instance's episodes.
        """
        if not (isinstance(turn, int) and isinstance(index, int)):
            raise TypeError(
                f"episode.ask({agent!r}): expected turn and index to be integers, found {turn!r} and {index!r}"
            )
        number = f"#{turn}.{index}" if index else f"#{turn}" if turn else ""
        name = f"{inputs[-1].uid if inputs else self.id}/{agent}{number}"
        if group is None:
            of = name if self.id == self.rollout_id else f"{self.rollout_id}/{agent}"
        else:
            of = f"{self.rollout_id}/{group}"
        return Ask(name, agent, tuple(sample.uid for sample in inputs), num_samples, of)

    def call(self, tool: str, by: Sample, index: int = 0, /, **arguments: object) -> ToolCall:
        """Create a tool call on behalf of this sample, which has ended or is waiting.

        Args:
            index: distinguishes calls of one tool that a sample waits for at the same time.
            arguments: plain JSON values.
        """
        return ToolCall(f"{by.uid}/{by.turn}/{tool}#{index}", tool, json.dumps(arguments, sort_keys=True))

    def output(self, call: ToolCall) -> ToolOutput | None:
        """Return the tool's output, or None while the call is open."""
        return self.outputs.get(call.id)

    def is_over(self, ask: Ask) -> bool:
        """Return True once every sample of the ask has finished or been abandoned."""
        return ask.id in self.answers

    def samples(self, ask: Ask) -> tuple[Sample, ...]:
        """Return the ask's samples once it is over, else ()."""
        return self.answers.get(ask.id, ())

    def said(self, ask: Ask) -> Sample | None:
        """Return the ask's first sample without an error, or None if there is none (yet)."""
        return next((sample for sample in self.samples(ask) if sample.finish is not Finish.ERROR), None)

    def sample(self, uid: str) -> Sample:
        """Return the sample with this uid, ended or waiting; KeyError if the episode has none."""
        if uid in self.waiting:
            return self.waiting[uid]
        ask_id, _, index = uid.rpartition(":")
        for sample in self.answers.get(ask_id, ()):
            if sample.uid == uid:
                return sample
        raise KeyError(f"episode {self.id} has no sample {uid} (index {index} of {ask_id})")

    def inputs(self, ask: Ask) -> tuple[Sample, ...]:
        """Return the samples that the ask shows."""
        return tuple(self.sample(uid) for uid in ask.inputs)

    def rng(self, *name: object) -> random.Random:
        """Return a random generator seeded by this name. It is the same at every call, and differs between rollout instances."""
        return random.Random(derive_seed(self.seed, *name[:1], self.rollout_id, *name[1:]))

    # Used by the player.

    def enter(self, asked: Iterable[Ask | ToolCall]) -> tuple[list[Ask], list[ToolCall]]:
        """Add new asks and calls and return them; ValueError if one differs from an earlier one with the same id."""
        asks, calls = [], []
        for item in asked:
            known: Ask | ToolCall | None = self.asks.get(item.id) or self.calls.get(item.id)
            if known is None and isinstance(item, Ask):
                self.asks[item.id] = item
                asks.append(item)
            elif known is None and isinstance(item, ToolCall):
                self.calls[item.id] = item
                calls.append(item)
            elif known != item:
                raise ValueError(
                    f"{item.id} was {known} and is now {item}; `follow` must depend on the episode's answers alone"
                )
        return asks, calls

    def close(self, ask: Ask, samples: Sequence[Sample]) -> None:
        """End the ask with these samples."""
        self.answers[ask.id] = tuple(sample.without_tokens() for sample in sorted(samples, key=_index))
        for uid in [uid for uid in self.waiting if uid.rpartition(":")[0] == ask.id]:  # samples still waiting
            del self.waiting[uid]

    def wait(self, sample: Sample) -> None:
        """Record that the sample has paused, with its text so far."""
        self.waiting[sample.uid] = replace(sample.without_tokens(), full_text=sample.text)

    @property
    def open_calls(self) -> list[ToolCall]:
        """Return tool calls without an output."""
        return [call for call in self.calls.values() if call.id not in self.outputs]

    @property
    def is_at_its_end(self) -> bool:
        """Return True if no ask and no call is open."""
        return len(self.asks) == len(self.answers) and len(self.calls) == len(self.outputs)

    def before(self, ask: Ask) -> Episode:
        """Return a copy without this ask's samples and everything that followed from them."""
        copy = self.copy()
        for each in (copy.asks, copy.answers, copy.calls, copy.outputs):
            for name in [name for name in each if name == ask.id or name.startswith(f"{ask.id}:")]:
                del each[name]
        copy.enter([ask])
        return copy

    def copy(self) -> Episode:
        """Return a copy that later changes of the original do not affect; its elements are immutable."""
        return replace(
            self,
            asks=dict(self.asks),
            answers=dict(self.answers),
            calls=dict(self.calls),
            outputs=dict(self.outputs),
            waiting=dict(self.waiting),
        )


def _index(sample: Sample) -> int:
    return int(sample.uid.rpartition(":")[2])
