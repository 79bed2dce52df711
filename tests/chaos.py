"""Faults of many kinds at random moments on the default run in small, and after each the proof that nothing was lost.

    python tests/chaos.py --minutes 20 --seed 7
    python tests/chaos.py --faults 2 --kinds kill-engine kill-gcs --engine local

Runs are started, resumed and stopped as a user does it, with settings drawn from the seed: overlap 0 or 1, segments 1 or 2,
ranks 1 or 2, engines 1 or 2. Each gets some faults, one after the other, and goes on by the words that its last line says;
then it is brought to its end. After every end of a process, and at the end of the run:

    metrics      one row a step, none missing, none twice
    samples      every uid once, groups whole
    instances    each Solver group of each problem drawn: trained once, or still in the checkpoint's books
    checkpoints  all files as the manifests say, `latest` names one
    left behind  no process, nothing of ours in /dev/shm, nothing in the temporary directory
    last line    as docs/faults.md has it

Prints a line a fault and a summary; the exit status is 1 when anything was lost. As root each run gets a small disk of its
own (tmpfs) that can be filled; else that kind is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.remove(str(Path(__file__).resolve().parent))  # its folders would hide packages of their names
sys.path.insert(0, str(Path(__file__).resolve().parent / "integration"))

from small_run import ARITHMETIC, MAIN, SMALL

from marsrl.rollout.ledger import RolloutState
from marsrl.rollout.state import decode
from marsrl.trainer.manifest import damage
from marsrl.trainer.metrics import read_metrics
from marsrl.trainer.run_directory import RunDirectory
from marsrl.trainer.samples_log import read_samples, sample_files

GROUP_SIZE = 4  # of SMALL
SILENCE_S, GRACE_S = 12.0, 10.0
START_S = 600.0  # for a run to come to its first step on a loaded machine
END_S = 120.0  # for one to end after a fault that ends it
SURVIVE_S = 400.0  # for one to train again after a fault that it survives
GONE_S = 15.0  # for the processes of a run to be gone after it
DISK_MIB = 400
FAULTS_A_RUN = 6
WORDS = re.compile(r"run\.resume=(auto|previous)")


class Loss(Exception):
    """Something was lost, left behind, or said wrongly."""


@dataclass
class Life:
    """One process of a run, from its start to its end."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float
    words: str

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
    disk: Path | None = None
    life: Life | None = None
    num_lives: int = 0
    resume: str = ""  # what the last line said to go on with
    forgiven: set[str] = field(default_factory=set)  # damaged by us, named in a refusal
    pids: set[int] = field(default_factory=set)  # of trainers

    def __post_init__(self) -> None:
        draw = self.rng.randint
        self.overlap, self.segments, self.ranks, self.engines = draw(0, 1), draw(1, 2), draw(1, 2), draw(1, 2)
        for name in ("tmp", "ray", "logs", "runs"):
            (self.folder / name).mkdir(exist_ok=True)
        if os.geteuid() == 0:
            disk = self.folder / "runs" / f"disk-{self.name}"
            disk.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)]
            if subprocess.run(mount, capture_output=True).returncode == 0:
                self.disk = disk

    def __str__(self) -> str:
        return f"{self.name} overlap={self.overlap} segments={self.segments} ranks={self.ranks} engines={self.engines}"

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory((self.disk or self.folder / "runs") / self.name)

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
            f"rollout.engine={self.engine}", f"rollout.overlap={self.overlap}", f"rollout.segments={self.segments}",
            f"rollout.engines={self.engines}", "rollout.object_store_mib=80", "rollout.deadline_s=60",
        ]  # fmt: skip
        return [*launcher, "--nproc-per-node", str(self.ranks), str(MAIN), *ARITHMETIC, *SMALL, *settings, *words]

    def start(self, *more: str) -> Life:
        """Go on by the words that the last line said."""
        words = [f"run.resume={self.resume}"] if self.resume else []
        return self._start([*words, *more] if more else [*words, "run.steps=100000"])

    def _start(self, words: list[str]) -> Life:
        self.num_lives += 1
        log = self.folder / "logs" / f"{self.name}-{self.num_lives}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                self.command(*words),
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
        return Life(process, log, time.monotonic(), " ".join(words))

    # What there is.

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Of this folder's runs, whoever their parents are; name: how their command begins or what it is called."""
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
        """By rank."""
        assert self.life is not None
        ranks = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.life.process.pid).children():
                if "RANK" in child.environ():
                    ranks[int(child.environ()["RANK"])] = child
        self.pids |= {child.pid for child in ranks.values()}
        return [ranks[rank] for rank in sorted(ranks)]

    def step(self) -> int:
        """Of the latest checkpoint; 0 before the first."""
        latest = self.directory.checkpoints / "latest"
        with contextlib.suppress(OSError):
            return int(latest.read_text().strip().removeprefix("step_"))
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
        if not re.search(says, line):
            raise Loss(f"the last line is {line!r}, expected {says!r}")
        found = WORDS.findall(line)
        self.resume = found[-1] if found else "auto"
        return line

    def kill(self) -> None:
        """Whatever still runs of it."""
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

    def no_files_left(self) -> None:
        """Of a process that was not killed, and that the next start has cleaned up after one that was."""
        if left := self.weights_left(self.pids):
            raise Loss(f"in /dev/shm: {', '.join(left)}")
        if left := sorted(path.name for path in (self.folder / "tmp").iterdir()):
            raise Loss(f"in the temporary directory: {', '.join(left)}")

    def check(self) -> None:
        """The books of a run that stands still."""
        run = self.directory
        if not run.path.exists():
            return
        rows = [row.step for row in read_metrics(run.metrics)] if run.metrics.exists() else []
        if rows != list(range(1, len(rows) + 1)):
            raise Loss(f"metrics.jsonl has the steps {rows}")
        for step in run.steps_on_disk():
            if (files := damage(run.checkpoint(step))) and run.checkpoint(step).name not in self.forgiven:
                raise Loss(f"{run.checkpoint(step).name}: {'; '.join(files)}")
        latest = run.latest_checkpoint()
        if latest is None:
            return
        if len(rows) < latest.step:
            raise Loss(f"metrics.jsonl ends at {len(rows)}, the checkpoint is of step {latest.step}")
        self._check_samples(latest.path, latest.step)

    def _check_samples(self, checkpoint: Path, last: int) -> None:
        files = sample_files(self.directory)
        uids: Counter[str] = Counter()
        groups: Counter[str] = Counter()
        for step in range(1, last + 1):
            if step not in files:
                raise Loss(f"the samples of step {step} are missing")
            of_step = Counter(sample.group_id for sample in read_samples(files[step]))
            uids.update(sample.uid for sample in read_samples(files[step]))
            groups.update(of_step.keys())
            if broken := [group for group, count in of_step.items() if count != GROUP_SIZE]:
                raise Loss(f"step {step}: groups that are not of {GROUP_SIZE} samples: {broken}")
        books = decode(RolloutState, (checkpoint / "rollout.msgpack").read_bytes()).scheduler
        in_flight = [*books.open, *(ask.group_id for ask in books.pending), *(group.group_id for group in books.closed)]
        groups.update([*in_flight, *(group.group_id for batch in books.ready for group in batch.groups)])
        if twice := [uid for uid, count in uids.items() if count > 1]:
            raise Loss(f"samples that were trained twice: {twice[:5]} ({len(twice)})")
        if twice := [group for group, count in groups.items() if count > 1]:
            raise Loss(f"groups that are there twice: {twice[:5]} ({len(twice)})")
        drawn = {f"{number:06d}" for number in range(1, books.num_instances + 1)}
        there = {group.partition("/")[0] for group in groups if group.endswith("/solver")}
        if drawn != there:
            raise Loss(f"instances lost: {sorted(drawn - there)[:5]}, unknown: {sorted(there - drawn)[:5]}")


