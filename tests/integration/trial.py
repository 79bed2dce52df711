"""A run that is started, struck and started again by tests/chaos.py: its processes, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from books import Loss, check_books
from small_run import ARITHMETIC, MAIN, SMALL, TEAM

from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.runs.directory import RunDirectory

GROUP_SIZE = 4  # of SMALL
SILENCE_S = 12.0
GONE_S = 180.0  # for the processes of a run to be gone after it, on a loaded machine


@dataclass
class Life:
    """One process of a run, from its start to its end."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """The last one of ours: torchrun's follow it."""
        ours = [line for line in self.output.splitlines() if line.startswith("marsrl: ")]
        return ours[-1] if ours else ""


@dataclass
class Trial:
    """A run with its settings; lives follow each other."""

    name: str
    folder: Path  # of all trials: short, Ray's sockets lie in it
    cache: Path
    engine: str
    rng: random.Random
    overlap: int = 0
    segments: int = 1
    ranks: int = 1
    engines: int = 1
    life: Life | None = None
    num_lives: int = 0
    pids: set[int] = field(default_factory=set)  # of trainers

    def __post_init__(self) -> None:
        draw = self.rng.randint
        self.overlap, self.segments, self.ranks, self.engines = draw(0, 1), draw(1, 2), draw(1, 2), draw(1, 2)
        for name in ("tmp", "ray", "logs", "runs"):
            (self.folder / name).mkdir(exist_ok=True)

    def __str__(self) -> str:
        return f"{self.name} overlap={self.overlap} segments={self.segments} ranks={self.ranks} engines={self.engines}"

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.folder / "runs" / self.name)

    @property
    def environment(self) -> dict[str, str]:
        places = {"TMPDIR": str(self.folder / "tmp"), "RAY_TMPDIR": str(self.folder / "ray")}
        mine = {"MARSRL_CACHE": str(self.cache), "MARSRL_CHAOS": str(self.folder), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **places, **mine, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def command(self, *words: str) -> list[str]:
        launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        settings = [
            f"run.dir={self.directory.path.parent}", f"run.name={self.name}", "run.evaluate=false",
            "run.checkpoint_every=1", "run.keep_checkpoints=3", f"run.silence_s={SILENCE_S:g}",
            f"rollout.overlap={self.overlap}", f"rollout.segments={self.segments}", "rollout.deadline_s=60",
        ]  # fmt: skip
        ours = [
            *ARITHMETIC, TEAM, *SMALL, f"rollout.engine={self.engine}", f"rollout.engines={self.engines}",
            "rollout.object_store_mib=80",
        ]  # fmt: skip
        return [*launcher, "--nproc-per-node", str(self.ranks), str(MAIN), *ours, *settings, *words]

    def start(self, *more: str) -> Life:
        """Go on, as the last line says."""
        words = ["run.resume=auto"] if self.num_lives else []
        words += more or ("run.steps=100000",)
        self.num_lives += 1
        log = self.folder / "logs" / f"{self.name}-{self.num_lives}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                self.command(*words),
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
        return Life(process, log)

    # What there is.

    def processes(self, name: str = "") -> list[psutil.Process]:
        """The processes of this folder's runs, whoever their parents are; name: how their command begins or what it is called."""
        mark, found = str(self.folder), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("MARSRL_CHAOS") == mark and process.status() != psutil.STATUS_ZOMBIE:
                    command = process.cmdline()
                    is_named = process.name().startswith(name) or "".join(command[:1]).startswith(name)
                    if process.pid != os.getpid() and is_named:
                        found.append(process)
        return found

    def trainers(self) -> list[psutil.Process]:
        """Trainer processes, by rank."""
        assert self.life is not None
        ranks = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.life.process.pid).children():
                if "RANK" in child.environ():
                    ranks[int(child.environ()["RANK"])] = child
        self.pids |= {child.pid for child in ranks.values()}
        return [ranks[rank] for rank in sorted(ranks)]

    def step(self) -> int:
        """The step of the latest checkpoint; 0 before the first."""
        with contextlib.suppress(OSError):
            return int((self.directory.checkpoints / "latest").read_text().strip().removeprefix("step_"))
        return 0

    def row(self) -> int:
        """The last step of metrics.jsonl."""
        path = self.directory.metrics
        rows = read_metrics(path) if path.exists() else []
        return rows[-1].step if rows else 0

    # What is waited for.

    def train_on(self, steps: int, limit_s: float) -> None:
        """Until `steps` more are checkpointed, of this life."""
        assert self.life is not None
        goal, end = self.step() + steps, time.monotonic() + limit_s
        while self.step() < goal:
            if self.life.process.poll() is not None:
                raise Loss(f"the run ended by itself with {self.life.process.returncode}: {self.life.last_line}")
            if time.monotonic() > end:
                raise Loss(f"no step in {limit_s:.0f} s")
            self.trainers()
            time.sleep(0.5)

    def ended(self, limit_s: float, says: str, *, status: int | None = None) -> str:
        """The last line of a life that ends now; the next one goes on by it."""
        assert self.life is not None
        life, self.life = self.life, None
        try:
            code = life.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.life = life
            raise Loss(f"still runs after {limit_s:.0f} s") from None
        if (code == 0) != (status == 0):
            raise Loss(f"ended with status {code}: {life.last_line}")
        self._nothing_left()
        line = life.last_line
        has_begun = "# settings:" in life.output  # before that a signal ends a program that has no words yet
        if (line or has_begun) and not re.search(says, line):
            raise Loss(f"the last line is {line!r}, expected {says!r}")
        return line

    def kill(self) -> None:
        """Whatever still runs of it."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.life is not None:
            self.life.process.wait()
            self.life = None

    # What is proven.

    def _nothing_left(self) -> None:
        end = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        if left:
            named = [f"{p.pid} {p.name()}" for p in left]
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            raise Loss(f"processes are left: {', '.join(named)}")

    def weights_left(self, pids: set[int]) -> list[str]:
        folders = Path("/dev/shm").glob("marsrl-weights-*")
        return [each.name for each in folders if int(each.name.split("-")[2]) in pids]

    def files(self) -> set[str]:
        """Files in the temporary directory, without torch's cache of compiled code, which stays."""
        return {path.name for path in (self.folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")}

    def no_files_left(self, before: set[str]) -> None:
        """Check that a run that ended well, and those before it, left no files but torchrun's folders in `before`."""
        if left := self.weights_left(self.pids):
            raise Loss(f"in /dev/shm: {', '.join(left)}")
        if left := sorted(self.files() - {name for name in before if name.startswith("torchelastic_")}):
            raise Loss(f"in the temporary directory: {', '.join(left)}")

    def check(self) -> None:
        """The books of a run that stands still."""
        check_books(self.directory, GROUP_SIZE)
