"""`marsrl evaluate`: evaluation of a team on held-out problems, without a trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from marsrl.commands.models.export import exported
from marsrl.trainer.build import make_evaluator, open_team
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.origin import ConfigOrigin
from marsrl.trainer.config.read import models_given, read_config
from marsrl.trainer.evaluate.draws import EVALUATION, Kept
from marsrl.trainer.evaluate.evaluator import Evaluator
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.summary import Evaluation
from marsrl.trainer.runs.directory import RunDirectory, claim, write_json
from marsrl.trainer.runs.existing_run import keep_settings, saved_config, settings_in
from marsrl.trainer.runs.lock import RunLock

EVALUATIONS = Path("evaluations")  # default parent folder of evaluations


class Interrupted(KeyboardInterrupt):
    """Raised when an evaluation is interrupted; its text says what is kept and how to resume."""


def run_of(path: Path) -> Path:
    """Return the run directory of `path`, which is that directory or one of its checkpoints."""
    return path.absolute().parents[1] if path.absolute().parent.name == "checkpoints" else path


def settings_of_run(run: Path) -> tuple[str, list[str]]:
    """Return (config file, settings) to evaluate the run's team with the weights of its latest checkpoint.

    run: a run directory, or one of its checkpoints: checkpoints/best, checkpoints/step_N.

    Raises ValueError if there is no run, or the run has no complete checkpoint.
    """
    source, run = run, run_of(run)
    config = RunDirectory(run).config
    if not config.is_file() or not source.exists():
        raise ValueError(
            f"{source} is not a setting (key.sub=value), a run directory (it has no config.yaml) or a checkpoint in "
            "one (checkpoints/best, checkpoints/step_N)"
        )
    models = exported(source.absolute())
    for file in RunDirectory(run).configs:  # A resumed run may have added or removed adapters.
        settings = settings_in(file)
        if settings is not None and settings.trained_policies.keys() == models.keys():
            config = file
            break
    words = [f"policies.{name}.model={path.resolve()}" for name, path in models.items()]
    for name, policy in read_config(str(config), (), trains=False)[0].policies.items():
        if policy.adapter is not None:  # the exported model already contains the adapter
            words += [f"policies.{name}.base=null", f"policies.{name}.adapter=null"]
    return str(config), words


def evaluate_alone(
    config: RunConfig, origin: ConfigOrigin, out: Path | None = None, *, name: str = "", resume: Callable[[Path], str]
) -> Evaluation:
    """Evaluate the team, print a table of accuracy, tokens, seconds and cost to stderr, and return the evaluation.

    Agents that are tested separately answer fixed inputs, which come from the team's own episodes (evaluate/evaluator.py).

    out: folder for the evaluation and every finished draw; an earlier evaluation in it is resumed. Default: a new folder,
        evaluations/<name>-<UTC time>.
    name: name of the evaluation; default: the name of the settings' file.
    resume: returns the command or call that resumes the evaluation in a folder.

    Raises Interrupted on Ctrl-C, after printing a table of the finished draws.
    """
    console = RunConsole()
    with origin.places_in_errors():
        began = None if out is None else saved_config(RunDirectory(out))
        checked = preflight(config, world_size=1, trains=False, began=began)
        config = checked.config
        models = models_given(config)
    console.message(f"# settings: {origin}")
    for line in checked.dtypes:
        console.message(line)
    for warning in checked.warnings:
        console.warning(warning)
    name, start = name or origin.name, time.monotonic()
    with ExitStack() as stack:
        out = out or _new_folder(name)
        stack.callback(RunLock.of_out(out, console.warning).release)
        keep_settings(RunDirectory(out), config, str(origin))
        saved = stack.enter_context(Kept(out))
        console.message(f"every draw is kept in {out} when it ends; if interrupted, resume with: {resume(out)}")
        versions = dict.fromkeys(config.policies, 0)
        evaluator: Evaluator | None = None
        try:
            with console.part("starting engines"):
                team = stack.enter_context(open_team(checked, models))
            evaluator = make_evaluator(checked, team)
            if ended := evaluator.ended(versions, saved):
                console.message(f"{out}: {ended} are kept")
            with console.progress("fixed inputs", unit="episodes") as bar:
                evaluator.collect_inputs(versions, bar.played, saved)
            with console.progress("evaluation", unit="episodes") as bar:
                start = time.monotonic()
                result = evaluator.evaluate(versions, bar.played, saved)
        except KeyboardInterrupt:
            ended = "" if evaluator is None else evaluator.ended(versions, saved)
            if evaluator is not None and evaluator.num_kept(versions, saved)[0]:
                console.team(f"{name}, interrupted", evaluator.scored(versions, saved), time.monotonic() - start)
            done = f": {ended} have ended and are kept in {out}" if ended else " before a draw had ended"
            raise Interrupted(f"interrupted{done}; resume with: {resume(out)}") from None
        seconds = time.monotonic() - start
    write_json(out / EVALUATION, result.model_dump(mode="json"))
    console.team(name, result, seconds)
    console.message(f"kept in {out / EVALUATION}")
    return result


def _new_folder(name: str) -> Path:
    try:
        return claim(EVALUATIONS, name)
    except OSError as error:
        raise ValueError(f"{EVALUATIONS}: {error.strerror}; set a writable folder with --out") from error
