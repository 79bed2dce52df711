"""Functions that train, evaluate and teach a team in this process, and the class Run.

Each function does the same as a command (docs/python_api.md). It runs one rank, in this process. When it returns, its engines,
workers and Ray have stopped.
"""

from __future__ import annotations

import html
import json
import math
import os
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.own_classes import forget_files, name_of
from marsrl.rollout.tasks.own_task import OwnTask
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.explain import refusal
from marsrl.trainer.config.origin import ConfigOrigin
from marsrl.trainer.config.read import read_config
from marsrl.trainer.learner.megatron.layout import resolve
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import SampleRecord, read_samples
from marsrl.trainer.report.summary import Evaluation, Summary, load_summary
from marsrl.trainer.runs.directory import RunDirectory, step_files
from marsrl.trainer.runs.lock import RunLock
from marsrl.trainer.torchrun import world_size
from marsrl.trainer.visible import visible

if TYPE_CHECKING:
    from marsrl.commands.rehearsal import Rehearsal
    from marsrl.trainer.start import PreparedRun

Config = str | os.PathLike[str] | Mapping[str, Any] | None
"""A YAML file, a preset's name, or settings as a mapping; None: only the task's preset."""


class Error(Exception):
    """Invalid settings or files, or a failed run. The text is the error message of the command line."""


Error.__module__ = "marsrl"  # the name shown in tracebacks


