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

Prints a line a fault and a summary; the exit status is 1 when anything was lost.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.remove(str(Path(__file__).resolve().parent))  # its folders would hide packages of their names
sys.path.insert(0, str(Path(__file__).resolve().parent / "docs"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "integration"))

import psutil
from books import Loss
from trial import SILENCE_S, Trial

from marsrl.trainer.report.metrics import read_metrics

GRACE_S = 10.0  # a silent rank's run is over so long after run.silence_s, and what torchrun and Ray take
START_S = 600.0  # for a run to come to its first step on a loaded machine
END_S = 300.0  # for one to end after a fault that ends it
SURVIVE_S = 400.0  # for one to train again after a fault that it survives
FAULTS_A_RUN = 8

# The kinds of faults. Each strikes a run that trains, and returns what the user sees. What it means is in docs/faults.md.

GO_ON = r"is whole: go on with .*run\.resume=auto"
NOTHING_YET = r"there is no checkpoint of it yet"
RAY_IS_GONE = rf"Ray is gone: .*{GO_ON}"
STOPPING = "stopping, the last finished step is saved first"  # noted, before the rank heard that another one had died
STOPS = rf"interrupted.*({GO_ON}|{NOTHING_YET})|interrupted before the run began"


def ends(line: str, strike: Callable[[Trial], object]) -> Callable[[Trial], str]:
    """A fault that ends the run with this line."""

    def struck(run: Trial) -> str:
        strike(run)
        return run.ended(END_S, line)

    return struck


def one_trainer(run: Trial) -> psutil.Process:
    while not (ranks := run.trainers()):  # torchrun itself has just begun
        time.sleep(0.1)
    return run.rng.choice(ranks)


def torchrun(run: Trial) -> subprocess.Popen[bytes]:
    assert run.life is not None
    run.trainers()
    return run.life.process


sigterm_torchrun = ends(STOPS, lambda run: torchrun(run).terminate())


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


def stop_rank(run: Trial) -> str:
    silent = run.rng.choice(run.trainers())
    silent.suspend()
    struck = time.monotonic()
    line = run.ended(END_S, rf"silent for run\.silence_s = {SILENCE_S:g} s: rank \d.*{GO_ON}|does not answer.*{GO_ON}")
    if (elapsed := time.monotonic() - struck) > SILENCE_S + GRACE_S + 15:
        raise Loss(f"a silent rank ended the run after {elapsed:.0f} s")
    return line


SIGKILL = rf"^$|{STOPPING}|interrupted|run failed|rank \d stops"
KINDS: dict[str, Callable[[Trial], str]] = {
    "kill-trainer": ends(SIGKILL, lambda run: one_trainer(run).kill()),
    "kill-torchrun": ends(rf"^$|{STOPS}|rank \d stops: .*{GO_ON}", lambda run: torchrun(run).kill()),
    "kill-engine": kill_engine,
    "kill-raylet": ends(RAY_IS_GONE, lambda run: run.processes("raylet")[0].kill()),
    "kill-gcs": ends(RAY_IS_GONE, lambda run: run.processes("gcs_server")[0].kill()),
    "stop-rank": stop_rank,
    "stop-engine": stop_engine,
    "sigterm-torchrun": sigterm_torchrun,
    "sigterm-rank": ends(STOPS, lambda run: run.trainers()[0].terminate()),
    "ctrl-c": ends(STOPS, lambda run: os.killpg(torchrun(run).pid, signal.SIGINT)),
}
AT_ANY_TIME = ("kill-trainer", "kill-torchrun", "sigterm-torchrun", "ctrl-c")  # also while a run starts


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
    """Go on as a user does, to the end."""
    if run.life is not None:
        sigterm_torchrun(run)
    last, before = run.step() + 1, run.files()
    run.life = run.start(f"run.steps={last}")
    run.ended(START_S, "", status=0)
    run.check()
    if run.row() != last:
        raise Loss(f"the end is step {last}, metrics.jsonl ends at {run.row()}")
    run.no_files_left(before)


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
    # A shell's background jobs ignore it, and so would the runs.
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
        run = Trial(f"run{num_runs}", folder, cache, words.engine, rng)
        print(f"# {run}", flush=True)
        kind = "start"
        try:
            for _ in range(FAULTS_A_RUN):
                if time.monotonic() > end or sum(counts.values()) == words.faults:
                    break
                kind = next(kinds)
                if kind == "stop-rank" and run.ranks == 1:
                    continue
                counts[kind] += 1
                began, at = time.monotonic(), run.step()
                said = strike(run, kind)
                if run.life is None:
                    run.check()
                print(f"{kind} after step {at}: {time.monotonic() - began:.0f} s: {said}", flush=True)
            kind = "end"
            bring_to_its_end(run)
        except KeyboardInterrupt:
            is_interrupted = True
        except Exception as loss:  # also a file that cannot be read: counted, told, and the next run begins
            losses.append(f"{run}: {kind}: {loss!r}")
            print(f"LOST {losses[-1]} (log {run.num_lives})", flush=True)
        finally:
            run.kill()
    of_kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{sum(counts.values())} faults in {num_runs} runs, seed {words.seed}: {of_kinds}; {len(losses)} with a loss")
    if losses or words.keep:
        print(f"runs and logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())
