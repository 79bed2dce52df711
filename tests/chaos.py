"""Cause random faults in a small version of the default run, and check after each that nothing was lost.

    python tests/chaos.py --minutes 20 --seed 7
    python tests/chaos.py --faults 2 --kinds kill-engine kill-gcs --engine local
    python tests/chaos.py --external --faults 50 --kinds kill-trainer kill-worker kill-both

The script starts, resumes and stops runs as a user does, with settings drawn from the seed: overlap 0 or 1, segments 1 or 2,
ranks 1 or 2, engines 1 or 2. Each run gets several faults in turn, continues by the command in its last line, and is finally
played to its end. After each exit of a process and at the end of the run it checks:

    metrics      there is exactly one row per step
    samples      every uid occurs once, and all groups are whole
    instances    each Solver group of each drawn problem was trained once, or waits in the checkpoint's rollout state
    checkpoints  all files are as the manifests say, and `latest` names a checkpoint
    left behind  the run left no process, and no file in /dev/shm or the temporary directory
    last line    the last line on the console is the one that docs/faults.md promises

With --external a program plays the runs (integration/mischief.py). Faults strike its workers too, and the script also checks:

    sessions     no finished session is played again, none is trained twice, and none fails

Prints a line per fault and a summary. The exit status is 1 if anything was lost. If started by root, the script gives each run a
small disk (tmpfs), which the fault full-disk fills; otherwise it leaves this fault out.
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
from pathlib import Path

sys.path.remove(str(Path(__file__).resolve().parent))  # folders of tests/ would shadow packages of the same names
sys.path.extend(str(Path(__file__).resolve().parent / folder) for folder in ("docs", "integration"))

import psutil
from books import Loss
from trial import NO_STEP, NUM_WORKERS, SILENCE_S, WORDS, Trial

from marsrl.trainer.report.metrics import read_metrics

GRACE_S = 10.0  # time for a silent rank's run to end after run.silence_s, including torchrun and Ray
LOADED_S = 60.0  # additional time on a loaded machine
START_S = 600.0  # time to the first step on a loaded machine
END_S = 300.0  # time for a run to end after a fault that ends it
SURVIVE_S = 400.0  # time for a run to train again after a fault that it survives
FAULTS_A_RUN, FAULTS_A_PROGRAM = 8, 50

# Kinds of faults. Each function causes one in a training run, checks what the user sees (docs/faults.md), and returns a short
# report.

GO_ON = r"is intact: resume by adding .*run\.resume=auto"
NOTHING_YET = r"it has no checkpoint yet"
RAY_IS_GONE = rf"Ray is gone: .*{GO_ON}"
STOPPING = "stopping after saving the last finished step"  # a rank may log this before it learns that another died
# After the fault remove-latest, `latest` is missing until the next checkpoint, even if the resumed run is stopped before that.
STILL_REMOVED = r"latest (is missing|names \w+).*run\.resume=previous"
STOPS = rf"interrupted.*({GO_ON}|{NOTHING_YET}|{STILL_REMOVED})|interrupted before the run began"


def ends(line: str, strike: Callable[[Trial], object]) -> Callable[[Trial], str]:
    """Return a fault that applies `strike` to the run, and expects the run to end with a last line that matches `line`."""

    def struck(run: Trial) -> str:
        strike(run)
        return run.ended(END_S, line)

    return struck


def one_of(run: Trial, processes: Callable[[], list[psutil.Process]]) -> psutil.Process:
    while not (there := processes()):  # torchrun has not started them yet
        time.sleep(0.1)
    return run.rng.choice(there)


def torchrun(run: Trial) -> subprocess.Popen[bytes]:
    assert run.life is not None
    run.trainers()
    return run.life.process


sigterm_torchrun = ends(STOPS, lambda run: torchrun(run).terminate())


def of_an_engine(strike: Callable[[psutil.Process], object]) -> Callable[[Trial], str]:
    """Return a fault that applies `strike` to an engine, and checks that it was replaced and that training went on."""

    def struck(run: Trial) -> str:
        strike(run.rng.choice(run.processes("ray::Engine")))
        before = run.row()
        run.train_on(3, SURVIVE_S)
        rows = [row for row in read_metrics(run.directory.metrics) if row.step >= before]
        restarts = sum(row.values.get("rollout/engine_restarts") or 0 for row in rows)
        if restarts < 1:
            raise Loss(f"no engine was replaced in the steps {before} to {rows[-1].step}")
        return f"trains on, {restarts:.0f} engine(s) replaced"

    return struck


def stop_rank(run: Trial) -> str:
    silent = run.rng.choice(run.trainers())
    silent.suspend()
    struck = time.monotonic()
    line = run.ended(END_S, rf"silent for run\.silence_s = {SILENCE_S:g} s: rank \d.*{GO_ON}|does not answer.*{GO_ON}")
    if (elapsed := time.monotonic() - struck) > SILENCE_S + GRACE_S + LOADED_S:
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
        raise Loss(f"a second start exited with {code}; its last line is {line!r}")
    if run.step() == before:
        run.train_on(1, SURVIVE_S)
    return line


def full_disk(run: Trial) -> str:
    assert run.disk is not None
    ballast = run.disk / "ballast"
    for size in (1 << 20, 4096):
        with open(ballast, "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\1" * size)
    try:
        return run.ended(END_S, rf"(No space left|no room).*{GO_ON}")
    finally:
        ballast.unlink()


def limit_files(run: Trial) -> str:
    """Limit the size of files, like a disk quota."""
    resource.prlimit(run.trainers()[0].pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    return run.ended(END_S, rf"(File too large|no room).*{GO_ON}")


def flip_weights(run: Trial) -> str:
    """Damage the current weight file, then kill an engine, so that its replacement reads it."""
    (trainer,) = run.trainers()[:1]
    files = sorted(Path("/dev/shm").glob(f"marsrl-weights-{trainer.pid}-*/version_*/*.safetensors"))
    flip(run.rng.choice(files), run.rng)
    run.rng.choice(run.processes("ray::Engine")).kill()
    assert run.life is not None
    before = run.row()
    while run.life.process.poll() is None:
        if run.row() >= before + 4:
            return "the next version was published before the damaged file was read"
        time.sleep(0.2)
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
    # A run that loses its only checkpoint would start anew.
    if run.rng.random() < 0.5 and len(run.directory.steps_on_disk()) > 1:
        pointer.unlink()
    else:
        pointer.write_text(f"{NO_STEP}\n")
    run.forgiven.add("latest")
    run.life = run.start()
    return run.ended(START_S, rf"latest (is missing|names {NO_STEP}).*run\.resume=previous")


def of_a_worker(strike: Callable[[psutil.Process], object]) -> Callable[[Trial], str]:
    """Return a fault that applies `strike` to a worker, and checks that another worker replaces it and the run continues."""

    def struck(run: Trial) -> str:
        worker, end = one_of(run, run.workers), time.monotonic() + SURVIVE_S
        strike(worker)
        while worker in (workers := run.workers()) or len(workers) != NUM_WORKERS:
            if time.monotonic() > end:
                raise Loss(f"worker {worker.pid} was not replaced: there are {[each.pid for each in workers]}")
            time.sleep(0.2)
        return trained_on(run)

    return struck


def trained_on(run: Trial) -> str:
    """Wait for two more steps, and check that no session failed in them."""
    before = run.row()
    run.train_on(2, SURVIVE_S)
    rows = [row for row in read_metrics(run.directory.metrics) if row.step >= before]
    if failed := [row.step for row in rows if row.values.get("rollout/failed_episodes")]:
        raise Loss(f"sessions failed in the steps {failed}")
    return f"trains on, {sum(row.values.get('rollout/replayed_sessions') or 0 for row in rows):.0f} session(s) played again"


def kill_both(run: Trial) -> None:
    for process in run.rng.sample([one_of(run, run.trainers), one_of(run, run.workers)], 2):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def mischief(name: str) -> Callable[[Trial], str]:
    """Make the program misbehave in the first session of each problem, until two sessions have done so."""

    def struck(run: Trial) -> str:
        assert run.sessions is not None
        trigger, end = run.sessions.path.with_suffix(".mischief"), time.monotonic() + SURVIVE_S
        done = sum(line.endswith(name) for line in run.sessions.lines()) + 2
        trigger.write_text(name)
        try:
            while sum(line.endswith(name) for line in run.sessions.lines()) < done:
                if time.monotonic() > end:
                    raise Loss(f"two more sessions should {name}, but fewer have ended")
                time.sleep(0.2)
        finally:
            trigger.unlink()
        return trained_on(run)

    return struck


SIGKILL = rf"^$|{STOPPING}|interrupted|run failed|rank \d stops"
KINDS: dict[str, Callable[[Trial], str]] = {
    "kill-trainer": ends(SIGKILL, lambda run: one_of(run, run.trainers).kill()),
    "kill-torchrun": ends(rf"^$|{STOPS}|rank \d stops: .*{GO_ON}", lambda run: torchrun(run).kill()),
    "kill-engine": of_an_engine(psutil.Process.kill),
    "kill-raylet": ends(RAY_IS_GONE, lambda run: run.processes("raylet")[0].kill()),
    "kill-gcs": ends(RAY_IS_GONE, lambda run: run.processes("gcs_server")[0].kill()),
    "stop-rank": stop_rank,
    "stop-engine": of_an_engine(psutil.Process.suspend),
    "sigterm-torchrun": sigterm_torchrun,
    "sigterm-rank": ends(STOPS, lambda run: run.trainers()[0].terminate()),
    "ctrl-c": ends(STOPS, lambda run: os.killpg(torchrun(run).pid, signal.SIGINT)),
    "flip-checkpoint": flip_checkpoint,
    "flip-weights": flip_weights,
    "full-disk": full_disk,
    "limit-files": limit_files,
    "second-start": second_start,
    "remove-latest": remove_latest,
    "kill-worker": of_a_worker(psutil.Process.kill),
    "hang-worker": of_a_worker(psutil.Process.suspend),
    "kill-both": ends(SIGKILL, kill_both),
    **{name: mischief(name) for name in ("call-a-thousand-times", "disconnect", "send-100-mib")},
}
OF_SESSIONS = list(KINDS)[list(KINDS).index("kill-worker") :]
AT_ANY_TIME = ("kill-trainer", "kill-torchrun", "sigterm-torchrun", "ctrl-c")  # also while a run starts
BESIDE_SESSIONS = [*AT_ANY_TIME, "stop-rank", "sigterm-rank", "second-start"]


def possible(run: Trial, kinds: list[str]) -> list[str]:
    impossible = {"stop-rank"} if run.ranks == 1 else set()
    return [kind for kind in kinds if kind not in impossible | ({"full-disk"} if run.disk is None else set())]


def strike(run: Trial, kind: str) -> str:
    """Wait for a random moment of the run, inject the fault, and check the consequences."""
    if run.life is None:
        run.life = run.start()
        if kind in AT_ANY_TIME and run.rng.random() < 0.25:
            time.sleep(run.rng.uniform(0, 30))
            run.trainers()
            return KINDS[kind](run)
    run.train_on(run.rng.randint(1, 2), START_S)
    run.forgiven.discard("latest")  # the run has continued from another checkpoint and named it in `latest`
    time.sleep(run.rng.uniform(0, 2))
    return KINDS[kind](run)


def bring_to_its_end(run: Trial) -> None:
    """Resume as a user does, until the run ends."""
    if run.life is not None:
        sigterm_torchrun(run)
    last, before = run.step() + 1, run.files()
    run.life = run.start(f"run.steps={last}")
    run.ended(START_S, "", status=0)
    run.check()
    if run.row() != last:
        raise Loss(f"the run should end at step {last}, but metrics.jsonl ends at step {run.row()}")
    run.no_files_left(before)


def shuffled(kinds: list[str], rng: random.Random) -> Iterator[str]:
    """Yield kinds without end, in random order; all of them occur before any repeats."""
    while True:
        yield from rng.sample(kinds, len(kinds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="minutes after which no new fault begins (default: %(default)g)"
    )
    parser.add_argument("--faults", type=int, help="stop after this many faults")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of settings, faults and moments (default: %(default)s)"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "--engine", choices=("vllm", "local"), default="vllm", help="rollout.engine (default: %(default)s)"
    )
    parser.add_argument(
        "--external", action="store_true", help="an external program plays the runs; up to 50 faults on each run"
    )
    parser.add_argument("--keep", action="store_true", help="keep runs and logs even if nothing was lost")
    words = parser.parse_args()
    of_sessions = {*OF_SESSIONS, *BESIDE_SESSIONS} if words.external else KINDS.keys() - OF_SESSIONS
    words.kinds = [kind for kind in words.kinds if kind in of_sessions]
    if not words.kinds:
        parser.error(
            "--kinds: faults of workers and sessions need --external; those of engines, Ray and files exclude it"
        )
    # A shell's background jobs ignore SIGINT, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rng, folder = random.Random(words.seed), Path(tempfile.mkdtemp(prefix="mc-", dir="/tmp"))
    cache = Path(os.environ.get("MARSRL_CACHE") or folder / "cache")
    end, kinds = time.monotonic() + 60 * words.minutes, shuffled(words.kinds, rng)
    counts: Counter[str] = Counter()
    losses: list[str] = []
    num_runs = 0
    is_interrupted = False
    while not is_interrupted and time.monotonic() < end and sum(counts.values()) != words.faults:
        num_runs += 1
        run = Trial(f"run{num_runs}", folder, cache, words.engine, rng, words.external)
        print(f"# {run}", flush=True)
        kind = "start"
        try:
            for _ in range(FAULTS_A_PROGRAM if words.external else FAULTS_A_RUN):
                if time.monotonic() > end or sum(counts.values()) == words.faults:
                    break
                kind = next(kinds)
                if kind not in possible(run, words.kinds):
                    continue
                counts[kind] += 1
                began, at = time.monotonic(), run.step()
                report = strike(run, kind)
                if run.life is None:
                    run.check()
                print(f"{kind} after step {at}: {time.monotonic() - began:.0f} s: {report}", flush=True)
            kind = "end"
            bring_to_its_end(run)
        except KeyboardInterrupt:
            is_interrupted = True
        except Exception as loss:  # any error, for example an unreadable file, counts as a loss; the next run follows
            losses.append(f"{run}: {kind}: {loss!r}")
            print(f"LOST {losses[-1]} (log {run.num_lives})", flush=True)
        finally:
            if run.disk is not None and (words.keep or any(f"{run}: " in loss for loss in losses)):
                shutil.copytree(run.disk / run.name, folder / "runs" / run.name)
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
