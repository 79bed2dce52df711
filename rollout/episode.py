"""An episode: a problem as a team plays it, told by what was asked and answered so far.

It has no other state: who is asked next follows from it alone (Orchestration.follow). So an episode goes on after kill -9,
in segments and in a replay from the answers that are kept anyway, the order in which they come cannot matter, and a team
is tested with a table of answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from marsrl.rollout.seed import derive_seed
from marsrl.rollout.types import Ask, Finish, Problem, Sample

Purpose = Literal["train", "evaluate", "probe"]
"""Why it is played. evaluate: to the answer that counts, one sample an ask. probe: to collect inputs, as in training."""


@dataclass(slots=True)
class Episode:
    """See the module.

    id: of an episode, `000017`, or `000017.3` where a rollout instance has several; rollout_id: of the instance.
    seed: of the run. asks: by id, in order. answers: the samples of each ask that is over, by index, without their tokens;
    () where its prompt was too long or nothing of it has finished. error: why nothing more is asked, where the team's own
    code failed.
    """

    id: str
    rollout_id: str
    problem: Problem
    seed: int = 0
    purpose: Purpose = "train"
    asks: dict[str, Ask] = field(default_factory=dict)
    answers: dict[str, tuple[Sample, ...]] = field(default_factory=dict)
    error: str = ""

    # For an orchestration's `follow`.

    def ask(
        self,
        agent: str,
        *inputs: Sample,
        num_samples: int = 1,
        turn: int = 0,
        group: str | None = None,
    ) -> Ask:
        """The call of an agent that shows it these samples.

        Args:
            turn: tells apart calls of one agent with the same last input.
            group: a name within the rollout instance of what the samples are compared with. Default: with each other, where
                the instance is this one episode; else with all of this agent's, in every episode of it.
        """
        name = f"{inputs[-1].uid if inputs else self.id}/{agent}{f'#{turn}' if turn else ''}"
        if group is None:
            of = name if self.id == self.rollout_id else f"{self.rollout_id}/{agent}"
        else:
            of = f"{self.rollout_id}/{group}"
        return Ask(name, agent, tuple(sample.uid for sample in inputs), num_samples, of)

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
        """The sample of this uid; KeyError where it is none of the episode's."""
        ask_id, _, index = uid.rpartition(":")
        for sample in self.answers[ask_id]:
            if sample.uid == uid:
                return sample
        raise KeyError(f"episode {self.id} has no sample {uid} (index {index} of {ask_id})")

    def inputs(self, ask: Ask) -> tuple[Sample, ...]:
        """What the ask shows."""
        return tuple(self.sample(uid) for uid in ask.inputs)

    def rng(self, *name: object) -> random.Random:
        """A generator of this name: the same whenever it is asked for, another in every rollout instance."""
        return random.Random(derive_seed(self.seed, *name[:1], self.rollout_id, *name[1:]))

    # For whoever plays it.

    def enter(self, asks: Iterable[Ask]) -> list[Ask]:
        """Those that are new, which are entered; ValueError where one of an id known differs from what was asked."""
        new = []
        for ask in asks:
            if ask.id not in self.asks:
                self.asks[ask.id] = ask
                new.append(ask)
            elif self.asks[ask.id] != ask:
                raise ValueError(
                    f"{ask.id} was {self.asks[ask.id]}, and is {ask} now: `follow` may depend on the answers alone"
                )
        return new

    def close(self, ask: Ask, samples: Sequence[Sample]) -> None:
        """The ask is over, with these samples."""
        self.answers[ask.id] = tuple(sample.without_tokens() for sample in sorted(samples, key=_index))

    @property
    def num_open(self) -> int:
        """Asks that are not over."""
        return len(self.asks) - len(self.answers)


def played(
    episodes: Sequence[Episode],
    follow: Callable[[Episode], Sequence[Ask]],
    answer: Callable[[list[tuple[Episode, Ask]], int], Sequence[Sequence[Sample]]],
) -> None:
    """Play episodes to their ends, all at once, one call of each of them after the other.

    follow: the asks of an episode that are new, entered there (Team.follow).
    answer: (asks of all episodes that go on, number of the round) -> the samples of each, judged.
    """
    number = 0
    while asked := [(episode, ask) for episode in episodes for ask in follow(episode)]:
        for (episode, ask), samples in zip(asked, answer(asked, number), strict=True):
            episode.close(ask, samples)
        number += 1


def _index(sample: Sample) -> int:
    return int(sample.uid.rpartition(":")[2])
