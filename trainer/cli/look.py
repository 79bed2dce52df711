"""What came of runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from marsrl.trainer.cli.command import AddParser, check_server, command, console, run_directory, takes_settings


def _view(add: AddParser) -> None:
    parser = command(
        add,
        "view",
        "Look at runs in the browser, also while they go on: samples, curves, the pipeline, warnings. Until Ctrl-C.",
        "marsrl view runs/cpu_default-20260101-120000",
    )
    parser.add_argument("run_directories", nargs="+", metavar="RUN", help="run directories; several are compared")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1 (default: any that is free)")
    parser.add_argument(
        "--text", action="store_true", help="no server: print where the runs are, and their last problems"
    )

    def run(words: argparse.Namespace) -> int:
        runs = [run_directory(each) for each in words.run_directories]
        if words.text:
            from marsrl.trainer.look.text import print_run

            for each in runs:
                print_run(each, console(160))
            return 0
        check_server("view", words.port)
        from marsrl.trainer.look.server import view

        view(runs, words.port, lambda address: print(f"open {address}", flush=True))
        return 0

    parser.set_defaults(run=run)


def _report(add: AddParser) -> None:
    parser = command(
        add,
        "report",
        "Write report.html of a run again (also of one that is still going).",
        "marsrl report runs/cpu_default-20260101-120000",
    )
    parser.add_argument("run_directory")

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.look.export import write_report

        print(write_report(run_directory(words.run_directory)))
        return 0

    parser.set_defaults(run=run)


def _evaluate(add: AddParser) -> None:
    parser = command(
        add,
        "evaluate",
        "Evaluate a team without training it: each agent and the whole team, with 95% intervals.\n\n"
        "With a run's directory among the settings: its team and settings, with the weights of its latest checkpoint.",
        "marsrl evaluate task=math policies.main.model=/models/Qwen3-0.6B data.eval=aime25.jsonl",
    )
    takes_settings(parser)
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="keep every draw that has ended, and the numbers, here; where it has begun, it goes on",
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="FILE",
        help="evaluate this config too, and set both side by side",
    )

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.evaluate.command import evaluate_alone, settings_of_run
        from marsrl.trainer.runs.directory import refuse_file_of_a_run

        if words.json:
            refuse_file_of_a_run(Path(words.json))
        config, settings = words.config, [word for word in words.settings if "=" in word]
        if runs := [word for word in words.settings if "=" not in word]:
            if len(runs) > 1 or config is not None:
                raise ValueError(f"expected one run, and no --config beside it, found {', '.join(runs)}")
            config, weights = settings_of_run(Path(runs[0]))
            print("# weights:", *weights, file=sys.stderr)
            settings = [*weights, *settings]
        evaluate_alone(config, settings, words.json, words.compare, Path(words.out) if words.out else None)
        return 0

    parser.set_defaults(run=run)


def _compare(add: AddParser) -> None:
    parser = command(
        add,
        "compare",
        "Set runs, or evaluations that were kept, side by side: curves, the last numbers, and paired differences with intervals.",
        "marsrl compare runs/one runs/two --html compare.html",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's directory, or the folder of `marsrl evaluate --out`"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="also write this page of `marsrl view` to a file, which needs no server"
    )

    def run(words: argparse.Namespace) -> int:
        from marsrl.trainer.look.compare import compare

        compare(words.runs, words.html, console(200))
        return 0

    parser.set_defaults(run=run)


COMMANDS = {
    "view": _view,
    "report": _report,
    "evaluate": _evaluate,
    "compare": _compare,
}
