"""Two gloo ranks for a session of tests, so that torch and megatron are imported once, not once a test file.

    value = two_ranks.run("layouts_worker.py", {"out": ..., ...})  # job(**arguments) of that file, on both ranks

Each test file owns its job and what it asserts about it. A job that fails is told to those who asked for it, with the
traceback of the rank; both ranks are then ended, for the other one may wait in a collective, and the next job gets new ones.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from held_port import held_port

NUM_RANKS = 2
LIMIT_S = 600.0  # of one job: only one that hangs takes this long
_STDERR_SHOWN = 6000  # characters, of each rank


class RankPair:
    """Starts its ranks with the first job, which they fork for each. modules: what they import before."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._ranks: list[subprocess.Popen[str]] = []
        self._logs: list[Any] = []

    def run(self, file: Path, arguments: dict[str, Any], *, limit_s: float = LIMIT_S) -> Any:
        """What job(**arguments) of this file returns on rank 0; arguments and result as JSON has them.

        Raises:
            RuntimeError: a rank raised, ended, or did not answer in time; names the job and shows what the ranks wrote.
        """
        if not self._ranks:
            self._start()
        try:
            with held_port() as port:
                for rank in self._ranks:
                    assert rank.stdin is not None
                    rank.stdin.write(json.dumps([str(file), port, arguments]) + "\n")
                    rank.stdin.flush()
                return self._answers(limit_s)[0]
        except (_NoAnswer, BrokenPipeError) as error:
            said = self.close()
            raise RuntimeError(f"job of {file.name} on two ranks: {error}\n{said}") from None

    def close(self) -> str:
        """Ends the ranks; returns the end of what each wrote to stderr."""
        said = []
        for i, (rank, log) in enumerate(zip(self._ranks, self._logs, strict=True)):
            rank.kill()
            rank.communicate()
            log.seek(0)
            said.append(f"--- rank {i} wrote:\n{log.read()[-_STDERR_SHOWN:]}")
            log.close()
        self._ranks, self._logs = [], []
        return "\n".join(said)

    def _start(self) -> None:
        for rank in range(NUM_RANKS):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1"}
            place["OMP_NUM_THREADS"] = 1
            self._logs.append(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", str(Path(__file__).parent / "rank_process.py"), *self._modules],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._logs[-1],
                    text=True,
                    env={**os.environ, **{name: str(value) for name, value in place.items()}},
                )
            )

    def _answers(self, limit_s: float) -> list[Any]:
        """One of each rank, in their order. The first failure is not waited beyond: the other rank may hang."""
        found: dict[int, Any] = {}
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as ready:
            for i, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                ready.register(rank.stdout, selectors.EVENT_READ, i)
            while len(found) < NUM_RANKS:
                events = ready.select(max(0.0, end - time.monotonic()))
                if not events:
                    silent = [i for i in range(NUM_RANKS) if i not in found]
                    raise _NoAnswer(f"no answer of rank {silent} in {limit_s:.0f} s")
                for key, _ in events:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        code = self._ranks[key.data].wait()
                        raise _NoAnswer(f"rank {key.data} ended with exit code {code}")
                    answer = json.loads(line)
                    if "error" in answer:
                        raise _NoAnswer(f"rank {key.data} raised\n{answer['error']}")
                    found[key.data] = answer["value"]
                    ready.unregister(key.fileobj)
        return [found[i] for i in range(NUM_RANKS)]


class _NoAnswer(Exception):
    """Why there is none."""