# The kinds of faults. Each strikes a run that trains, and returns what the user sees. What it means is in docs/faults.md.

GO_ON = r"is whole: go on with .*run\.resume=auto"
NOTHING_YET = r"there is no checkpoint of it yet"
STOPS = rf"interrupted.*({GO_ON}|{NOTHING_YET})|interrupted before the run began"


def kill_trainer(run: Trial) -> str:
    run.rng.choice(run.trainers()).kill()
    return run.ended(END_S, r"^$|interrupted|run failed|rank \d stops")


def kill_torchrun(run: Trial) -> str:
    assert run.life is not None
    run.trainers()
    run.life.process.kill()
    return run.ended(END_S, rf"^$|{STOPS}")


def sigterm_torchrun(run: Trial) -> str:
    assert run.life is not None
    run.life.process.terminate()
    return run.ended(END_S, STOPS)


def sigterm_rank(run: Trial) -> str:
    run.trainers()[0].terminate()
    return run.ended(END_S, STOPS)


def ctrl_c(run: Trial) -> str:
    assert run.life is not None
    os.killpg(run.life.process.pid, signal.SIGINT)
    return run.ended(END_S, STOPS)


def kill_engine(run: Trial) -> str:
    run.rng.choice(run.processes("ray::Engine")).kill()
    return survived(run)