@dataclass(frozen=True, slots=True)
class Report:
    """report.html of a run. A notebook shows it below the cell."""

    path: Path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text("utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 720px; border: 0"></iframe>'


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk, finished or not.

    Holds no process and no open file; every access reads the run's files.

    Properties and methods raise Error if files are missing or damaged.
    """

    path: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved settings that the run began with."""
        with _errors():
            return dict(yaml.safe_load(RunDirectory(self.path).config.read_bytes()))

    @property
    def metrics(self) -> list[dict[str, float | None]]:
        """Metrics of each finished step: {"step": 1, "reward/solver/mean": 0.4, ...} (docs/metrics.md).

        None stands for a value that is not finite. Rows may have different keys. For a table, pass the list to pandas.DataFrame
        or pyarrow.Table.from_pylist.
        """
        file = RunDirectory(self.path).metrics
        with _errors():
            return [{"step": row.step, **row.values} for row in (read_metrics(file) if file.exists() else [])]

    @property
    def summary(self) -> Summary | None:
        """Evaluations before and after, timings and hardware; None until the run has finished."""
        file = RunDirectory(self.path).summary
        with _errors():
            return load_summary(file) if file.exists() else None

    def samples(self, step: int | None = None) -> list[SampleRecord]:
        """Return the samples of a step; default: the last step that has any. [] if there are none."""
        files = step_files(RunDirectory(self.path).samples)
        if step is None:
            step = max(files, default=0)
        with _errors():
            return read_samples(files[step]) if step in files else []

    def evaluate(self, **options: Any) -> Evaluation:
        """Call `marsrl.evaluate` on the run's team with the weights of its latest checkpoint."""
        return evaluate(self, **options)

    def report(self) -> Report:
        """Write report.html, with curves, samples, problems and warnings, and return it.

        A notebook shows it below the cell.
        """
        from marsrl.commands.look.export import write_report

        with _errors():
            return Report(write_report(self.path))


def load_run(path: str | os.PathLike[str]) -> Run:
    """Return the run in this directory, whichever process wrote it. Raises Error if there is none."""
    if not RunDirectory(Path(path)).config.is_file():
        raise Error(f"{path} is not a run directory: it has no config.yaml")
    return Run(Path(path).absolute())


def train(
    config: Config = None,
    *,
    team: type[Orchestration] | str | None = None,
    task: type[OwnTask] | str | None = None,
    **settings: Any,
) -> Run:
    """Train a team by reinforcement learning, as trainer/main.py does, and return its run.

    Args:
        config: a YAML file, a preset's name, or a mapping of settings.
        team, task: a class, or a value for the settings `orchestration` and `task`.
        settings: settings that override those of `config`, as in run={"steps": 4} or **{"run.steps": 4}.

    Raises:
        Error: the settings cannot be used, or the run failed.
        KeyboardInterrupt: raised after the last finished step is saved; the text says how to resume.
    """
    read, origin = _read(config, team, task, settings)
    _check_process("train", read)
    with _errors():
        from marsrl.rollout.weights.files import parent_of
        from marsrl.trainer.start import prepare

        prepared = prepare(read, origin)
    assert prepared.directory is not None and prepared.lock is not None, "rank 0"
    print(prepared.text, flush=True)
    with _running(prepared.directory, prepared.lock, parent_of(read.sync.directory)):
        _train(prepared)
    return Run(prepared.directory.path.absolute())


def _train(prepared: PreparedRun) -> None:
    """Train in a separate stack frame.

    If the run fails, _running clears the frame's references to the model.
    """
    from marsrl.trainer.build import open_run
    from marsrl.trainer.loop import train as loop

    with open_run(prepared.checked, prepared.directory) as opened:
        loop(opened)


def sft(config: Config = None, *, team: type[Orchestration] | str | None = None, **settings: Any) -> Run:
    """Teach a team's policies from data.demonstrations, as `marsrl sft` does.

    The models are written to the run's folder hf.

    Arguments and errors: as in `train`.
    """
    read, origin = _read(config, team, None, settings)
    _check_process("sft", read)
    with _errors():
        from marsrl.commands.sft.command import prepare, teach_team

        prepared = prepare(read, origin)
    assert prepared.directory is not None and prepared.lock is not None, "rank 0"
    with _running(prepared.directory, prepared.lock):
        teach_team(prepared)
    return Run(prepared.directory.path.absolute())


def evaluate(
    config: Run | Config = None,
    *,
    team: type[Orchestration] | str | None = None,
    task: type[OwnTask] | str | None = None,
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Evaluation:
    """Evaluate a team without training it, as `marsrl evaluate` does.

    Args:
        config: as in `train`. Or a run, its directory or one of its checkpoints, to evaluate that run's team and weights.
        out: folder for the evaluation and each finished draw. If it has an earlier evaluation, this is resumed. Default: a new
            folder.

    Raises:
        Error: the settings cannot be used, or the evaluation failed.
        KeyboardInterrupt: the text says which draws are kept.
    """
    source, name, weights = config.path if isinstance(config, Run) else config, "", list[str]()
    words = _words(team, task, settings)
    with _errors():
        from marsrl.commands.evaluate import evaluate_alone, run_of, settings_of_run

        if isinstance(source, str | os.PathLike) and (Path(source).is_dir() or run_of(Path(source)) != Path(source)):
            name = run_of(Path(source)).absolute().name
            source, weights = settings_of_run(Path(source))
        read, origin = _read_words(source, [*weights, *words], trains=False)
        _check_process("evaluate", None)
        folder = None if out is None else Path(out)
        with _quiet():
            return evaluate_alone(
                read, origin, folder, name=name, resume=lambda made: f"the same call with out={str(made)!r}"
            )


def try_team(
    config: Config = None,
    *,
    team: type[Orchestration] | str | None = None,
    task: type[OwnTask] | str | None = None,
    answers: Mapping[str, Sequence[str]] | None = None,
    question: str = "",
    reference: str = "",
    prompts: bool = False,
    **settings: Any,
) -> Rehearsal:
    """Play one problem with made-up answers, as `marsrl try` does, and show the team's calls.

    No model is needed.

    Args:
        answers: each agent's answers, in the order of its calls: {"solver": ["one answer", "the next"]}. Others are made up.
        question, reference: a problem and its right answer. Default: a problem of the task.
        prompts: also show what each agent read.

    Raises:
        Error: the settings cannot be used.
    """
    read, origin = _read(config, team, task, settings)
    with _errors():
        from marsrl.commands.cli.command import console
        from marsrl.commands.rehearsal import check_agents, rehearse_shown

        said = answers or {}
        check_agents("answers", said, list(read.agents))
        return rehearse_shown(
            read, origin, said, console(160), question=question, reference=reference, with_prompts=prompts
        )


def _words(team: type | str | None, task: type | str | None, settings: Mapping[str, Any]) -> list[str]:
    """Return a call's settings as command-line words."""
    forget_files()
    classes = {"orchestration": team, "task": task}
    named = {
        key: name_of(kind) if isinstance(kind, type) else kind for key, kind in classes.items() if kind is not None
    }
    return _as_words({**settings, **named})


def _as_words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as command-line words key=value, with values as JSON, which is valid YAML."""
    words = []
    for key, value in settings.items():
        try:
            words.append(f"{key}={json.dumps(value, ensure_ascii=False, default=os.fspath)}")
        except (TypeError, ValueError):
            raise Error(
                f"{key} is {value!r:.80}; expected numbers, texts, paths, lists and mappings of them; classes go to team and task"
            ) from None
    return words


def _read(
    config: Config, team: type | str | None, task: type | str | None, settings: Mapping[str, Any]
) -> tuple[RunConfig, ConfigOrigin]:
    words = _words(team, task, settings)
    with _errors():
        return _read_words(config, words)


def _read_words(config: Config, words: Sequence[str], *, trains: bool = True) -> tuple[RunConfig, ConfigOrigin]:
    if isinstance(config, Mapping):
        return read_config(None, [*_as_words(config), *words], trains=trains, source="keywords")
    file = None if config is None else os.fspath(config)
    return read_config(file, words, trains=trains, source="keywords")


def _check_process(call: str, config: RunConfig | None) -> None:
    """Raise Error if this process is not the main thread of a single rank."""
    ranks = needed = world_size()
    for policy in config.trained_policies.values() if config is not None else ():
        layout = resolve(policy.layout)
        parts = math.lcm(layout.tensor * layout.context, layout.expert * layout.expert_tensor)
        needed = max(needed, layout.pipeline * parts)
    if needed > 1:
        raise Error(
            f"marsrl.{call} runs one rank, in this process, but this run needs {needed} ranks (WORLD_SIZE is {ranks}); "
            f"start them with torchrun --nproc-per-node {needed} and trainer/main.py, with the same settings in a file "
            "or as key.sub=value"
        )
    if threading.current_thread() is not threading.main_thread():
        raise Error(
            f"marsrl.{call} is called outside the main thread, which alone handles interrupts; call it from the main thread"
        )


@contextmanager
def _errors() -> Iterator[None]:
    """Turn exceptions inside the block into Error, with the error message of the command line."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise Error(visible(refusal(error))) from error
    except Error:
        raise
    except Exception as error:  # the last line of the traceback that the command would print
        raise Error(visible(f"{type(error).__name__}: {error}")) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore warnings of libraries inside the block, and restore PyTorch's number of threads afterwards."""
    import torch

    from marsrl.trainer.machine import quiet_libraries

    num_threads = torch.get_num_threads()
    with warnings.catch_warnings():
        quiet_libraries()
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


@contextmanager
def _running(directory: RunDirectory, lock: RunLock, weights: Path | None = None) -> Iterator[None]:
    """Turn exceptions in the block into Error or KeyboardInterrupt, and release the run's lock.

    weights: folder of the weight files, if the run has engines.
    """
    from marsrl.trainer.runs.failure import failure_message, where_to_go_on

    try:
        with _quiet():
            yield
    except KeyboardInterrupt as interrupt:
        _clear(interrupt)
        raise KeyboardInterrupt(f"interrupted; {where_to_go_on(directory)}") from None
    except Exception as error:
        _clear(error)
        raise Error(visible(failure_message(error, directory, weights).removeprefix("marsrl: "))) from error
    finally:
        lock.release()


def _clear(error: BaseException) -> None:
    """Clear the local variables in the error's traceback.

    A notebook keeps the last exception, whose traceback would otherwise keep the model in memory.
    """
    traceback.clear_frames(error.__traceback__)
