"""A run that tests/chaos.py starts, makes fail and starts again: its processes, and the files that it leaves behind."""

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
from books import Loss, SessionsBook, check_books, last_line
from desk import boxing_model
from mischief import MOST_CALLS, PLAYED
from small_run import ARITHMETIC, MAIN, SMALL, TEAM, sevens, started_with

from marsrl.rollout.gateway.workers import WORKER
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.runs.directory import RunDirectory

GROUP_SIZE = 4  # as in SMALL
SILENCE_S = 12.0
GONE_S = 180.0  # time in which a run's processes disappear after its end, even on a loaded machine
DISK_MIB = 400
NUM_WORKERS = 2
MISCHIEF = Path(__file__).with_name("mischief.py")
NO_STEP = "step_99999"  # a missing checkpoint, which a fault writes to `latest`
CHAOS = "MARSRL_CHAOS"  # environment variable of all processes of a folder's runs
WORDS = re.compile(r"run\.resume=(auto|previous)")


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
        return last_line(self.output)


@dataclass
class Trial:
    """A run and its settings. Each start of the run begins a new life."""

    name: str
    folder: Path  # folder of all trials, with a short path for Ray's sockets
    cache: Path
    engine: str
    rng: random.Random
    is_external: bool = False  # a program plays, in workers, with a random model and our own engine
    overlap: int = 0
    segments: int = 1
    ranks: int = 1
    engines: int = 1
    disk: Path | None = None
    life: Life | None = None
    num_lives: int = 0
    resume: str = ""  # value of run.resume in the last line of the previous life
    forgiven: set[str] = field(default_factory=set)  # damaged checkpoints, by name; `latest`: that file too
    pids: set[int] = field(default_factory=set)  # process ids of trainers
    sessions: SessionsBook | None = None

    def __post_init__(self) -> None:
        draw = self.rng.randint
        self.overlap, self.segments, self.ranks, self.engines = draw(0, 1), draw(1, 2), draw(1, 2), draw(1, 2)
        if self.is_external:
            self.sessions = SessionsBook(self.folder / f"{self.name}.played")
        for name in ("tmp", "ray", "logs", "runs"):
            (self.folder / name).mkdir(exist_ok=True)
        if os.geteuid() == 0:
            disk = self.folder / "runs" / f"disk-{self.name}"
            disk.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)]
            if subprocess.run(mount, capture_output=True).returncode == 0:
                self.disk = disk

    def __str__(self) -> str:
        external = "external " if self.is_external else ""
        return f"{self.name} {external}overlap={self.overlap} segments={self.segments} ranks={self.ranks} engines={self.engines}"

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory((self.disk or self.folder / "runs") / self.name)

    @property
    def environment(self) -> dict[str, str]:
        places = {"TMPDIR": str(self.folder / "tmp"), "RAY_TMPDIR": str(self.folder / "ray")}
        mine = {"MARSRL_CACHE": str(self.cache), CHAOS: str(self.folder), "OMP_NUM_THREADS": "1"}
        if self.sessions is not None:
            mine[PLAYED] = str(self.sessions.path)
        return {**os.environ, **places, **mine, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def command(self, *words: str) -> list[str]:
        launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        settings = [
            f"run.dir={self.directory.path.parent}", f"run.name={self.name}", "run.evaluate=false",
            "run.checkpoint_every=1", "run.keep_checkpoints=3", f"run.silence_s={SILENCE_S:g}",
            f"rollout.overlap={self.overlap}", f"rollout.segments={self.segments}", f"rollout.engines={self.engines}",
            "rollout.deadline_s=60", "rollout.object_store_mib=80", "rollout.placement=disaggregated",
        ]  # fmt: skip
        ours = [*ARITHMETIC, TEAM, *SMALL, f"rollout.engine={self.engine}"]
        played = self._external() if self.is_external else ours
        return [*launcher, "--nproc-per-node", str(self.ranks), str(MAIN), *played, *settings, *words]

    def _external(self) -> list[str]:
        """Return settings of a program's run."""
        model, problems = self.folder / "model", self.folder / "train.jsonl"
        if not model.exists():
            boxing_model(model)
            sevens(self.folder, 60)
        return [
            "task=math", "orchestration=external", f"data.train={problems}", "agents={solver: {}, verifier: {}}",
            f"external={{function: {MISCHIEF}:run, workers: {NUM_WORKERS}, attempts: 1000, max_calls: {MOST_CALLS}}}",
            "external.max_body_mib=1", "external.concurrency=6", "credit.normalise=agent",
            f"policies={{main: {{model: {model}, dtype: float32}}}}",
            "rollout={engine: local, prompts_per_step: 3, max_response_tokens: 200}", f"rollout.group_size={GROUP_SIZE}",
        ]  # fmt: skip

    def start(self, *more: str) -> Life:
        """Start the run with the value of run.resume that the last line of the previous life gave."""
        words = [f"run.resume={self.resume}"] if self.resume else []
        words += more or ["run.steps=100000"]
        self.num_lives += 1
        log = self.folder / "logs" / f"{self.name}-{self.num_lives}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                self.command(*words),
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
        return Life(process, log)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Return processes of this folder's runs, also orphans. name: prefix of the process name or of the executable."""
        every = [
            (each, [each.info["name"], *each.info["cmdline"][:1]]) for each in started_with(CHAOS, str(self.folder))
        ]
        return [each for each, names in every if any(one.startswith(name) for one in names)]

    def trainers(self) -> list[psutil.Process]:
        """Return trainer processes, by rank."""
        assert self.life is not None
        ranks = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.life.process.pid).children():
                if "RANK" in child.environ():
                    ranks[int(child.environ()["RANK"])] = child
        self.pids |= {child.pid for child in ranks.values()}
        return [ranks[rank] for rank in sorted(ranks)]

    def workers(self) -> list[psutil.Process]:
        """Return the processes that play sessions."""
        return [each for each in self.processes() if str(WORKER) in each.info["cmdline"]]

    def step(self) -> int:
        """Return the step of the checkpoint in `latest`, or 0 before the first one.

        If a fault has removed `latest`, return the newest checkpoint's step.
        """
        latest = self.directory.checkpoints / "latest"
        on_disk = self.directory.steps_on_disk()
        if "latest" in self.forgiven and (not latest.exists() or latest.read_text().strip() == NO_STEP):
            return on_disk[-1]
        with contextlib.suppress(OSError):
            return int(latest.read_text().strip().removeprefix("step_"))
        return 0

    def row(self) -> int:
        """Return the last step of metrics.jsonl."""
        path = self.directory.metrics
        rows = read_metrics(path) if path.exists() else []
        return rows[-1].step if rows else 0

    def train_on(self, steps: int, limit_s: float) -> None:
        """Wait until this life has checkpointed `steps` more steps."""
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
        """Wait for the end of this life, and return its last line, which says how the next life resumes."""
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
        # Before the settings are printed, a signal ends the program without a last line.
        has_begun = "# settings:" in life.output
        if (line or has_begun) and not re.search(says, line):
            raise Loss(f"the last line is {line!r}, expected {says!r}")
        found = WORDS.findall(line)
        self.resume = found[-1] if found else "auto"
        return line

    def kill(self) -> None:
        """Kill the run's processes that are still alive."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.life is not None:
            self.life.process.wait()
            self.life = None

    def close(self) -> None:
        self.kill()
        if self.disk is not None:
            subprocess.run(["umount", "-l", str(self.disk)], check=True)

    def _nothing_left(self) -> None:
        end = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        if left:
            named = [f"{p.pid} {p.info['name']}" for p in left]
            self.kill()
            raise Loss(f"processes are left: {', '.join(named)}")

    def files(self) -> set[str]:
        """Return files in the temporary directory, without torch's cache of compiled code, which stays."""
        return {path.name for path in (self.folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")}

    def no_files_left(self, before: set[str]) -> None:
        """Check that, after a good end, no life has left files behind, except the folders of torchrun in `before`."""
        weights = [folder.name for folder in Path("/dev/shm").glob("marsrl-weights-*")]
        if left := [name for name in weights if int(name.split("-")[2]) in self.pids]:
            raise Loss(f"in /dev/shm: {', '.join(left)}")
        if left := sorted(self.files() - {name for name in before if name.startswith("torchelastic_")}):
            raise Loss(f"in the temporary directory: {', '.join(left)}")

    def check(self) -> None:
        """Check the invariants of a stopped run."""
        check_books(self.directory, GROUP_SIZE, self.forgiven)
        if self.sessions is not None:
            self.sessions.check(self.directory)
