"""Whole runs as a user starts them: torchrun or python, real vLLM in a Ray actor, Megatron; settings as small as can be."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # small_run, books, scripted_pool, which the tests import
from small_run import ARITHMETIC, MAIN, SMALL, TEAM

FORKED_RUNS = Path(__file__).parents[1] / "ranks" / "forked_runs.py"
LIMIT_S = 1200  # only a run that hangs takes so long


@dataclass(frozen=True)
class Runner:
    """Starts runs in one folder with one cache of warm starts."""

    folder: Path
    cache: Path

    def environment(self) -> dict[str, str]:
        return {**os.environ, "MARSRL_CACHE": str(self.cache), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def command(self, name: str, *words: str, ranks: int = 0) -> list[str]:
        """ranks: of torchrun; 0: a process by itself, without it."""
        launcher = [sys.executable, *(("-m", "torch.distributed.run", "--nproc-per-node", str(ranks)) if ranks else ())]
        return [*launcher, str(MAIN), *self.words(name, *words)]

    def words(self, name: str, *words: str) -> list[str]:
        """Words for trainer/main.py."""
        has_preset = any(word.startswith("preset=") for word in words)
        task = () if has_preset or "task=math" in words else ARITHMETIC
        team = () if has_preset or "orchestration=solver" in words else (TEAM,)
        return [f"run.dir={self.folder}", f"run.name={name}", *task, *team, *SMALL, *words]

    def start(self, name: str, *words: str, ranks: int = 0) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(name, *words, ranks=ranks),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(),
            start_new_session=True,
        )

    def run(self, name: str, *words: str, ranks: int = 0) -> Path:
        """A run to its end; its directory."""
        process = self.start(name, *words, ranks=ranks)
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return self.ended(name, process.returncode, output)

    def ended(self, name: str, status: int | None, output: str) -> Path:
        assert status == 0, output[-6000:]
        assert "uthentication" not in output, output[-6000:]  # Ray's words about its token are not for this user
        return self.folder / name


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def forked_run(runner: Runner) -> Iterator[Callable[..., Path]]:
    """forked_run(name, *words): as runner.run, but in a process that finds torch, megatron and ours imported."""
    runs = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(FORKED_RUNS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        env=runner.environment(), start_new_session=True,
    )  # fmt: skip
    assert runs.stdin is not None and runs.stdout is not None

    def run(name: str, *words: str) -> Path:
        log = runner.folder / f"{name}.log"
        runs.stdin.write(json.dumps([str(log), runner.words(name, *words)]).encode() + b"\n")
        runs.stdout.readline()
        has_ended = select.select([runs.stdout], [], [], LIMIT_S)[0]
        status = int(runs.stdout.readline()) if has_ended else None
        return runner.ended(name, status, log.read_text(errors="replace"))

    yield run
    os.killpg(runs.pid, signal.SIGKILL)
    runs.communicate()


@pytest.fixture(scope="session")
def first_run(runner: Runner) -> Path:
    """Four steps from a fresh warm start."""
    return runner.run("first", "run.steps=4", ranks=1)


@pytest.fixture
def left_behind(runner: Runner) -> Callable[[], list[str]]:
    """Commands of the processes that still run and that a run of this test session started, directly or not."""
    mark = f"MARSRL_CACHE={runner.cache}\0".encode()  # children inherit it, whatever becomes of their parents

    def find() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    if mark in (entry / "environ").read_bytes():
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
                except OSError:
                    continue  # it ended while we looked
        return found

    return find
