"""Cross-entropy on demonstrations with the RL learner: a policy gradient in which the advantage of a token is its weight.

`marsrl sft` and the warm start (warm_start.py) both use it. Every rank packs its share.

    for losses, stats in teach(learners, lessons, max_tokens):    # an optimizer step of each policy
        if goal.is_reached(...):                                  # averages of steps, or held-out demonstrations
            break
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from marsrl.kernels import PolicyObjective
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import IntArray, Message
from marsrl.trainer.config import MptConfig, PolicyConfig
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import BatchShard, Update, micro_batches
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.runs.collective import gather_bytes


def supervised_learner(
    policy: PolicyConfig, model_dir: str | Path, *, num_writers: int, total_steps: int, seed: int
) -> Learner:
    """Build a learner whose loss is -sum_t w_t log p_t, without clipping or masks: the old policy is the current one."""
    return Learner(
        policy,
        model_dir,
        objectives=[PolicyObjective()] * num_writers,
        mpt=MptConfig(scope="off"),
        total_steps=total_steps,
        seed=seed,
    )


class DemonstrationTokens:
    """Encoder of prompts and completions as sequences to imitate, with one policy's tokenizer."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._encoded = lru_cache(maxsize=8192)(renderer.encode_trusted)  # The warm start repeats its drills.

    def sequence(
        self,
        prompt: IntArray | Sequence[Message] | str,
        completion: str,
        writer: int,
        *,
        uid: str = "trace",
        ends: bool = True,
        weights: Sequence[float] | None = None,
    ) -> TrainSequence:
        """Return a sequence that trains all of the completion and none of the prompt.

        prompt: token ids; text, tokenised as it is; or messages, rendered by the chat template.
        writer: index of the completion's writer, usually an agent; losses are summed by writer.
        ends: append the end token to the completion.
        weights: weight of each token of the completion, including the end token; None: 1.
        """
        if isinstance(prompt, str):
            prompt_ids = self._encoded(prompt)
        else:
            prompt_ids = prompt if isinstance(prompt, np.ndarray) else self._renderer.render(prompt)[0]
        end = [self._renderer.eos_id] if ends else []
        token_ids = np.concatenate([self._encoded(completion), np.array(end, np.int32)]).astype(np.int32)
        return TrainSequence(
            uid=uid,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            is_sampled=np.ones(len(token_ids), bool),
            rollout_logprobs=None,
            advantage=1.0,
            agent=writer,
            temperature=1.0,
            token_advantages=None if weights is None else np.array(weights, np.float32),
        )


_HALF = math.log(0.5)


class Measured(NamedTuple):
    """Mean loss of a writer's tokens, nats. accuracy: share of these tokens with a probability above 0.5 under the model."""

    loss: float
    num_tokens: int
    accuracy: float = math.nan


@dataclass(frozen=True, slots=True)
class Lesson:
    """Demonstrations for one step of each policy; the same on every rank. lr: overrides the policies' schedules."""

    sequences: Mapping[str, Sequence[TrainSequence]]
    lr: float | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal at which training stops: loss below `loss` (nats per token), accuracy of at least `accuracy`. None: not required."""

    loss: float | None = None
    accuracy: float | None = None

    def is_reached(self, loss: float, accuracy: float = math.nan) -> bool:
        """Return True if the goal is reached; False without requirements, or if a required value is NaN."""
        is_low = self.loss is None or loss < self.loss
        is_right = self.accuracy is None or accuracy >= self.accuracy
        return self != Goal() and is_low and is_right


def teach(
    learners: Mapping[str, Learner], lessons: Iterable[Lesson], max_tokens: int, *, uncounted: Collection[int] = ()
) -> Iterator[tuple[dict[int, Measured], dict[str, StepStats]]]:
    """Take an optimizer step of each policy on the mean loss per token of each lesson. Collective.

    Yield, for each lesson, each writer's weighted loss (without an accuracy) and each policy's statistics.

    max_tokens: tokens of a micro-batch.
    uncounted: writers whose tokens are not in the loss's denominator, and whose losses are not returned.
    """
    shards = {name: learner.shard(max_tokens) for name, learner in learners.items()}
    for lesson in lessons:
        losses, stats = dict[int, Measured](), dict[str, StepStats]()
        for name, learner in learners.items():
            num_tokens = _tokens_by_writer(lesson.sequences[name], uncounted)
            batches = tuple(micro_batches(lesson.sequences[name], shards[name]))
            stats[name] = learner.train_step([Update(batches, float(sum(num_tokens.values())))], lr=lesson.lr)
            sums = stats[name].agent_sums["weighted_nll"]
            losses |= {writer: Measured(sums[writer] / count, count) for writer, count in num_tokens.items()}
        yield losses, stats


def measure(learner: Learner, sequences: Sequence[TrainSequence], shard: BatchShard) -> dict[int, Measured]:
    """Return loss and accuracy by writer (index of an agent) under the current weights, without training. Collective."""
    local_sums: dict[int, tuple[float, int]] = {}
    batches = micro_batches(sequences, shard)
    for batch, logprobs in zip(batches, learner.score(batches), strict=True):
        writers, is_likely = batch.of_tokens(batch.agent_of).cpu(), (logprobs > _HALF) & batch.mask.cpu()
        for writer in set(batch.agents):
            is_own, (nll, num_likely) = writers == writer, local_sums.get(writer, (0.0, 0))
            nll -= float(logprobs[is_own].double().sum())
            local_sums[writer] = nll, num_likely + int(is_likely[is_own].sum())
    gathered = [
        decode(tuple[int, dict[int, tuple[float, int]]], e) for e in gather_bytes(encode((shard.data_rank, local_sums)))
    ]
    shares = dict(gathered).values()  # Ranks with the same data rank have scored the same sequences.
    measured = {}
    for writer, count in _tokens_by_writer(sequences).items():
        losses, likely = zip(*(share.get(writer, (0.0, 0)) for share in shares), strict=True)
        measured[writer] = Measured(math.fsum(losses) / count, count, sum(likely) / count)
    return measured


def _tokens_by_writer(sequences: Sequence[TrainSequence], uncounted: Collection[int] = ()) -> dict[int, int]:
    """Return {writer: tokens to imitate}, in order of writers."""
    counts: dict[int, int] = {}
    for sequence in sequences:
        if sequence.agent not in uncounted:
            counts[sequence.agent] = counts.get(sequence.agent, 0) + sequence.num_sampled
    return dict(sorted(counts.items()))
