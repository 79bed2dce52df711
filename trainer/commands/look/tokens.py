"""A sample's token log, for the page that colours its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marsrl.rollout.types import FloatArray
from marsrl.trainer.report.token_log import TokenLog, TokenRecord, read_tokens, token_files
from marsrl.trainer.runs.directory import RunDirectory

_MOST_LISTED = 40


def tokens_of_sample(run: RunDirectory, step: int, uid: str) -> dict[str, Any]:
    """kept: the sample's columns, or None; near: the nearest step with a token log, and samples in it.

    Raises ValueError: the step's file, which the message names, is damaged.
    """
    log = _nearest(token_files(run), step)
    kept = None
    if log is not None and log.step == step:
        kept = next((record for record in log.samples if record.uid == uid), None)
    return {"kept": None if kept is None else _columns(kept), "near": None if log is None else _near(log, uid)}


def _nearest(files: Mapping[int, Path], step: int) -> TokenLog | None:
    """The log of the step itself or of the nearest readable one. Only damage of the step's own file is raised."""
    for each in sorted(files, key=lambda each: (abs(each - step), each)):
        try:
            return read_tokens(files[each])
        except ValueError:  # missing while the step is being repeated
            if each == step and files[each].exists():
                raise
    return None


def _columns(record: TokenRecord) -> dict[str, Any]:
    """A list for each column; clipped, gated, masked: indices of tokens."""
    starts = [0, *record.ends[:-1].tolist()]
    return {
        "policy": record.policy,
        "update": record.update,
        "segments": [[segment.start, segment.end, segment.version] for segment in record.segments],
        "text": [record.text[start:end] for start, end in zip(starts, record.ends.tolist(), strict=False)],
        "ids": record.token_ids.tolist(),
        "given": np.flatnonzero(~record.is_sampled).tolist(),
        "rollout": _numbers(record.rollout_logprobs),
        "trainer": _numbers(record.logprobs),
        "entropy": _numbers(record.entropy),
        "clipped": np.flatnonzero(record.is_clipped).tolist(),
        "gated": np.flatnonzero(record.is_gated).tolist(),
        "masked": np.flatnonzero(record.is_masked).tolist(),
    }


def _numbers(values: FloatArray) -> Sequence[float | None]:
    """Values with six digits; None if missing or not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def _near(log: TokenLog, uid: str) -> dict[str, Any]:
    """Samples in the nearest log, those of the same agent first."""
    agent = uid.rpartition("/")[2].rpartition(":")[0]
    listed = sorted(log.samples, key=lambda record: (record.agent != agent, record.line))[:_MOST_LISTED]
    return {"step": log.step, "samples": [{"line": each.line, "agent": each.agent} for each in listed]}
