"""What the commands of `marsrl` share."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

AddParser = Callable[..., argparse.ArgumentParser]


def command(add: AddParser, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """A command's parser; it sets `run`, which takes the parsed words and returns the exit code."""
    return add(
        name,
        help=in_short(summary).replace("%", "%%"),  # for shells: `marsrl --help` has groups
        description=summary,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def in_short(description: str) -> str:
    """Its first sentence, up to a colon or semicolon."""
    return re.split(r"(?<=\?)\s|[.:;](?:\s|$)", description, maxsplit=1)[0]


def takes_settings(
    parser: argparse.ArgumentParser,
    config: str = "YAML file, or a preset's name; where it is silent, the task's preset holds",
) -> None:
    """--config and the words behind it, as trainer/main.py has them. config: what --help says of the file."""
    parser.add_argument("--config", help=config)
    # without it argparse calls them required
    parser.add_argument("settings", nargs="*", default=[], metavar="key.sub=value")


def console(width: int) -> Console:
    """For tables: as wide as the terminal, or so wide where the output is none."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def run_directory(path: str) -> Path:
    """The directory of a run.

    Raises:
        ValueError: it is none.
    """
    if not (Path(path) / "config.yaml").is_file():
        raise ValueError(f"{path} is not a run directory: it has no config.yaml")
    return Path(path)


def check_server(extra: str, port: int) -> None:
    """The packages of a server are here, and it can have the port.

    Raises:
        ValueError: one is missing, of marsrl[extra], or there is no such port.
    """
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"the package {package} is not installed; pip install fastapi uvicorn (marsrl[{extra}])")
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port is {port}, expected 0 to 65535")
