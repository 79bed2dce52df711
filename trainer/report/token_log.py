"""tokens/step_N.parquet: numbers of single tokens of some samples, every run.token_log_every steps.

A row a sample, its tokens in list columns (`schema`). What an engine recorded stands beside what the update's own forward pass
found; nothing is computed twice for it. docs/view.md lists the columns.

    log = read_tokens("runs/a/tokens/step_10.parquet")
    for sample in log.samples:
        sample.logprobs - sample.rollout_logprobs      # [N], NaN where the policy did not choose the token
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.types import BoolArray, FloatArray, Group, IntArray, Sample, Segment
from marsrl.trainer.learner.trained_tokens import CLIPPED, GATED, MASKED, TrainedTokens
from marsrl.trainer.runs.directory import RunDirectory, step_files, step_of, write_atomically

if TYPE_CHECKING:
    import pyarrow as pa  # imported where it is used: it starts threads

MOST_BYTES = 32 << 20  # of a step's columns, before they are compressed: a million tokens
_TOKEN_BYTES, _SAMPLE_BYTES = 24, 1024  # of the columns beside the text, of the rest of a sample
_COLUMNS = {
    "ends": "int32",
    "token_ids": "int32",
    "is_sampled": "bool",
    "rollout_logprobs": "float32",
    "logprobs": "float32",
    "entropy": "float32",
    "is_clipped": "bool",
    "is_gated": "bool",
    "is_masked": "bool",
}
"""Per-token columns of a sample: name of the dtype in NumPy and Arrow."""


@cache
def schema() -> pa.Schema:
    """The columns of a token log."""
    import pyarrow as pa

    segment = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.int32())])
    return pa.schema(
        [
            ("step", pa.int32()),
            ("uid", pa.string()),
            ("line", pa.int32()),
            ("group_id", pa.string()),
            ("agent", pa.string()),
            ("policy", pa.string()),
            ("update", pa.int32()),
            ("segments", pa.list_(segment)),
            ("text", pa.string()),
            *((name, pa.list_(pa.type_for_alias(dtype))) for name, dtype in _COLUMNS.items()),
        ]
    )


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The completion of one sample, token by token: [N] each.

    line: of the sample in samples/step_N.parquet, from 1. policy: whose weights answered. update: of the step, from 1, that
    trained it; 0: none did, and logprobs and entropy are NaN. ends: int32, where in `text` (all tokens', the end token's
    too) each one's ends. token_ids: int32. rollout_logprobs, logprobs, entropy: float32, nats, at the sampling
    temperature, of what the sampler kept: of the weights that sampled, and twice of those at the update's start. NaN: the
    policy did not choose the token, or a server did, which tells no log-probs. is_clipped: the ratio's clip is active.
    is_gated: DMMPT masks the token. is_masked: the gate or loss.correction does.
    """

    uid: str
    line: int
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


@dataclass(frozen=True, slots=True)
class TokenLog:
    """Contents of a file."""

    step: int
    samples: tuple[TokenRecord, ...]


def choose_samples(
    groups: Iterable[Group], trained: Collection[str], *, num_groups: int, seed: int, step: int
) -> list[str]:
    """Uids of the samples to keep: `num_groups` whole groups of each agent, as far as MOST_BYTES reaches.

    Drawn from (seed, step, group id) alone, whatever the order of the groups; those with a sample in `trained` (uids with a
    gradient) go first. Agents take turns, so that what does not fit any more is nobody's first group, as far as that is possible.
    """
    ranked: dict[str, list[Group]] = {}
    for group in sorted(groups, key=lambda group: _order(group, trained, seed, step)):
        ranked.setdefault(group.agent, []).append(group)
    turns = [own[turn] for turn in range(num_groups) for _, own in sorted(ranked.items()) if turn < len(own)]
    chosen: list[str] = []
    left = MOST_BYTES
    for group in turns:
        size = sum(map(_size, group.samples))
        if size <= left:
            left -= size
            chosen += [sample.uid for sample in group.samples]
    return chosen


def _order(group: Group, trained: Collection[str], seed: int, step: int) -> tuple[bool, int, str]:
    has_gradient = any(sample.uid in trained for sample in group.samples)
    return not has_gradient, derive_seed(seed, "token-log", step, group.group_id), group.group_id


