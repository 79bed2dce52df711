"""samples/step_N.jsonl.zst: every sample of a step, for people and for the report. One JSON object a line.

What a model wrote is hostile: control characters, lone surrogates, megabytes on one line. JSON is written in ASCII
(everything else as \\u escapes), so a line of the file is a line of the log whatever the text holds, and text comes
back exactly.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zstandard

from marsrl.rollout.types import Finish, Group, Sample, Segment
from marsrl.trainer.runs.directory import RunDirectory, write_atomically

_FILE = re.compile(r"step_(\d+)\.jsonl\.zst")


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One sample as it is kept: texts and numbers, no token ids. None = missing or not that role."""

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


def record(sample: Sample, advantage: float | None) -> SampleRecord:
    """What is kept of a sample. A NaN (a missing reward) becomes None."""
    return SampleRecord(
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
    )


def write_samples(
    run: RunDirectory, step: int, groups: Iterable[Group], advantages: Mapping[str, float] | None = None
) -> Path:
    """Write the samples of a step, whole or not at all, and return the file. advantages: {sample uid: advantage}.

    A step that is played again after a resume replaces its file.
    """
    path = run.samples / f"step_{step}.jsonl.zst"
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    chunks = []
    for group in groups:
        for sample in group.samples:
            advantage = advantages.get(sample.uid) if advantages is not None else None
            line = json.dumps(asdict(record(sample, advantage)), ensure_ascii=True, allow_nan=False)
            chunks.append(compressor.compress(line.encode("ascii") + b"\n"))
    chunks.append(compressor.flush())
    write_atomically(path, b"".join(chunks))
    return path


def sample_files(run: RunDirectory) -> dict[int, Path]:
    """{step: file}, in order of steps."""
    if not run.samples.is_dir():
        return {}
    found = ((_FILE.fullmatch(path.name), path) for path in run.samples.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def read_samples(path: Path) -> Iterator[SampleRecord]:
    """The samples of a file, one at a time, so that a step of long texts need not fit in memory.

    Raises:
        ValueError: the file is damaged, or a line is no sample; says which.
    """
    return (sample for _, sample in _read(path, None))


def read_sample(path: Path, line: int) -> SampleRecord:
    """The sample on a line of a file, from 1; the others are not parsed.

    Raises:
        ValueError: the file is gone, damaged, or has no such line.
    """
    try:
        for _, sample in _read(path, line):
            return sample
    except FileNotFoundError:
        pass
    raise ValueError(f"{path} has no line {line} (any more: a step that is played again has a new file)")


def _read(path: Path, wanted: int | None) -> Iterator[tuple[int, SampleRecord]]:
    """(line, sample); wanted: of this line alone."""
    number = 0
    try:
        with open(path, "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            for number, line in enumerate(io.BufferedReader(stream), start=1):
                if wanted in (None, number):
                    yield number, _from_json(json.loads(line))
    except (zstandard.ZstdError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: is no sample ({error!r}); the file is damaged") from error


def _from_json(values: dict[str, Any]) -> SampleRecord:
    segments = values["segments"]
    if not isinstance(segments, list):
        raise TypeError(f"segments is {segments!r}, expected a list")
    fields = {**values, "segments": tuple(Segment(**s) for s in segments), "finish": Finish(str(values["finish"]))}
    return SampleRecord(**fields)  # unknown or lacking fields raise; written by us alone


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