def stop_engine(run: Trial) -> str:
    run.rng.choice(run.processes("ray::Engine")).suspend()
    return survived(run)


def survived(run: Trial) -> str:
    """A step after the one that was struck is in the checkpoints, and an engine was replaced."""
    assert run.life is not None
    before = run.row()
    run.train_on(3, SURVIVE_S)
    rows = [row for row in read_metrics(run.directory.metrics) if row.step >= before]
    restarts = sum(row.values.get("rollout/engine_restarts") or 0 for row in rows)
    if restarts < 1:
        raise Loss(f"no engine was replaced in the steps {before} to {rows[-1].step}")
    return f"trains on, {restarts:.0f} engine(s) replaced"


def kill_ray(name: str) -> Callable[[Trial], str]:
    def strike(run: Trial) -> str:
        (process,) = run.processes(name)
        process.kill()
        return run.ended(END_S, rf"Ray is gone: .*{GO_ON}")

    return strike


def stop_rank(run: Trial) -> str:
    silent = run.rng.choice(run.trainers())
    silent.suspend()
    struck = time.monotonic()
    line = run.ended(END_S, rf"silent for run\.silence_s = {SILENCE_S:g} s: rank \d.*{GO_ON}|does not answer.*{GO_ON}")
    if (elapsed := time.monotonic() - struck) > SILENCE_S + GRACE_S + 15:
        raise Loss(f"a silent rank ended the run after {elapsed:.0f} s")
    return line


def second_start(run: Trial) -> str:
    first, before = run.life, run.step()
    run.resume = "auto"
    run.life = run.start()
    try:
        code = run.life.process.wait(END_S)
        line = run.life.last_line
    finally:
        run.life = first
    if code == 0 or not re.search(r"is being written by process \d+ on ", line):
        raise Loss(f"a second start ended with {code} and said {line!r}")
    if run.step() == before:
        run.train_on(1, SURVIVE_S)
    return line


def full_disk(run: Trial) -> str:
    assert run.disk is not None
    ballast = run.disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\1" * (1 << 20))
    with open(ballast, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\1" * 4096)
    try:
        return run.ended(END_S, rf"(No space left|no room).*{GO_ON}")
    finally:
        ballast.unlink()


def limit_files(run: Trial) -> str:
    """What a quota does: files may not grow beyond a size."""
    resource.prlimit(run.trainers()[0].pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    return run.ended(END_S, rf"(File too large|no room).*{GO_ON}")


def flip_weights(run: Trial) -> str:
    """In the file of the weights of now; then an engine dies, and the new one reads it."""
    (trainer,) = run.trainers()[:1]
    files = sorted(Path("/dev/shm").glob(f"marsrl-weights-{trainer.pid}-*/version_*/*.safetensors"))
    flip(run.rng.choice(files), run.rng)
    run.rng.choice(run.processes("ray::Engine")).kill()
    assert run.life is not None
    before = run.row()
    while run.life.process.poll() is None and run.row() < before + 4:
        time.sleep(0.2)
    if run.life.process.poll() is None:
        return "the next version came before it was read"
    return run.ended(END_S, rf"run failed.*{GO_ON}")


def flip(file: Path, rng: random.Random) -> None:
    with open(file, "r+b") as handle:
        at = rng.randrange(file.stat().st_size)
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 1 << rng.randrange(8)]))


def flip_checkpoint(run: Trial) -> str:
    sigterm_torchrun(run)
    latest = run.directory.latest_checkpoint()
    assert latest is not None
    file = run.rng.choice(sorted(path for path in latest.path.rglob("*") if path.is_file() and path.stat().st_size))
    content = file.read_bytes()
    flip(file, run.rng)
    run.forgiven.add(latest.path.name)
    run.life = run.start()
    line = run.ended(START_S, rf"{latest.path.name} is damaged: .*{file.name}.*({WORDS.pattern}|restore the files)")
    if "restore the files, or start" in line:
        file.write_bytes(content)
        run.forgiven.discard(latest.path.name)
        run.resume = "auto"
    return line


def remove_latest(run: Trial) -> str:
    sigterm_torchrun(run)
    pointer = run.directory.checkpoints / "latest"
    if run.rng.random() < 0.5:
        pointer.unlink()
    else:
        pointer.write_text("step_99999\n")
    run.life = run.start()
    return run.ended(START_S, r"latest (is missing|names step_99999).*run\.resume=previous")


