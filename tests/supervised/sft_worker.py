"""A job of two ranks: `marsrl sft` with these words in a folder. See test_sft."""

from __future__ import annotations

import os
from contextlib import redirect_stdout

from marsrl.commands import cli


def job(folder: str, words: list[str]) -> int:
    """Its exit code; each rank's words go to a file."""
    os.chdir(folder)
    with open(f"said_{os.environ['RANK']}", "w") as said, redirect_stdout(said):
        return cli.main(["sft", *words])
