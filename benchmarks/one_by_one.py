"""Checks that a child process tries one after the other, past those that fail, hang or bring the process down.

    python benchmarks/one_by_one.py --limit 40 --journal FILE -- python benchmarks/smoke.py --journal FILE

The child: for each name that is not in journal.tried(), `with journal.trying(name): ...`. The journal is a file of JSON
lines: one when a check begins, one when it ends. A child that dies or takes too long leaves a check that has only begun: it
is ended there with the reason, and a new child goes on with the rest. Exit code 1 where something is not right.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

BROKEN = 77  # exit code of a child whose device answers nothing any more: after an illegal address every call fails
QUIET_S = 120.0  # a child that tries nothing for so long (it imports, collects, compiles a library) is given up
POLL_S = 0.1


@dataclass(frozen=True)
class Check:
    """status: begun, passed, failed, skipped, crashed or timeout. first, last: lines of the error, or why it was skipped."""

    name: str
    status: str
    seconds: float = 0.0
    first: str = ""
    last: str = ""


class Skipped(Exception):
    """This check means nothing here."""


class Journal:
    """What was tried, in a file that outlives the process that writes it."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, check: Check) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(check)) + "\n")

    def checks(self) -> list[Check]:
        """Each check as it was last heard of, in the order of their beginnings."""
        if not self.path.exists():
            return []
        last = {each.name: each for each in (Check(**json.loads(line)) for line in self.path.read_text().splitlines())}
        return list(last.values())

    def tried(self) -> set[str]:
        return {check.name for check in self.checks()}

    @contextmanager
    def trying(self, name: str, is_broken: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Passed, failed or skipped by what the body raises. is_broken: asked after a failure; ends the process if so."""
        self.write(Check(name, "begun"))
        start, status, first, last = time.monotonic(), "passed", "", ""
        try:
            yield
        except Skipped as reason:
            status, first = "skipped", str(reason)
        except Exception as error:
            status, (first, last) = "failed", first_and_last(f"{type(error).__name__}: {error}")
        self.write(Check(name, status, time.monotonic() - start, first, last))
        if status == "failed" and is_broken():
            os._exit(BROKEN)


def first_and_last(text: str, width: int = 300) -> tuple[str, str]:
    """Its first line and, if there is more than one, its last one: what broke, and what it says about it."""
    lines = [line.strip()[:width] for line in text.splitlines() if line.strip()] or [""]
    return lines[0], lines[-1] if len(lines) > 1 else ""


def watch(command: list[str], journal: Journal, limit_s: float) -> str | None:
    """Runs the command until one exits between two checks; None, or why that was too early.

    limit_s: of one check; its process is then killed.
    """
    while True:
        before = len(journal.tried())
        process = subprocess.Popen(command)
        is_late = _outlasted(process, journal, limit_s)
        open_check = next((check for check in journal.checks() if check.status == "begun"), None)
        if open_check is not None:
            status, reason = ("timeout", f"killed after {limit_s:.0f} s") if is_late else ("crashed", _death(process))
            journal.write(Check(open_check.name, status, limit_s if is_late else 0.0, reason))
        elif is_late:
            return f"nothing was tried for {QUIET_S:.0f} s"
        elif process.returncode != BROKEN:
            return None if process.returncode == 0 else f"ended between two checks by {_death(process)}"
        if len(journal.tried()) == before:
            return f"ended before its first check by {_death(process)}"


def _outlasted(process: subprocess.Popen[bytes], journal: Journal, limit_s: float) -> bool:
    """Waits for its end; True where it was killed because its journal did not grow."""
    size, since, is_trying = -1, time.monotonic(), False
    while process.poll() is None:
        found = journal.path.stat().st_size if journal.path.exists() else 0
        if found != size:
            size, since = found, time.monotonic()
            is_trying = any(check.status == "begun" for check in journal.checks())
        if time.monotonic() - since > (limit_s if is_trying else QUIET_S):
            process.kill()
            process.wait()
            return True
        time.sleep(POLL_S)
    return False


def _death(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def tell(checks: list[Check], trouble: str | None) -> int:
    """Prints what is not right, how many of each, and why not all was tried; the exit code."""
    for check in checks:
        if check.status not in ("passed", "skipped"):
            print(f"{check.status}: {check.name}\n  {check.first}\n  {check.last}".rstrip())
    counts = Counter(check.status for check in checks)
    told = ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing tried"
    print(told + (f"; {trouble}" if trouble else ""))
    return 1 if trouble or set(counts) - {"passed", "skipped"} else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, required=True, help="seconds of one check")
    parser.add_argument("--journal", type=Path, required=True, help="what it holds already is not tried again")
    parser.add_argument("command", nargs="+", help="the child")
    words = parser.parse_args()
    journal = Journal(words.journal)
    trouble = watch(words.command, journal, words.limit)
    return tell(journal.checks(), trouble)


if __name__ == "__main__":
    sys.exit(main())
