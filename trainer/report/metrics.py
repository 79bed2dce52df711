"""Log of a run's metrics, metrics.jsonl, with its copies (TensorBoard; optionally wandb), and of its warnings, warnings.jsonl.

metrics.jsonl has one line per step, each step once, always valid JSON; warnings.jsonl has one line per warning, with the step.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from marsrl.trainer.runs.directory import RunDirectory, names_file, write_atomically

logger = logging.getLogger(__name__)

NON_FINITE = "metrics/non_finite"
"""Number of NaN or infinite values in the line, written as null. Present only if there are any."""


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """Metrics of one step, a line of the file. None: the value was not finite."""

    step: int
    values: Mapping[str, float | None]


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Writer of the metrics of every step. Rank 0 only.

        with MetricsLog(run, resume_step=checkpoint.step) as metrics:
            metrics.log(13, {"actor/loss": 0.1, ...})

    resume_step: the last step in the checkpoint. Lines of later steps belong to lost work and are cut off (0 keeps the line of
        step 0, -1 keeps no line). Required if the run already has a metrics.jsonl. TensorBoard's pages hide the same
        steps, but its event files keep them.
    """

    def __init__(self, run: RunDirectory, *, wandb_project: str | None = None, resume_step: int | None = None) -> None:
        self._last_step: int | None = None
        if run.metrics.exists():
            if resume_step is None:
                raise ValueError(
                    f"{run.metrics} exists and is not overwritten; pass resume_step, the step to resume from"
                )
            self._last_step = _truncate(run.metrics, resume_step)
        self._wandb = _start_wandb(wandb_project, run, resume_step) if wandb_project is not None else None
        from torch.utils.tensorboard import SummaryWriter  # Imported here, because readers need no torch.

        purge_step = None if resume_step is None else resume_step + 1
        self._tensorboard = SummaryWriter(str(run.tensorboard), purge_step=purge_step)
        self._file = open(run.metrics, "ab")  # noqa: SIM115 - open for the life of the log

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step. Steps must increase: resume and all readers rely on one line per step."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after step {self._last_step}; each step is logged once")
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        row: dict[str, float | None] = {"step": step, **dict.fromkeys(metrics), **finite}
        if bad := sorted(metrics.keys() - finite.keys()):
            row[NON_FINITE] = finite[NON_FINITE] = len(bad)
            logger.warning("step %d: %d metrics are not finite: %s", step, len(bad), ", ".join(bad[:8]))
        with names_file(Path(self._file.name)):
            self._file.write(json.dumps(row, allow_nan=False).encode("ascii") + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._last_step = step
        for name, value in finite.items():
            self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[MetricsRow]:
    """Read every complete line. A torn last line (the run died while writing it, or is writing it now) is skipped.

    Raises ValueError, with the line, if another line is invalid.
    """
    return [row for row, _ in parse_metrics(path.read_bytes(), path)]


def parse_metrics(content: bytes, path: Path, first: int = 1) -> Iterator[tuple[MetricsRow, bytes]]:
    """Yield (parsed row, line) for every complete line in a file's content.

    path, first: file and number of the first line, for errors as in `read_metrics`.
    """
    for number, line in enumerate(content.split(b"\n")[:-1], first):  # The last piece is torn, or empty.
        try:
            values = msgspec.json.decode(line, type=dict[str, float | None])
            step = int(values.pop("step"))  # type: ignore[arg-type]  # null raises TypeError
        except (ValueError, KeyError, TypeError) as error:  # msgspec, and a key that is not UTF-8, raise ValueError.
            raise ValueError(
                f"{path}, line {number}: {line[:80]!r} is not a line of metrics ({error}); remove it or restore the file"
            ) from error
        yield MetricsRow(step, values), line


def _truncate(path: Path, last_step: int) -> int | None:
    """Drop lines after last_step and a torn line; return the last remaining step."""
    kept_lines = [(row, line) for row, line in parse_metrics(path.read_bytes(), path) if row.step <= last_step]
    write_atomically(path, b"".join(line + b"\n" for _, line in kept_lines))
    return kept_lines[-1][0].step if kept_lines else None


def _start_wandb(project: str, run: RunDirectory, resume_step: int | None) -> Any:
    """Start a wandb run. Call only if run.wandb names a project: wandb uses the network."""
    import wandb  # Optional; preflight refuses run.wandb without it.

    # An earlier start may have failed before step 1, so wandb may or may not have this run.
    resume = "must" if resume_step and resume_step > 0 else "allow" if run.existed else "never"
    return wandb.init(project=project, name=run.path.name, id=run.path.name, dir=str(run.path), resume=resume)


def append_warning(path: Path, step: int, text: str) -> None:
    """Append a warning, which readers see completely or not at all."""
    with names_file(path), open(path, "ab") as file:
        file.write(json.dumps({"step": step, "text": text}).encode("ascii") + b"\n")


def read_warnings(path: Path) -> list[tuple[int, str]]:
    """Read (step, text) of every complete line; skip a torn last line. ValueError: a line is no warning."""
    try:
        rows = map(json.loads, path.read_bytes().split(b"\n")[:-1])
        return [(row["step"], row["text"]) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path.name} has a line that is not a warning: {error}") from error