KINDS: dict[str, Callable[[Trial], str]] = {
    "kill-trainer": kill_trainer,
    "kill-torchrun": kill_torchrun,
    "kill-engine": kill_engine,
    "kill-raylet": kill_ray("raylet"),
    "kill-gcs": kill_ray("gcs_server"),
    "stop-rank": stop_rank,
    "stop-engine": stop_engine,
    "sigterm-torchrun": sigterm_torchrun,
    "sigterm-rank": sigterm_rank,
    "ctrl-c": ctrl_c,
    "flip-checkpoint": flip_checkpoint,
    "flip-weights": flip_weights,
    "full-disk": full_disk,
    "limit-files": limit_files,
    "second-start": second_start,
    "remove-latest": remove_latest,
}
AT_ANY_TIME = ("kill-trainer", "kill-torchrun", "sigterm-torchrun", "ctrl-c")  # also while a run starts


def possible(run: Trial, kinds: list[str]) -> list[str]:
    impossible = {"stop-rank"} if run.ranks == 1 else set()
    return [kind for kind in kinds if kind not in impossible | ({"full-disk"} if run.disk is None else set())]


def strike(run: Trial, kind: str) -> str:
    """Bring the run to a random moment, let the fault happen, and check what is left."""
    if run.life is None:
        run.life = run.start()
        if kind in AT_ANY_TIME and run.rng.random() < 0.25:
            time.sleep(run.rng.uniform(0, 30))
            run.trainers()
            return KINDS[kind](run)
    run.train_on(run.rng.randint(1, 2), START_S)
    time.sleep(run.rng.uniform(0, 2))
    return KINDS[kind](run)


def bring_to_its_end(run: Trial) -> None:
    """What a user who goes on gets."""
    if run.life is not None:
        sigterm_torchrun(run)
    last = run.step() + 1
    run.life = run.start(f"run.steps={last}")
    run.ended(START_S, "", status=0)
    run.check()
    if run.row() != last:
        raise Loss(f"the end is step {last}, metrics.jsonl ends at {run.row()}")
    run.no_files_left()


def shuffled(kinds: list[str], rng: random.Random) -> Iterator[str]:
    """All kinds once before any comes again."""
    while True:
        yield from rng.sample(kinds, len(kinds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="no new fault after them (default: %(default)g)")
    parser.add_argument("--faults", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="of settings, faults and moments (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "--engine", choices=("vllm", "local"), default="vllm", help="rollout.engine (default: %(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="keep runs and logs also where nothing was lost")
    words = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it, and so would the runs
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rng, folder = random.Random(words.seed), Path(tempfile.mkdtemp(prefix="mc-", dir="/tmp"))
    cache = Path(os.environ.get("MARSRL_CACHE") or folder / "cache")
    end, kinds = time.monotonic() + 60 * words.minutes, shuffled(words.kinds, rng)
    counts: Counter[str] = Counter()
    losses: list[str] = []
    num_runs = 0
    while time.monotonic() < end and (words.faults is None or sum(counts.values()) < words.faults):
        num_runs += 1
        run = Trial(f"run{num_runs}", folder, cache, words.engine, rng)
        print(f"# {run}", flush=True)
        kind = "start"
        try:
            for _ in range(FAULTS_A_RUN):
                if time.monotonic() > end or sum(counts.values()) == words.faults:
                    break
                kind = next(kinds)
                if kind not in possible(run, words.kinds):
                    continue
                counts[kind] += 1
                began, at = time.monotonic(), run.step()
                said = strike(run, kind)
                if run.life is None:
                    run.check()
                print(f"{kind} after step {at}: {time.monotonic() - began:.0f} s: {said}", flush=True)
            kind = "end"
            bring_to_its_end(run)
        except Loss as loss:
            losses.append(f"{run}: {kind}: {loss}")
            print(f"LOST {losses[-1]} (log {run.num_lives})", flush=True)
        finally:
            if run.disk is not None and (words.keep or any(f"{run}: " in loss for loss in losses)):
                shutil.copytree(run.disk, folder / f"kept-{run.name}", ignore=shutil.ignore_patterns("ballast"))
            run.close()
    of_kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{sum(counts.values())} faults in {num_runs} runs, seed {words.seed}: {of_kinds}; {len(losses)} with a loss")
    if losses or words.keep:
        print(f"runs and logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())
