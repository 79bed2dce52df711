"""Layout of a run's directory. A run is never overwritten.

runs/<name>/
    lock                      held by the run that writes here; names its process (lock.py)
    config.yaml               the resolved settings
    prompts/                  copies of the prompt files that the settings name (existing_run.py)
    metrics.jsonl             one object per step          (metrics.py)
    evaluations/step_N/       evaluation.json, and its draws, one per line (evaluate/draws.py)
    tensorboard/              the metrics as event files
    samples/step_N.parquet    every sample of a step       (samples_log.py)
    tokens/step_N.parquet     values of single tokens, every run.token_log_every steps (token_log.py)
    publishes.jsonl           every verified publish of weights (publishes.py)
    trace.json                timeline                     (trace.py)
    warnings.jsonl            warnings of the run          (metrics.py)
    checkpoints/step_N/       and checkpoints/latest and checkpoints/best, text files that name the last complete checkpoint and
                              the one with the best evaluation (run.keep_best)
    league/main@40/           a past version of a policy's adapter, in PEFT's format (weights/league.py)
    data.json                 fingerprints of the problems at the start
    bad_batches/              batches of skipped steps (data/bad_steps.py)
    hf/                       an exported model
    summary.json              results and hardware         (report/summary.py)
    report.html               written by `marsrl report`
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

import yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,@-]*")
_STEP = re.compile(r"step_(\d+)")
_STEP_FILE = re.compile(r"step_(\d+)\.parquet")
_COMMENT = re.compile(rb"\A#.*\n")


@contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Add this path to an OSError of the body that names no file (from a write or an fsync)."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: neither readers nor a crash ever see a partial file."""
    with opened_atomically(path) as file:
        file.write(content)


@contextmanager
def opened_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it appears, complete, once the body has ended without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Use the same folder, because a rename cannot cross file systems.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with names_file(path), open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write valid JSON atomically. NaN and infinity raise ValueError, because other JSON readers reject them."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False).encode("ascii") + b"\n")


