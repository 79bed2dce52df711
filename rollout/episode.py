"""An episode: one team's work on one problem, as the asks and answers so far.

It has no other state: the next asks and tool calls are a function of it alone (Orchestration.follow). So an episode resumes
after kill -9, and in a replay, from the answers that are saved anyway; their order cannot matter; and a team can be tested
with a table of answers.
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
"""train; evaluate: one sample an ask, up to the answer that counts; collect: as train, to collect fixed inputs for
evaluations."""


@dataclass(slots=True)
class Episode:
    """See the module.

        solver = episode.ask("solver", num_samples=8)           # episode.id is "000017"
        solver.id in episode.answers                            # 8 samples, "000017/solver:0" and on

    id: of the episode, `000017`, or `000017.3` where a rollout instance has several; rollout_id: of the instance.
    seed: of the run. asks: by id, in order. answers: the samples of each finished ask, by index, without their tokens;
    () if its prompt was too long or none finished. calls: of tools, by id; outputs: of the finished calls.
    waiting: unfinished samples, by uid, that paused for an answer or an output. error: why the episode ended, if the
    team's own code failed.
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
        """An ask of an agent, whose prompt shows these samples.

        Args:
            turn: distinguishes asks of one agent with the same last input.
            index: distinguishes asks of one turn with different prompts.
            group: name, within the rollout instance, of the group that the samples are compared in. Default: the ask's own
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
        """A tool call on behalf of this sample, which has ended or is waiting.

        Args:
            index: distinguishes calls of one tool that a sample waits for at the same time.
            arguments: plain JSON values, as the tool reads them.
        """
        return ToolCall(f"{by.uid}/{by.turn}/{tool}#{index}", tool, json.dumps(arguments, sort_keys=True))

    def output(self, call: ToolCall) -> ToolOutput | None:
        """The tool's output; None until it has come."""
        return self.outputs.get(call.id)

    def is_over(self, ask: Ask) -> bool:
        """True once every sample of the ask has finished or been given up."""
        return ask.id in self.answers

    def samples(self, ask: Ask) -> tuple[Sample, ...]:
        """Its samples, once it is over; () before."""
        return self.answers.get(ask.id, ())

    def said(self, ask: Ask) -> Sample | None:
        """The ask's first sample. None if it has none yet, or never will: nothing can follow from it."""
        return next((sample for sample in self.samples(ask) if sample.finish is not Finish.ERROR), None)

    def sample(self, uid: str) -> Sample:
        """The sample with this uid, which has ended or is waiting; KeyError if the episode has none."""
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
        """A random generator seeded by this name: the same at every call, different in every rollout instance."""
        return random.Random(derive_seed(self.seed, *name[:1], self.rollout_id, *name[1:]))

    # Used by the player.

    def enter(self, asked: Iterable[Ask | ToolCall]) -> tuple[list[Ask], list[ToolCall]]:
        """Add the new ones and return them; ValueError if one with a known id differs from the earlier one."""
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
        """End the ask with these samples."""
        self.answers[ask.id] = tuple(sample.without_tokens() for sample in sorted(samples, key=_index))
        for uid in [uid for uid in self.waiting if uid.rpartition(":")[0] == ask.id]:  # stragglers
            del self.waiting[uid]

    def wait(self, sample: Sample) -> None:
        """Record that the sample has paused, with its text so far."""
        self.waiting[sample.uid] = replace(sample.without_tokens(), full_text=sample.text)

    @property
    def open_calls(self) -> list[ToolCall]:
        """Calls of tools that have no output yet."""
        return [call for call in self.calls.values() if call.id not in self.outputs]

    @property
    def is_at_its_end(self) -> bool:
        """True if no ask and no call is open."""
        return len(self.asks) == len(self.answers) and len(self.calls) == len(self.outputs)

    def before(self, ask: Ask) -> Episode:
        """A copy from before the ask was answered, without its samples and all that followed from them."""
        copy = self.copy()
        for each in (copy.asks, copy.answers, copy.calls, copy.outputs):
            for name in [name for name in each if name == ask.id or name.startswith(f"{ask.id}:")]:
                del each[name]
        copy.enter([ask])
        return copy

    def copy(self) -> Episode:
        """A copy that is unaffected by later changes of the original; its elements are immutable."""
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
