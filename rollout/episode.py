"""An episode: a problem as a team plays it, told by what was asked and answered so far.

It has no other state: who is asked next, and which tools are called, follows from it alone (Orchestration.follow). So an
episode goes on after kill -9, in segments and in a replay from the answers that are kept anyway, the order in which they
come cannot matter, and a team is tested with a table of answers.
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
"""train; evaluate: to the answer that counts, one sample an ask; collect: as train, for the fixed inputs of evaluations."""


@dataclass(slots=True)
class Episode:
    """See the module.

        solver = episode.ask("solver", num_samples=8)           # episode.id is "000017"
        solver.id in episode.answers                            # 8 samples, "000017/solver:0" and on

    id: of an episode, `000017`, or `000017.3` where a rollout instance has several; rollout_id: of the instance.
    seed: of the run. asks: by id, in order. answers: the samples of each ask that is over, by index, without their tokens;
    () where its prompt was too long or nothing of it has finished. calls: of tools, by id; outputs: of those that are over.
    waiting: samples by uid, as far as they got, that paused for an answer or an output. error: why nothing more is asked,
    where the team's own code failed.
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

    # For an orchestration's `follow`.

    def ask(
        self, agent: str, *inputs: Sample, num_samples: int = 1, turn: int = 0, index: int = 0, group: str | None = None
    ) -> Ask:
        """The call of an agent that shows it these samples.

        Args:
            turn: tells apart calls of one agent with the same last input.
            index: tells apart those of one turn, for different prompts.
            group: a name within the rollout instance of what the samples are compared with. Default: with each other, where
                the instance is this one episode; else with all of this agent's, in every episode of it.
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
        """The call of a tool for this sample, which has ended or waits.

        Args:
            index: tells apart calls of one tool that a sample waits for at once.
            arguments: plain JSON values, as the tool reads them.
        """
        return ToolCall(f"{by.uid}/{by.turn}/{tool}#{index}", tool, json.dumps(arguments, sort_keys=True))

    def output(self, call: ToolCall) -> ToolOutput | None:
        """The tool's output; None as long as there is none."""
        return self.outputs.get(call.id)

    def is_over(self, ask: Ask) -> bool:
        """Has all of it been answered, or given up?"""
        return ask.id in self.answers

    def samples(self, ask: Ask) -> tuple[Sample, ...]:
        """Its samples, once it is over; () before."""
        return self.answers.get(ask.id, ())

    def said(self, ask: Ask) -> Sample | None:
        """The first of its samples. None where it has none, and will not or does not yet: nothing can follow from it."""
        return next((sample for sample in self.samples(ask) if sample.finish is not Finish.ERROR), None)

    def sample(self, uid: str) -> Sample:
        """The sample of this uid, which has ended or waits; KeyError where it is none of the episode's."""
        if uid in self.waiting:
            return self.waiting[uid]
        ask_id, _, index = uid.rpartition(":")
        for sample in self.answers.get(ask_id, ()):
            if sample.uid == uid:
                return sample
        raise KeyError(f"episode {self.id} has no sample {uid} (index {index} of {ask_id})")

    def inputs(self, ask: Ask) -> tuple[Sample, ...]:
        """The samples that the ask shows."""
        return tuple(self.sample(uid) for uid in ask.inputs)

    def rng(self, *name: object) -> random.Random:
        """A generator of this name: the same whenever it is asked for, another in every rollout instance."""
        return random.Random(derive_seed(self.seed, *name[:1], self.rollout_id, *name[1:]))

    # For whoever plays it.

    def enter(self, asked: Iterable[Ask | ToolCall]) -> tuple[list[Ask], list[ToolCall]]:
        """Enter the new ones and return them; ValueError where one with a known id differs from what was asked."""
        asks, calls = [], []
        for each in asked:
            known: Ask | ToolCall | None = self.asks.get(each.id) or self.calls.get(each.id)
            if known is None and isinstance(each, Ask):
                self.asks[each.id] = each
                asks.append(each)
            elif known is None and isinstance(each, ToolCall):
                self.calls[each.id] = each
                calls.append(each)
            elif known != each:
                raise ValueError(f"{each.id} was {known}, and is {each} now: `follow` may depend on the answers alone")
        return asks, calls

    def close(self, ask: Ask, samples: Sequence[Sample]) -> None:
        """The ask is over, with these samples."""
        self.answers[ask.id] = tuple(sample.without_tokens() for sample in sorted(samples, key=_index))
        for uid in [uid for uid in self.waiting if uid.rpartition(":")[0] == ask.id]:  # stragglers
            del self.waiting[uid]

    def wait(self, sample: Sample) -> None:
        """The sample has paused; its text so far is kept."""
        self.waiting[sample.uid] = replace(sample.without_tokens(), full_text=sample.text)

    @property
    def open_calls(self) -> list[ToolCall]:
        """Calls of tools that have no output yet."""
        return [call for call in self.calls.values() if call.id not in self.outputs]

    @property
    def is_at_its_end(self) -> bool:
        """Is nothing open: no ask, no call?"""
        return len(self.asks) == len(self.answers) and len(self.calls) == len(self.outputs)

    def before(self, ask: Ask) -> Episode:
        """A copy as it was when the ask was open, without what came of it."""
        copy = self.copy()
        for each in (copy.asks, copy.answers, copy.calls, copy.outputs):
            for name in [name for name in each if name == ask.id or name.startswith(f"{ask.id}:")]:
                del each[name]
        copy.enter([ask])
        return copy

    def copy(self) -> Episode:
        """A copy that stays as it is while the original goes on; what it holds never changes."""
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
