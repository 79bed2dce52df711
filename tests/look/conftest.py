"""One hostile run and one viewer, shared by all tests of the viewer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_run import make_hostile_run
from made_up_run import make_run
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A hostile run, and a harmless one that has not finished."""
    root = tmp_path_factory.mktemp("runs")
    return [make_hostile_run(root / "a"), make_run(root / "b", finished=False, num_steps=3).path]


@pytest.fixture(scope="session")
def viewer(runs: list[Path]) -> Iterator[str]:
    """The address that `marsrl view` prints, with its token."""
    command = [sys.executable, "-m", "marsrl.commands.cli", "view", *map(str, runs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("open http://127.0.0.1:"), said
        yield said.split()[1]
    finally:
        process.terminate()
        process.wait()


# Module scope: while Playwright runs, asyncio.run fails in this thread, because Playwright's loop counts as running.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        path = found or playwright.chromium.executable_path
        if not Path(path).is_file():
            pytest.skip("no chromium on PATH: `make test-all` installs it, as root by apt-get")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=300_000)  # ms
        yield browser
        browser.close()
