"""Shared parts of the `marsrl` commands. A command imports its dependencies when it runs, to keep `marsrl --help` fast."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from marsrl.trainer.torchrun import is_rank_0
from marsrl.trainer.visible import log_visibly, visible

if TYPE_CHECKING:
    from rich.console import Console

CONFIG = "YAML file or preset name; other values come from the task's preset"
Config = Annotated[str | None, typer.Option("--config", metavar="FILE", help=CONFIG)]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="key.sub=value", help="settings that override the file; later ones win")
]


class _Commands(TyperGroup):
    """Typer group that exits with the command's exit code and prints user errors on one line."""

    def invoke(self, ctx: Any) -> Any:
        log_visibly()
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader closed the pipe: `marsrl config | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        except (ValueError, OSError) as error:
            from marsrl.trainer.config.explain import refusal
            from marsrl.trainer.runs.failure import RANK_0_PRINTS_S

            if not is_rank_0():
                time.sleep(RANK_0_PRINTS_S)
                raise typer.Exit(2) from error
            print(visible(f"marsrl {ctx.invoked_subcommand}: {refusal(error)}"), file=sys.stderr)
            code = 2
        raise typer.Exit(code or 0)


class _Command(TyperCommand):
    """Typer command that rejects settings written as options (--run.steps=4) with the message for wrong settings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)]
        if any(re.match("[-\u2010-\u2015\u2212]", word) and word.partition("=")[0] not in options for word in args):
            from marsrl.trainer.config.origin import check_words  # imported here to keep --help fast

            check_words(args, options)
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="Multi-agent reinforcement learning for LLM teams. Training itself: torchrun trainer/main.py --help.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

Command = Callable[..., int | None]


def command(group: str, example: str, *, name: str | None = None) -> Callable[[Command], Command]:
    """Return a decorator that adds a function as a command to a group of `marsrl --help`.

    The function's docstring is the command's help text, and its return value the exit code (None: 0).
    """

    def add(body: Command) -> Command:
        paragraphs = [" ".join(each.split()) for each in str(body.__doc__).split("\n\n")]
        short = re.split(r"(?<=\?)\s|[.:;](?:\s|$)", paragraphs[0], maxsplit=1)[0]
        text = "\n\n".join(paragraphs)
        epilog = f"example:\n\n{example}"
        return app.command(name, cls=_Command, rich_help_panel=group, help=text, short_help=short, epilog=epilog)(body)

    return add


def console(width: int) -> Console:
    """Console for tables: as wide as the terminal; `width` columns where the output is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def run_directory(path: str) -> Path:
    """Return the directory of a run; ValueError if it is not one."""
    if not (Path(path) / "config.yaml").is_file():
        raise ValueError(f"{path} is not a run directory: it has no config.yaml")
    return Path(path)
