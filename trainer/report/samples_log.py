"""Log of every sample of a step, samples/step_N.parquet, for people, the viewer and readers such as DuckDB and pandas.

    duckdb -c "SELECT agent, avg(reward) FROM 'runs/a/samples/*.parquet' GROUP BY agent"
    python -c "import pandas; print(pandas.read_parquet('runs/a/samples/step_3.parquet'))"

Each sample is a row with the fields of SampleRecord; texts are stored as models wrote them (parquet.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from marsrl.rollout.types import Caller, Finish, Group, Prefix, Sample, Segment
from marsrl.trainer.report.fates import SampleFate
from marsrl.trainer.report.parquet import read_rows, write_rows
from marsrl.trainer.runs.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One logged sample: texts and numbers, no token ids. None: missing, or not applicable to the agent's role.

    line: number of the row in the file, from 1.
    policy: policy of the agent.
    fate, num_sampled, num_trained, update, gap: as in SampleFate (fates.py); files of earlier versions lack them.
    """

    step: int
    line: int
    uid: str
    parent_uid: str | None
    group_id: str
    rollout_id: str
    problem_id: str
    agent: str
    prompt: str
    text: str
    answer: str | None
    verdict: bool | None
    reward: float | None
    correct: float | None
    parts: Mapping[str, float | None]
    note: str
    advantage: float | None
    num_prompt_tokens: int
    num_tokens: int
    finish: Finish
    segments: tuple[Segment, ...]
    policy: str = ""
    fate: str = ""
    num_sampled: int = 0
    num_trained: int = 0
    update: int = 0
    gap: float | None = None
    behind: Prefix | None = None
    caller: Caller | None = None


def record(
    sample: Sample, step: int, line: int, advantage: float | None, policy: str, fate: SampleFate
) -> SampleRecord:
    """Return the logged row of a sample. NaN (a missing reward) becomes None."""
    return SampleRecord(
        step=step,
        line=line,
        uid=sample.uid,
        parent_uid=sample.parent_uid,
        group_id=sample.group_id,
        rollout_id=sample.rollout_id,
        problem_id=sample.problem_id,
        agent=sample.agent,
        prompt=sample.prompt_text,
        text=sample.text,
        answer=sample.answer,
        verdict=sample.verdict,
        reward=_finite(sample.reward.value),
        correct=_finite(sample.reward.correct),
        parts={name: _finite(value) for name, value in sample.reward.parts.items()},
        note=sample.reward.note,
        advantage=None if advantage is None else _finite(advantage),
        num_prompt_tokens=len(sample.prompt_ids),
        num_tokens=len(sample.token_ids),
        finish=sample.finish,
        segments=sample.segments,
        policy=policy,
        behind=sample.behind,
        caller=sample.caller,
        **asdict(fate),
    )


def write_samples(
    run: RunDirectory,
    step: int,
    groups: Iterable[Group],
    advantages: Mapping[str, float] | None = None,
    fates: Mapping[str, SampleFate] | None = None,
    policies: Mapping[str, str] | None = None,
) -> Path:
    """Write the samples of a step atomically and return the file. A step that is repeated after a resume replaces its file.

    advantages, fates: advantage and fate of each sample, by uid. policies: {agent: policy}.
    """
    samples = enumerate((sample for group in groups for sample in group.samples), start=1)
    advantage_of = advantages or {}
    fate_of, policy_of, unknown = fates or {}, policies or {}, SampleFate()
    records = (
        record(
            sample,
            step,
            line,
            advantage_of.get(sample.uid),
            policy_of.get(sample.agent, ""),
            fate_of.get(sample.uid, unknown),
        )
        for line, sample in samples
    )
    return write_rows(run.samples / f"step_{step}.parquet", SampleRecord, records)


def read_samples(path: Path, lines: Collection[int] | None = None) -> list[SampleRecord]:
    """Read the samples of a file, or only these lines; skip row groups without such lines. Raises as `read_rows` does."""
    return read_rows(path, SampleRecord, "file of samples", None if lines is None else [("line", "in", lines)])


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTrace(SampleFate):
    """Columns of SampleRecord that show which policy versions decoded a sample, and what became of it."""

    uid: str
    agent: str
    segments: tuple[Segment, ...]
    policy: str = ""


def read_traces(path: Path) -> list[SampleTrace]:
    """Read the traces of the samples in a file. Raises as `read_rows` does."""
    return read_rows(path, SampleTrace, "file of samples")


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
