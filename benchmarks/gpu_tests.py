"""The tests of a marker, with the outcome of each in a journal: for one_by_one.py, where a GPU may stop at any of them.

    python benchmarks/gpu_tests.py --journal FILE tests/kernels -m gpu

pytest is imported, not installed. Fixtures of tests/conftest.py, which need the whole package, are left out where only
tests/kernels is asked for: its tests need torch alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from namespace import ROOT
from one_by_one import BROKEN, Check, Journal, first_and_last
from smoke import is_broken

NOTHING_WRONG_WITH_PYTEST = (0, 1, 5)  # all passed, some failed (the journal says which), none chosen


class Recorder:
    """Leaves out what was tried, and writes down how each test ends."""

    def __init__(self, journal: Journal):
        self.journal, self.tried = journal, journal.tried()
        self._ended: Check | None = None
        self._seconds = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.tried]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.journal.write(Check(f"collecting {report.nodeid}", "failed", 0.0, *_lines(report)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._ended, self._seconds = None, 0.0
        self.journal.write(Check(nodeid, "begun"))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds += report.duration
        if report.failed or (report.skipped and self._ended is None):
            self._ended = Check(report.nodeid, report.outcome, 0.0, *_lines(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        ended = self._ended or Check(nodeid, "passed")
        self.journal.write(Check(nodeid, ended.status, self._seconds, ended.first, ended.last))
        if ended.status == "failed" and is_broken():
            os._exit(BROKEN)


def _lines(report: Any) -> tuple[str, str]:
    found = report.longrepr
    if isinstance(found, tuple):  # of a skipped test: file, line, reason
        return first_and_last(str(found[2]))
    crash = getattr(found, "reprcrash", None)
    return first_and_last(str(found) if crash is None else crash.message)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("tests", nargs="+", help="files or folders below the checkout")
    parser.add_argument("-m", dest="marker", required=True)
    parser.add_argument("--noconftest", action="store_true", help="of tests that need no fixture and so torch alone")
    words = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    given = ["-q", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-m", words.marker]
    if words.noconftest:
        given.append("--noconftest")
    elif all(Path(test).parts[:2] == ("tests", "kernels") for test in words.tests):
        given.append("--confcutdir=tests/kernels")
    code = pytest.main([*given, *words.tests], plugins=[Recorder(Journal(words.journal))])
    return 0 if code in NOTHING_WRONG_WITH_PYTEST else int(code)


if __name__ == "__main__":
    sys.exit(main())
