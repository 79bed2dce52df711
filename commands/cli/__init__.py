"""The `marsrl` command: every task except training itself."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from marsrl.commands.cli.command import app

for _group in ("run", "look", "data", "machine"):  # importing a module registers its commands, in the order of --help
    importlib.import_module(f"marsrl.commands.cli.{_group}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 failure, 2 invalid command line or files, 130 interrupted."""
    try:
        app(args=arguments, prog_name="marsrl")
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("typer ends a command with SystemExit")
