"""Cross-entropy on demonstrations with the RL learner: the policy gradient with a token's weight as its advantage.

Both `marsrl sft` and the warm start (trainer/schools) use this optimizer step. Every rank packs its share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path

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
    """Converter of prompts and completions to sequences to imitate, in one policy's tokens."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._encoded = lru_cache(maxsize=8192)(renderer.encode_trusted)  # Warm-start drills repeat.

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

        prompt: text, tokenised as it is, or messages, rendered by the chat template.
        writer: index by which losses are summed.
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


def imitate(
    learner: Learner,
    sequences: Sequence[TrainSequence],
    place: BatchShard,
    *,
    uncounted: Collection[int] = (),
    lr: float | None = None,
) -> tuple[dict[int, tuple[float, int]], StepStats]:
    """Take one optimizer step on the mean loss per token; return (mean weighted loss, nats; tokens) by writer, and statistics.

    uncounted: writers whose tokens are not in the loss's denominator, and whose losses are not returned.
    lr: overrides the policy's schedule. Collective; `sequences` are the same on every rank.
    """
    num_tokens = _tokens_by_writer(sequences, uncounted)
    update = Update(tuple(micro_batches(sequences, place)), float(sum(num_tokens.values())))
    stats = learner.train_step([update], lr=lr)
    sums = stats.agent_sums["weighted_nll"]
    return {writer: (sums[writer] / count, count) for writer, count in num_tokens.items()}, stats


def measured_loss(
    learner: Learner, sequences: Sequence[TrainSequence], place: BatchShard
) -> dict[int, tuple[float, int]]:
    """Return (mean loss per token, nats; tokens) by writer under the current weights, without training. Collective."""
    own: dict[int, float] = {}
    batches = micro_batches(sequences, place)
    for batch, logprobs in zip(batches, learner.score(batches), strict=True):
        writers = batch.of_tokens(batch.agent_of).cpu()
        for writer in set(batch.agents):
            own[writer] = own.get(writer, 0.0) - float(logprobs[writers == writer].double().sum())
    told = [decode(tuple[int, dict[int, float]], each) for each in gather_bytes(encode((place.data_rank, own)))]
    shares = dict(told).values()  # Ranks with the same data rank have scored the same sequences.
    num_tokens = _tokens_by_writer(sequences)
    return {w: (math.fsum(share.get(w, 0.0) for share in shares) / n, n) for w, n in num_tokens.items()}


def _tokens_by_writer(sequences: Sequence[TrainSequence], uncounted: Collection[int] = ()) -> dict[int, int]:
    """Return {writer: tokens to imitate}, in order of writers."""
    counts: dict[int, int] = {}
    for sequence in sequences:
        if sequence.agent not in uncounted:
            counts[sequence.agent] = counts.get(sequence.agent, 0) + sequence.num_sampled
    return dict(sorted(counts.items()))
