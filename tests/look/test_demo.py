"""The recorded run of `marsrl view --demo`: its contents, and what the viewer shows."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from documented_commands import run_by
from fastapi.testclient import TestClient
from made_up_run import make_run
from playwright.sync_api import Browser
from watched import Watched

from marsrl.commands.cli import main
from marsrl.commands.look.record import DEMO
from marsrl.commands.look.server import make_app
from marsrl.trainer.report.samples_log import read_samples
from marsrl.trainer.runs.directory import step_files

QUESTIONS = ("overview", "samples", "problems", "charts", "axes", "spans", "speed", "warnings")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_demo_names_no_path_of_a_host() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file() and path.suffix != ".parquet"]
    texts = {str(path): path.read_text("utf-8") for path in files}
    for path in step_files(DEMO / "samples").values():
        texts[str(path)] = "\n".join(f"{row.prompt}\n{row.text}\n{row.note}" for row in read_samples(path))
    for name, text in texts.items():
        assert not re.search(r"(?<!\w)/(home|root|tmp|Users|mnt|work|data|opt|var)/", text), name


def test_the_viewer_answers_about_the_demo_and_writes_nothing() -> None:
    before = {path: path.stat().st_mtime_ns for path in [DEMO, *DEMO.rglob("*")]}
    client = TestClient(make_app([DEMO], "secret"), base_url="http://127.0.0.1:1234")
    client.get("/?token=secret")
    (run,) = client.get("/api/runs").json()
    assert run["name"] == "demo" and run["samples"] > 0 and run["last_metrics"] > 0
    for question in QUESTIONS:
        assert client.get(f"/api/{question}?run=0{'&agent=' * (question == 'problems')}").status_code == 200, question
    assert client.get("/api/overview?run=0").json()["config"]
    (first, *_) = client.get("/api/samples?run=0").json()["rows"]
    for question in ("sample", "tokens"):
        assert client.get(f"/api/{question}?run=0&step={first['step']}&line={first['line']}").status_code == 200
    assert {path: path.stat().st_mtime_ns for path in [DEMO, *DEMO.rglob("*")]} == before


def test_view_demo_opens_on_its_overview(browser: Browser) -> None:
    command = [sys.executable, "-m", "marsrl.commands.cli", "view", "--demo"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        seen = Watched(browser, address.partition("?")[0])
        seen.page.goto(address)
        seen.page.wait_for_selector("a.here >> text=overview")
        seen.wait_until("document.querySelector('main').innerText.includes('config.yaml')")
        assert not seen.complaints
        seen.page.close()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def test_view_without_a_run_names_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view"]) == 2
    assert "found no run; expected run directories, or --demo" in capsys.readouterr().err


def test_view_demo_as_text_names_its_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "--demo", "--text"]) == 0
    assert re.match(r"demo: [a-z ]+, last step logged: \d+\n", capsys.readouterr().out)


def test_the_documents_command_records_a_run(tmp_path: Path) -> None:
    (command,) = run_by("test_the_documents_command_records_a_run")
    words = shlex.split(command)
    assert words[0] == "python"
    make_run(tmp_path / "runs").path.rename(tmp_path / "runs/NAME")
    said = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert said == f"{sum(map(len, contents(tmp_path / 'FOLDER').values())):,} bytes in FOLDER\n"