def _size(sample: Sample) -> int:
    return len(sample.token_ids) * _TOKEN_BYTES + len(sample.text.encode("utf-8", "replace")) + _SAMPLE_BYTES


def token_record(sample: Sample, line: int, policy: str, renderer: ChatRenderer) -> TokenRecord:
    """A sample's tokens as rank 0 knows them before any update; renderer: of its policy."""
    pieces = renderer.pieces(sample.token_ids)
    text = "".join(pieces).encode("utf-8", "replace").decode()  # a lone surrogate, from a tokenizer in Python, is "?"
    own, num = sample.is_sampled, len(sample.token_ids)
    return TokenRecord(
        uid=sample.uid,
        line=line,
        group_id=sample.group_id,
        agent=sample.agent,
        policy=policy,
        update=0,
        segments=sample.segments,
        text=text,
        ends=np.fromiter(accumulate(map(len, pieces)), np.int32, num),
        token_ids=sample.token_ids,
        is_sampled=own,
        rollout_logprobs=np.where(own, sample.rollout_logprobs, np.float32(np.nan)),
        logprobs=np.full(num, np.nan, np.float32),
        entropy=np.full(num, np.nan, np.float32),
        is_clipped=np.zeros(num, bool),
        is_gated=np.zeros(num, bool),
        is_masked=np.zeros(num, bool),
    )


def with_trained(records: Iterable[TokenRecord], trained: Iterable[TrainedTokens]) -> list[TokenRecord]:
    """The records with what the updates found, where one trained the sample."""
    found = {tokens.uid: tokens for tokens in trained}
    return [_with(each, found[each.uid]) if each.uid in found else each for each in records]


def _with(record: TokenRecord, tokens: TrainedTokens) -> TokenRecord:
    own = record.is_sampled
    logprobs, entropy, marks = record.logprobs.copy(), record.entropy.copy(), np.zeros(len(own), np.uint8)
    logprobs[own], entropy[own], marks[own] = tokens.logprobs, tokens.entropy, tokens.marks
    return replace(
        record,
        update=tokens.update,
        logprobs=logprobs,
        entropy=entropy,
        is_clipped=(marks & CLIPPED).astype(bool),
        is_gated=(marks & GATED).astype(bool),
        is_masked=(marks & MASKED).astype(bool),
    )


def token_file(run: RunDirectory, step: int) -> Path:
    return run.tokens / f"step_{step}.parquet"


def write_tokens(run: RunDirectory, step: int, records: Sequence[TokenRecord]) -> Path:
    """Write the tokens of a step, whole or not at all, and return the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = token_file(run, step)
    content = io.BytesIO()
    rows = [{"step": step, **asdict(record)} for record in records]
    pq.write_table(pa.Table.from_pylist(rows, schema()), content, compression="zstd")
    write_atomically(path, content.getvalue())
    return path


def token_files(run: RunDirectory) -> dict[int, Path]:
    """{step: file}, in order of steps."""
    return step_files(run.tokens)


def read_tokens(path: str | Path) -> TokenLog:
    """Read what write_tokens wrote.

    Raises:
        ValueError: the file is damaged; says which.
        FileNotFoundError: it is gone.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(schema()):
                raise ValueError("its columns are others")
            samples = tuple(map(_from_row, file.read().to_pylist()))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} is no token log ({error}); the file is damaged") from error
    for sample in samples:
        sizes = {len(getattr(sample, name)) for name in _COLUMNS}
        if len(sizes) > 1 or (len(sample.ends) and int(sample.ends[-1]) != len(sample.text)):
            raise ValueError(f"{path} is no token log (sample {sample.uid!r}: columns do not fit); the file is damaged")
    return TokenLog(step_of(Path(path)) or 0, samples)


def _from_row(row: dict[str, Any]) -> TokenRecord:
    fields = {name: value for name, value in row.items() if name != "step"}
    fields["segments"] = tuple(Segment(**each) for each in row["segments"])
    return TokenRecord(**fields | {name: np.array(row[name], dtype) for name, dtype in _COLUMNS.items()})
