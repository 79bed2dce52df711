"""Fate of each sample of a step: trained, or why not. samples_log.py records it, and `marsrl audit` counts it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marsrl.rollout.types import Fate, Group, Sample
from marsrl.trainer.learner.trained_tokens import TrainedSample

if TYPE_CHECKING:  # `marsrl view` reads fates, and needs no torch.
    from marsrl.trainer.data.credit import Credited

TRAINED, NOT_TRAINED, SKIPPED, LOST = "trained", "not trained", "update skipped", "lost"
FATES = (
    TRAINED,
    "zero advantage",
    "no reward",
    "unread",
    "superseded",
    "cut",
    "balanced away",
    NOT_TRAINED,
    SKIPPED,
    LOST,
)
"""Every fate of a sample.

unread, superseded: the program read no answer of the sample. cut: the sample reached the length limit (loss.truncated=mask).
balanced away: credit.balance did not draw the sample. not trained: the agent is not trained, because its policy is frozen or
credit.train_agents leaves it out. update skipped: loss or gradient of the update was not finite. lost: no other fate applies,
which should never happen."""


@dataclass(frozen=True, slots=True)
class SampleFate:
    """A sample's fate. The defaults are those of files of earlier versions, which have no fates.

    num_sampled: number of tokens that the policy chose, including those of answers that no program read.
    num_trained: number of these tokens that an update trained, whatever the sample's weight (credit.balance).
    update: number, from 1, of the step's update that trained the sample; 0: none.
    gap: mean |log p_trainer - log p_rollout| of the trained tokens before that update, nats; None: not trained, or unknown.
    """

    fate: str = ""
    num_sampled: int = 0
    num_trained: int = 0
    update: int = 0
    gap: float | None = None


def fates(
    groups: Iterable[Group], trains: Collection[str], credited: Credited, trained: Iterable[TrainedSample]
) -> dict[str, SampleFate]:
    """Return the fate of every sample of a step, by uid.

    trains: agents that are trained.
    credited: credit of the same groups.
    trained: the samples' parts in the updates of all policies, from all ranks; a sample may have parts on several ranks.
    """
    parts_of: dict[str, list[TrainedSample]] = {}
    for part in trained:
        parts_of.setdefault(part.uid, []).append(part)
    with_gradient = {sequence.uid for sequence in credited.sequences}
    fate_of = {}
    for sample in (sample for group in groups for sample in group.samples):
        parts, num_sampled = parts_of.get(sample.uid, []), sample.num_sampled
        fate = _untrained(sample, trains, credited, with_gradient)
        if not parts:
            fate_of[sample.uid] = SampleFate(fate, num_sampled)
            continue
        num_trained = sum(part.num_tokens for part in parts)
        gap = math.fsum(part.gap for part in parts) / num_trained
        fate = TRAINED if all(part.is_applied for part in parts) else SKIPPED
        known = gap if math.isfinite(gap) else None
        fate_of[sample.uid] = SampleFate(fate, num_sampled, num_trained, parts[0].update, known)
    return fate_of


def _untrained(sample: Sample, trains: Collection[str], credited: Credited, with_gradient: Collection[str]) -> str:
    """Return why a sample that is in no update was not trained."""
    if sample.agent not in trains:
        return NOT_TRAINED
    if sample.turns and not sample.trained_turns:
        return "superseded" if any(turn.fate is Fate.SUPERSEDED for turn in sample.turns) else "unread"
    if sample.uid in credited.masked:
        return "cut"
    if sample.uid not in credited.advantages:
        return "no reward"
    if sample.uid not in with_gradient:
        return "zero advantage" if credited.advantages[sample.uid] == 0 else "balanced away"
    return LOST


class Resting:
    """Counts of consecutive steps in which a trained agent had samples, but none of them was trained."""

    def __init__(self, most: int) -> None:
        self._most, self._num_steps = most, Counter[str]()

    def found(self, groups: Iterable[Group], became: Mapping[str, SampleFate]) -> list[str]:
        """Count a step; return a sentence for each agent whose count reaches the limit."""
        counts: dict[str, Counter[str]] = {}
        for sample in (sample for group in groups for sample in group.samples):
            counts.setdefault(sample.agent, Counter())[became[sample.uid].fate] += 1
        sentences = []
        for agent, number_of in counts.items():
            self._num_steps[agent] = (
                0 if TRAINED in number_of or NOT_TRAINED in number_of else self._num_steps[agent] + 1
            )
            if self._num_steps[agent] == self._most:
                named = ", ".join(f"{number} {fate}" for fate, number in number_of.most_common())
                sentences.append(
                    f"no sample of {agent} was trained in {self._most} steps (trainer.max_empty_steps); the last step's: {named}"
                )
        return sentences
