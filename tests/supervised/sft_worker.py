"""A job of two ranks: `marsrl sft` with these arguments in a folder. See test_sft."""

from __future__ import annotations

import os
from contextlib import redirect_stdout

from marsrl.commands import cli


def job(folder: str, words: list[str]) -> int:
    """Return the exit code of `marsrl sft`; each rank writes its output to a file."""
    os.chdir(folder)
    with open(f"said_{os.environ['RANK']}", "w") as said, redirect_stdout(said):
        return cli.main(["sft", *words])
