"""Log of single tokens of some samples, tokens/step_N.parquet, every run.token_log_every steps.

Each sample is a row, with its tokens in list columns (TokenRecord): the engine's records, and the results of the update's own
forward pass. Nothing is computed for the log alone.

    for sample in read_tokens("runs/a/tokens/step_10.parquet"):
        sample.logprobs - sample.rollout_logprobs      # [N], NaN where the policy did not choose the token
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.types import BoolArray, FloatArray, Group, IntArray, Sample, Segment
from marsrl.trainer.learner.trained_tokens import CLIPPED, GATED, MASKED, TrainedTokens
from marsrl.trainer.report.parquet import read_rows, write_rows
from marsrl.trainer.runs.directory import RunDirectory

MOST_BYTES = 32 << 20  # bytes of a step's columns before compression, about a million tokens
_TOKEN_BYTES, _SAMPLE_BYTES = 24, 1024  # bytes of a token's columns without its text, and of the rest of a sample


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Completion of one sample, token by token, all [N].

    line: line of the sample in samples/step_N.parquet, from 1.
    policy: policy that sampled the completion.
    update: number, from 1, of the step's update that trained the sample; 0 if none did; logprobs and entropy are then NaN.
    text: text of all tokens, the end token included. ends: int32, index in `text` where each token's text ends.
    token_ids: int32.
    rollout_logprobs, logprobs, entropy: float32, nats, at the sampling temperature, over the tokens that the sampler kept.
        rollout_logprobs: under the weights that sampled; logprobs, entropy: under the weights at the update's start. NaN: the
        policy did not choose the token, the program did not use the answer (Sample.is_sampled), or a server that returns no
        log-probs chose the token.
    is_clipped: the ratio's clip is active.
    is_gated: DMMPT masks the token.
    is_masked: DMMPT or loss.correction masks the token.
    """

    step: int
    line: int
    uid: str
    group_id: str
    agent: str
    policy: str
    update: int
    segments: tuple[Segment, ...]
    text: str
    ends: IntArray
    token_ids: IntArray
    is_sampled: BoolArray
    rollout_logprobs: FloatArray
    logprobs: FloatArray
    entropy: FloatArray
    is_clipped: BoolArray
    is_gated: BoolArray
    is_masked: BoolArray


def choose_samples(
    groups: Iterable[Group], trained: Collection[str], *, num_groups: int, seed: int, step: int
) -> list[str]:
    """Choose the samples to log, `num_groups` whole groups of each agent, up to MOST_BYTES; return their uids.

    The choice depends only on (seed, step, group id), not on the groups' order. Groups with a sample in `trained` (uids with a
    gradient) come first. Agents are served in turn, so that the limit leaves at least one group of each agent if possible.
    """
    ranked: dict[str, list[Group]] = {}
    for group in sorted(groups, key=lambda group: _order(group, trained, seed, step)):
        ranked.setdefault(group.agent, []).append(group)
    turns = [
        agent_groups[turn]
        for turn in range(num_groups)
        for _, agent_groups in sorted(ranked.items())
        if turn < len(agent_groups)
    ]
    chosen: list[str] = []
    bytes_left = MOST_BYTES
    for group in turns:
        size = sum(map(_size, group.samples))
        if size <= bytes_left:
            bytes_left -= size
            chosen += [sample.uid for sample in group.samples]
    return chosen


def _order(group: Group, trained: Collection[str], seed: int, step: int) -> tuple[bool, int, str]:
    has_gradient = any(sample.uid in trained for sample in group.samples)
    return not has_gradient, derive_seed(seed, "token-log", step, group.group_id), group.group_id


def _size(sample: Sample) -> int:
    return len(sample.token_ids) * _TOKEN_BYTES + len(sample.text.encode("utf-8", "replace")) + _SAMPLE_BYTES


def token_record(
    sample: Sample, step: int, line: int, policy: str, renderer: ChatRenderer, trained: TrainedTokens | None = None
) -> TokenRecord:
    """Return the record of a sample. renderer: renderer of the policy; trained: values in the update, None if not trained."""
    pieces = renderer.pieces(sample.token_ids)
    is_sampled, num = sample.is_sampled, len(sample.token_ids)
    logprobs, entropy = (np.full(num, np.nan, np.float32) for _ in range(2))
    marks = np.zeros(num, np.uint8)
    if trained is not None:
        logprobs[is_sampled], entropy[is_sampled], marks[is_sampled] = trained.logprobs, trained.entropy, trained.marks
    return TokenRecord(
        step=step,
        line=line,
        uid=sample.uid,
        group_id=sample.group_id,
        agent=sample.agent,
        policy=policy,
        update=0 if trained is None else trained.update,
        segments=sample.segments,
        text="".join(pieces),
        ends=np.fromiter(accumulate(map(len, pieces)), np.int32, num),
        token_ids=sample.token_ids,
        is_sampled=is_sampled,
        rollout_logprobs=np.where(is_sampled, sample.rollout_logprobs, np.float32(np.nan)),
        logprobs=logprobs,
        entropy=entropy,
        is_clipped=(marks & CLIPPED).astype(bool),
        is_gated=(marks & GATED).astype(bool),
        is_masked=(marks & MASKED).astype(bool),
    )


def write_tokens(run: RunDirectory, step: int, records: Sequence[TokenRecord]) -> Path:
    """Write the tokens of a step atomically and return the file."""
    return write_rows(run.tokens / f"step_{step}.parquet", TokenRecord, records)


def read_tokens(path: str | Path) -> list[TokenRecord]:
    """Read a file that write_tokens wrote. Raises as `read_rows` does."""
    return read_rows(Path(path), TokenRecord, "token log")
