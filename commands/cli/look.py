"""Commands that show, compare and evaluate runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from marsrl.commands.cli.command import Config, Settings, command, console, run_directory
from marsrl.trainer.visible import visible


@command("look", "marsrl view runs/cpu_default-20260101-120000")
def view(
    runs: Annotated[list[str] | None, Argument(metavar="RUN", help="run directories; several are compared")] = None,
    demo: Annotated[bool, Option("--demo", help="show the recorded run that comes with marsrl")] = False,
    port: Annotated[int, Option(min=0, max=65535, help="port on 127.0.0.1; 0: any free one")] = 0,
    text: Annotated[
        bool, Option("--text", help="print the progress of the runs and their last problems, without a server")
    ] = False,
) -> None:
    """Show runs in the browser, even during training: samples, curves, the pipeline, warnings. Stop with Ctrl-C."""
    from marsrl.commands.look.record import DEMO

    directories = [run_directory(directory) for directory in [*(runs or ()), *([str(DEMO)] if demo else [])]]
    if not directories:
        raise ValueError(
            "found no run; expected run directories, or --demo for the recorded run that comes with marsrl"
        )
    if text:
        from marsrl.commands.look.text import print_run

        for directory in directories:
            print_run(directory, console(160))
        return
    from marsrl.rollout.imports import check_installed

    check_installed("the server", "fastapi", "uvicorn", extra="view")
    from marsrl.commands.look import server

    server.view(directories, port, lambda address: print(f"open {address}", flush=True))


@command("look", "marsrl report runs/cpu_default-20260101-120000")
def report(run: Annotated[str, Argument(help="a run's directory")]) -> None:
    """Write report.html of a run, even during training."""
    from marsrl.commands.look.export import write_report

    print(write_report(run_directory(run)))


@command("look", "marsrl audit runs/cpu_default-20260101-120000")
def audit(
    run: Annotated[str, Argument(help="a run's directory")],
    step: Annotated[int | None, Option(min=1, help="audit this step alone (default: the whole run)")] = None,
) -> int:
    """Check a run's files: which weights decoded each token, and how each token was used in training.

    Prints a line for each of five checks, then samples and tokens of each agent by their fate. Exits with 1 if a check fails.
    """
    from marsrl.commands.audit import audit, table
    from marsrl.trainer.runs.directory import RunDirectory

    audited = audit(RunDirectory(run_directory(run)), step)
    for check in audited.checks:
        result = {True: "ok", False: "FAILS", None: "not checked"}[check.passed]
        print(visible(f"{check.name:<10} {result:<12} {check.text}"))
    console(120).print(table(audited))
    return int(not audited.is_clean)


@command(
    "look",
    "marsrl evaluate task=math policies.main.model=/models/Qwen3-0.6B orchestration=solver data.eval=aime25.jsonl",
)
def evaluate(
    settings: Settings = None,
    config: Config = None,
    out: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="folder for finished draws and results; an evaluation in it is resumed"
            " (default: a new folder, evaluations/NAME-TIME)",
        ),
    ] = None,
) -> int:
    """Evaluate a team without training it: each agent and the whole team, with 95% intervals.

    To evaluate a run, pass its directory among the settings: its team and settings apply, with the weights of its latest
    checkpoint. With RUN/checkpoints/best, the weights are those of its best evaluation. Ctrl-C keeps finished draws and prints
    the command to resume.
    """
    from marsrl.trainer.config.origin import check_words
    from marsrl.trainer.config.read import read_config

    check_words(settings or ())
    arguments, name = [*(settings or ()), *(["--config", config] if config else [])], ""
    words = [word for word in settings or () if "=" in word]
    runs = [word for word in settings or () if "=" not in word]
    if len(runs) > 1 or (runs and config is not None):
        raise ValueError(
            f"found {', '.join(runs)}; expected settings as KEY=VALUE, or one run's directory without --config"
        )
    if not runs:
        read, origin = read_config(config, words, trains=False)  # before the imports below, which take seconds

    from marsrl.commands.evaluate import Interrupted, evaluate_alone, run_of, settings_of_run

    if runs:
        config, weights = settings_of_run(Path(runs[0]))
        name = run_of(Path(runs[0])).absolute().name
        print("# weights:", *weights, file=sys.stderr)
        read, origin = read_config(config, [*weights, *words], trains=False)
    try:
        result = evaluate_alone(
            read,
            origin,
            out,
            name=name,
            resume=lambda out: shlex.join(["marsrl", "evaluate", *arguments, "--out", str(out)]),
        )
    except Interrupted as interrupted:
        print(visible(str(interrupted)), file=sys.stderr)
        return 130
    if not sys.stdout.isatty():  # on a terminal, people read the table
        print(json.dumps(result.model_dump(mode="json"), indent=1), flush=True)
    return 0


@command("look", "marsrl compare runs/one runs/two --html compare.html")
def compare(
    runs: Annotated[
        list[str], Argument(metavar="RUN", help="a run's directory, or the folder of `marsrl evaluate --out`")
    ],
    html: Annotated[
        str | None,
        Option(metavar="FILE", help="also write the comparison page of `marsrl view` to a file that needs no server"),
    ] = None,
) -> None:
    """Compare runs, or saved evaluations: curves, the last numbers, and paired differences with intervals."""
    from marsrl.commands.look import compare

    compare.compare(runs, html, console(200))
