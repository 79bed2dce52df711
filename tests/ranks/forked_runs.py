"""Forks each run that a line of stdin asks for, from a process that has imported what runs need: 3 s of a core for each.

    serve(life)     # for every line, a JSON list of arguments: life(*arguments) in a process of its own

Two lines answer: the run's process when it has begun, its exit code when it has ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

MAIN = Path(__file__).resolve().parents[2] / "trainer" / "main.py"
MODULES = (
    "preloaded",
    "torch._dynamo",
    "transformers",
    "marsrl.trainer.checks.preflight",
    "marsrl.trainer.build",
    "marsrl.trainer.loop",
)


def train(log: str, words: list[str]) -> None:
    """`python trainer/main.py WORDS`; what it prints goes to the log."""
    with open(log, "wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = [str(MAIN), *words]
    runpy.run_path(str(MAIN), run_name="__main__")


def serve(life: Callable[..., None]) -> None:
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # runs that look for garbage, as each checkpoint does, need not look through it
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        process = multiprocessing.get_context("fork").Process(target=life, args=json.loads(line))
        process.start()
        print(process.pid, file=answers, flush=True)
        process.join()
        print(process.exitcode, file=answers, flush=True)


if __name__ == "__main__":
    serve(train)