def sync(path: Path) -> None:
    """fsync one file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(root: Path) -> None:
    """fsync every file and folder, so that a later rename cannot reach the disk before the contents."""
    for folder, _, files in os.walk(root):
        for name in [*files, "."]:
            sync(Path(folder) / name)


def step_files(folder: Path) -> dict[int, Path]:
    """Return {step: file} for a folder of samples or tokens, in order of steps; {} if the folder does not exist."""
    if not folder.is_dir():
        return {}
    files_of_step = {int(name[1]): path for path in folder.iterdir() if (name := _STEP_FILE.fullmatch(path.name))}
    return dict(sorted(files_of_step.items()))


class CheckpointError(RuntimeError):
    """Raised if the run cannot resume from its last checkpoint; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Complete checkpoint: its folder and its step."""

    path: Path
    step: int


class _At:
    """Path in a run's folder, as an attribute of RunDirectory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, _: type | None = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Folder of one run. Rank 0 creates it with `create`; other ranks open it with `RunDirectory(path)`."""

    path: Path
    existed: bool = False  # The folder existed: the run resumes in it, or an earlier start failed.

    lock = _At("lock")
    config = _At("config.yaml")
    data = _At("data.json")
    metrics = _At("metrics.jsonl")
    evaluation_before = _At("evaluations/step_0/evaluation.json")  # Evaluation of the initial weights.
    evaluations = _At("evaluations")
    tensorboard = _At("tensorboard")
    samples = _At("samples")
    tokens = _At("tokens")
    publishes = _At("publishes.jsonl")
    trace = _At("trace.json")
    warnings = _At("warnings.jsonl")
    checkpoints = _At("checkpoints")
    league = _At("league")
    bad_batches = _At("bad_batches")
    hf = _At("hf")
    summary = _At("summary.json")
    report = _At("report.html")

    @classmethod
    def create(
        cls,
        directory: str | Path,
        name: str | None,
        preset: str,
        resume: Literal["off", "auto", "previous"] = "off",
        now: datetime | None = None,
    ) -> RunDirectory:
        """Create directory/name or, unless resume is "off", open it.

        The default name is preset-YYYYMMDD-HHMMSS (UTC), with -2, -3, ... appended if taken; mkdir claims the name, so that two
        runs started in the same second differ. A folder without data, left by a failed start, is reused.

        Raises ValueError if a run of this name has begun and resume is off; if the folder is not a run directory; if the name is
        not a plain file name; for resume without a name; or if the folder is not writable.
        """
        existing, root = cls.find(directory, name, resume), Path(directory)
        with _naming_run_dir(root):
            if existing is None:
                return cls(claim(root, preset, now))
            if not existing.existed:
                existing.path.mkdir(parents=True)
        return existing

    @classmethod
    def find(
        cls, directory: str | Path, name: str | None, resume: Literal["off", "auto", "previous"] = "off"
    ) -> RunDirectory | None:
        """Return the directory that `create` would create or open; None if `create` chooses a name. Raises as `create` does."""
        if name is None and resume != "off":
            raise ValueError(f"run.resume={resume} resumes the run called run.name, but run.name is not set; set it")
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError(
                f"run.name={name[:80]!r} is not a plain folder name (letters, digits and ._+=,@- after the first); "
                "put the folder it goes into in run.dir"
            )
        root = Path(directory)
        path = root if name is None else root / name
        with _naming_run_dir(root):
            existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
            if not existing.is_dir() and (existing != path or name is None):
                raise ValueError(f"run.dir={root}: {existing} is a file; name a folder")
            if existing.is_dir():  # Try to write: for root and in /proc, permission bits are not enough.
                tempfile.TemporaryDirectory(dir=existing, prefix="marsrl-").cleanup()
        if name is None:
            return None
        if existing != path:
            return cls(path)
        run = cls(path, existed=True)
        is_foreign = not path.is_dir() or (any(path.iterdir()) and not run.config.is_file())
        # An earlier start may have left the lock.
        if resume == "off" and (is_foreign or run.has_begun or not run.lock.exists()):
            go_on = "" if is_foreign else ", or set run.resume=auto to resume from its last checkpoint"
            raise ValueError(f"run.name={name}: {path} exists and is never overwritten; set another run.name{go_on}")
        if is_foreign:
            raise ValueError(
                f"run.resume={resume}: {path} has no config.yaml, so it is not a run directory; set another run.name"
            )
        return run

    @property
    def has_begun(self) -> bool:
        """True if the folder has data that a second run of this name would overwrite."""
        if any(path.exists() for path in (self.checkpoints, self.samples, self.evaluation_before)):
            return True
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    def evaluation(self, step: int) -> Path:
        """Return the directory of the evaluation of the weights after `step`."""
        return self.evaluations / f"step_{step}"

    def forget_after(self, step: int) -> None:
        """Remove samples, tokens and evaluations of later steps, which will be repeated, and partial files.

        Partial files are left by a process that was killed.
        """
        for folder in (self.samples, self.tokens, self.evaluations):
            for path in folder.glob(".step_*.tmp"):
                path.unlink()
            for path in folder.glob("step_*"):
                number = _STEP.fullmatch(path.name.partition(".")[0])
                if number and int(number[1]) > step:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def checkpoint(self, step: int) -> Path:
        """Return the directory of the checkpoint after `step`."""
        return self.checkpoints / f"step_{step}"

    def keep_data(self, fingerprints: Mapping[str, object]) -> None:
        """Save the problems' fingerprints at the start of the run; a resumed run keeps the first ones."""
        if not (self.has_begun and self.data.exists()):
            write_json(self.data, fingerprints)

    def write_config(self, resolved: object, made_of: str = "") -> Path:
        """Save the resolved settings (plain dicts, lists, numbers, strings) as config.yaml and return its path.

        A run that resumes with other settings keeps the first file; new settings go to config.resumed_K.yaml. The file of a
        failed start is replaced.
        made_of: presets and files that gave the settings, written as a comment at the top.
        """
        settings = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=False)
        comment = f"# settings: {made_of.encode('ascii', 'backslashreplace').decode()}\n" if made_of else ""
        content = f"{comment}{settings}".encode("ascii")
        path, resumes = self.config, 0
        if not self.has_begun:
            write_atomically(path, content)
            return path
        while path.exists():
            if _COMMENT.sub(b"", path.read_bytes()) == settings.encode("ascii"):
                return path
            resumes += 1
            path = self.path / f"config.resumed_{resumes}.yaml"
        write_atomically(path, content)
        return path

    @property
    def configs(self) -> list[Path]:
        """Files that write_config has written, in order."""
        resumed = [*self.path.glob("config.resumed_*.yaml")]
        resumed.sort(key=lambda path: int(path.stem.rpartition("_")[2]))
        return [path for path in (self.config, *resumed) if path.is_file()]

    def mark_latest(self, step: int) -> None:
        """Declare checkpoints/step_N complete. Call it only after every rank has written its part."""
        write_atomically(self.checkpoints / "latest", f"step_{step}\n".encode("ascii"))

    def best_evaluated(self, steps: Iterable[int]) -> int | None:
        """Return the step with the best evaluation, the earliest if several tie; None if none was evaluated."""
        means: dict[int, float] = {}
        for step in sorted(steps):
            file = self.evaluation(step) / "evaluation.json"
            if file.is_file() and (mean := json.loads(file.read_bytes())["system"]["mean"]) is not None:
                means[step] = mean
        return max(means, key=means.__getitem__, default=None)

    def mark_best(self) -> int | None:
        """Write the name of the checkpoint with the best evaluation into checkpoints/best; return its step, or None."""
        best, pointer = self.best_evaluated(self.steps_on_disk()), self.checkpoints / "best"
        if best is None:  # The run resumed from a step before all evaluated steps.
            pointer.unlink(missing_ok=True)
        else:
            write_atomically(pointer, f"step_{best}\n".encode("ascii"))
        return best

    def steps_on_disk(self) -> list[int]:
        """Return the steps with a checkpoint folder, complete or not, in order."""
        return sorted(int(p.name[5:]) for p in self.checkpoints.glob("step_*") if p.name[5:].isdecimal())

    def latest_checkpoint(self) -> Checkpoint | None:
        """Return the last complete checkpoint; None before the first.

        Raises CheckpointError if `latest` is missing although there are checkpoints, or names none of them.
        """
        pointer = self.checkpoints / "latest"
        if not pointer.exists():
            steps = self.steps_on_disk()
            if len(steps) > 1:
                raise CheckpointError(f"{pointer} is missing, but the folder has {_named(steps)}")
            # If there is a single checkpoint, the run was killed between renaming that checkpoint and writing `latest`.
            return Checkpoint(self.checkpoint(steps[0]), steps[0]) if steps else None
        content = pointer.read_bytes()[:100].decode("ascii", "backslashreplace").strip()
        match = _STEP.fullmatch(content)
        if not match:
            raise CheckpointError(
                f"{pointer} holds {content!r}, expected step_N; the folder has {_named(self.steps_on_disk())}"
            )
        path = self.checkpoints / content
        if not path.is_dir():
            raise CheckpointError(
                f"{pointer} names {content}, which does not exist; the folder has {_named(self.steps_on_disk())}"
            )
        return Checkpoint(path, int(match[1]))


def refuse_file_of_a_run(path: Path) -> None:
    """Raise ValueError if a command would replace a file of a run. Only the run itself, which holds the lock, may do so."""
    for folder in path.absolute().parents:
        if path.exists() and (folder / "lock").is_file() and (folder / "config.yaml").is_file():
            raise ValueError(f"{path} is a file of the run in {folder} and is never replaced; name another file")


def _named(steps: list[int]) -> str:
    return ", ".join(f"step_{step}" for step in steps) or "no checkpoint"


@contextmanager
def _naming_run_dir(root: Path) -> Iterator[None]:
    """Turn an OSError of the body into a ValueError that names run.dir."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"run.dir={root}: {error.filename or root}: {error.strerror}; set run.dir to a folder that can be created and "
            "written to"
        ) from error


def claim(root: Path, name: str, now: datetime | None = None) -> Path:
    """Create the folder name-YYYYMMDD-HHMMSS (UTC), with -2, -3, ... appended if taken. now: time; None: the current time."""
    root.mkdir(parents=True, exist_ok=True)
    name, attempt = f"{name}-{(now or datetime.now(UTC)).astimezone(UTC):%Y%m%d-%H%M%S}", 1
    while True:
        path = root / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            attempt += 1
