"""Two gloo ranks for a session of tests, so that torch and megatron are imported once, not once per test file.

    value = two_ranks.run(Path("layouts_worker.py"), {"out": ..., ...})  # job(**arguments) of that file, on both ranks

Each test file defines its job and its assertions. Both processes of a job are forked from a process that has imported
torch and megatron, and end with the job.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from held_port import held_port

NUM_RANKS = 2
LIMIT_S = 600.0  # limit of one job; only a hanging job takes this long


class RankPair:
    """Two ranks that run jobs of test files. modules: names of modules to import before ranks are forked."""

    def __init__(self, *modules: str) -> None:
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload([*modules, __name__])

    def run(self, file: Path, arguments: dict[str, Any], *, limit_s: float = LIMIT_S) -> Any:
        """Return the result of this file's job(**arguments) on rank 0; arguments and result are JSON.

        Raises:
            Exception: raised by a rank, with its traceback. Both ranks are then ended, as the other may wait in a collective.
            AssertionError: no answer within limit_s.
        """
        others = multiprocessing.active_children()
        with pytest.MonkeyPatch.context() as patch, held_port() as port:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # where forks find the modules
            patch.setenv("OMP_NUM_THREADS", "1")
            ranks = ProcessPoolExecutor(NUM_RANKS, self._forks)
            try:
                jobs = [ranks.submit(_job, rank, port, file, json.dumps(arguments)) for rank in range(NUM_RANKS)]
                finished, late = wait(jobs, limit_s, FIRST_EXCEPTION)
                for each in finished:
                    each.result()
                assert not late, f"{file.name}: no answer from {len(late)} ranks within {limit_s:g} s"
                return json.loads(jobs[0].result())
            finally:
                for process in set(multiprocessing.active_children()) - set(others):
                    process.kill()
                ranks.shutdown()


def _job(rank: int, port: int, file: Path, arguments: str) -> str:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    sys.path.insert(0, str(file.parent))
    return json.dumps(importlib.import_module(file.stem).job(**json.loads(arguments)))
