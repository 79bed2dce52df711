"""The `marsrl` command: everything beside training itself."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from marsrl.commands.cli.command import app

for _group in ("run", "look", "data", "machine"):  # their commands, in the order of --help
    importlib.import_module(f"marsrl.commands.cli.{_group}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it failed, 2 the command line or its files cannot be used, 130 interrupted."""
    try:
        app(args=arguments, prog_name="marsrl")
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("typer ends a command with SystemExit")
