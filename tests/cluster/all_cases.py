"""A cluster in a box trains as one host does, and suffers what clusters suffer: `make cluster`, as root.

Three hosts (box.py): two train, the others' engines and their own come by `marsrl join`, files lie on one shared disk. Prints a
line a case, with what was checked; the exit status is 1 when something was not as docs/clusters.md has it.

    the same        three steps on 2 x 2 ranks (TP2 x DP2) with engines on the first and the third host are those of one rank on
                    one host: by files, started by docs/slurm.sh; and by wire, started by hand
    a program       on host1, played by a worker of host2, which is cut off, and then by one of host3
    the faults      on one run of 2 ranks, by wire, each followed by what the run is to do, and by the proof that no problem
                    is lost or trained twice (tests/integration/books.py)
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from books import Loss
from box import Box
from cluster import (
    ALONE,
    BY_FILES,
    BY_WIRE,
    PROGRAM,
    STEP_S,
    WORKERS_KEY,
    Training,
    fill,
    lend,
    play,
    same_metrics,
    submit,
    train,
    write_program,
)
from commands import run_by

from marsrl.trainer.report.metrics import MetricsRow

CUT_S = 20.0
END_S = 60.0  # "within a minute"
BY_HAND, JOIN = run_by("test_two_hosts_train_what_one_trains_and_name_the_host_that_is_gone")
LAYOUT = ("policies.main.layout.tensor=2", "rollout.engines=2")
GO_ON = r"checkpoint \S+ \(step \d+\) is whole: go on with run\.name=faults run\.resume=auto"


@dataclass
class Cases:
    """The box, and where consoles go."""

    box: Box
    logs: Path
    alone: Sequence[MetricsRow] = ()

    def one_host(self) -> str:
        run = train(self.box, f"torchrun --nproc-per-node 8 {ALONE}", "alone", self.logs, "run.steps=3", ranks=1)
        self._ended_well(run)
        self.alone = run.rows()
        return f"one rank and its engine in one process: {len(self.alone)} steps, {len(self.alone[-1].values)} metrics each"

    def by_files(self) -> str:
        joined = lend(self.box.hosts[0], JOIN, self.logs)
        run = submit(self.box, "files", self.logs, *LAYOUT, *BY_FILES, "run.steps=3", trainers=2, ranks=2)
        self._ended_well(run)
        if joined.wait(STEP_S) != 0:
            raise Loss("marsrl join did not end with the run")
        return f"docs/slurm.sh, 2 x 2 ranks, engines on host1 and host3, files: {same_metrics(self.alone, run.rows())}"

    def by_wire(self) -> str:
        self._lend()
        run = train(self.box, BY_HAND, "wire", self.logs, *LAYOUT, *BY_WIRE, "run.steps=3", ranks=2)
        self._ended_well(run)
        return f"by hand, 2 x 2 ranks, engines on host1 and host3, by wire: {same_metrics(self.alone, run.rows())}"

    def program(self) -> str:
        """Workers join from other hosts by `--url --key`; what is lost with one is played by the next."""
        write_program(self.box)
        run = train(
            self.box, f"torchrun --nproc-per-node 8 {ALONE}", "program", self.logs, *PROGRAM, ranks=1, **WORKERS_KEY
        )
        play(self.box.hosts[1], self.logs)
        step = run.into_a_stage()
        self.box.hosts[1].cut_off()
        play(self.box.hosts[2], self.logs)
        run.until(step + 3, 2 * STEP_S)
        replayed = sum(row.values.get("rollout/replayed_sessions") or 0 for row in run.rows())
        self.box.hosts[1].reconnect()
        run.until(run.step() + 2)
        for number in (1, 2, 3):
            self.box.replace(number)
        run.check()
        if failed := [row.step for row in run.rows() if row.values.get("rollout/failed_episodes")]:
            raise Loss(f"sessions failed in the steps {failed}")
        return f"host2 cut off in step {step + 1}: {replayed:.0f} sessions played again on host3, none failed; then both play"

    def faults(self, say: Callable[[str, str], None]) -> None:
        """All on one run; say(case, what was checked) after each."""
        self._lend()
        run = self._start("run.steps=1000")
        say("network cut", self._cut(run))
        say("engine host killed", self._engine_host(run))
        gone = r"silent for run\.silence_s = 40 s: rank 1 \(host2, process \d+\)"
        say("trainer host killed", self._trainer_host(run, 2, gone))
        self.box.replace(2)
        self.box.replace(3)
        self._lend()
        run = self._start("run.steps=1000", "run.resume=auto")
        gone = r"rank 0 \(host1, process \d+\) or its machine is gone: its store has not answered for run\.silence_s = 40 s"
        say("host of rank 0 killed", self._trainer_host(run, 1, gone))
        self.box.replace(1)
        self.box.replace(3)
        self._lend()
        run = self._start("run.steps=1000", "run.resume=auto")
        say("shared disk full", self._full_disk(run))
        self._lend()
        last = run.directory.latest_checkpoint()
        assert last is not None
        run = self._start(f"run.steps={last.step + 2}", "run.resume=auto")
        self._ended_well(run)
        run.check()
        steps = [row.step for row in run.rows()]
        say("resumed to the end", f"steps 1 to {steps[-1]} once each, every problem drawn trained once or in the books")

    def _lend(self) -> None:
        for number in (1, 3):
            lend(self.box.hosts[number - 1], JOIN, self.logs)

    def _start(self, *words: str) -> Training:
        return train(self.box, BY_HAND, "faults", self.logs, *LAYOUT, *BY_WIRE, *words, ranks=1)

    def _cut(self, run: Training) -> str:
        """The engines of host3 cannot be reached for CUT_S, from the middle of a stage on."""
        run.until(2)
        step = run.into_a_stage()
        self.box.hosts[2].cut_off()
        time.sleep(CUT_S)
        self.box.hosts[2].reconnect()
        run.until(step + 3, 2 * STEP_S)
        restarts = sum(row.values["rollout/engine_restarts"] or 0 for row in run.rows())
        if restarts:
            raise Loss(f"{restarts:.0f} engines were given up for a cut of {CUT_S:g} s")
        return f"host3 for {CUT_S:g} s in step {step + 1}: trains on to step {run.step()}, no engine given up"

    def _engine_host(self, run: Training) -> str:
        """It is done without at first; then another host joins."""
        step = run.into_a_stage()
        self.box.hosts[2].power_off()
        run.until(step + 3, 2 * STEP_S)
        struck = [row for row in run.rows() if row.values["rollout/resubmitted"]]
        if [row.step for row in struck] not in ([], [step + 1], [step + 2]):
            raise Loss(f"requests were decoded again in the steps {[row.step for row in struck]}, struck in {step + 1}")
        again = sum(row.values["rollout/resubmitted"] or 0 for row in struck)  # 0: it had just answered all of its own
        engines = run.rows()[-1].values["rollout/engines/main"]
        if engines != 1:
            raise Loss(f"{engines} engines serve after host3 was lost, and nobody has joined")
        lend(self.box.hosts[1], JOIN, self.logs)
        alone = run.step()
        end = time.monotonic() + 2 * STEP_S
        while run.rows()[-1].values["rollout/engines/main"] != 2:
            if time.monotonic() > end:
                raise Loss("host2 has joined, and no engine came to it")
            run.until(run.step() + 1)
        return (
            f"host3 off in step {step + 1}: {again:.0f} requests decoded again on host1, alone up to step {alone}; host2 joined, "
            f"and has an engine in step {run.step()}"
        )

    def _trainer_host(self, run: Training, number: int, says: str) -> str:
        """A host of trainer ranks is off; the other one's end by themselves, with its name."""
        run.until(run.step() + 2)
        step, other = run.into_a_stage(), f"host{3 - number}"
        self.box.hosts[number - 1].power_off()
        struck = time.monotonic()
        run.ended(END_S, other)
        took_s, said = time.monotonic() - struck, run.said(other)
        if not re.search(f"{says}.*{GO_ON}", said):
            raise Loss(f"{other} said {said!r}")
        run.check()
        return f"host{number} off in step {step + 1}: {other} ended after {took_s:.0f} s: {said}"

    def _full_disk(self, run: Training) -> str:
        run.until(run.step() + 2)
        step = run.into_a_stage()
        ballast = self.box.shared / "ballast"
        for size in (1 << 20, 1 << 12):
            with open(ballast, "ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"\1" * size)
        run.ended(STEP_S)
        ballast.unlink()
        said = run.said("host1")
        if not re.search(f"(No space left|no room on the disk).*{GO_ON}", said):
            raise Loss(f"host1 said {said!r}")
        run.check()
        return f"full from step {step + 1} on: {said}"

    def _ended_well(self, run: Training) -> None:
        codes = run.ended(3 * STEP_S)
        if any(codes.values()):
            raise Loss(f"{codes}:\n{run.output('host1')[-4000:]}")


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="marsrl-cluster-", dir="/tmp"))
    began = time.monotonic()

    def say(case: str, checked: str) -> None:
        nonlocal began
        now = time.monotonic()
        print(f"{case} ({now - began:.0f} s): {checked}", flush=True)
        began = now

    try:
        with Box(3) as box:
            fill(box)
            cases = Cases(box, folder)
            say("one host", cases.one_host())
            say("two hosts", cases.by_files())
            say("two hosts", cases.by_wire())
            say("a program", cases.program())
            cases.faults(say)
    except (Loss, RuntimeError) as error:
        print(f"LOST: {error}\nconsoles are in {folder}", flush=True)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
