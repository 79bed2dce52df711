"""Access to the viewer, the content policy of its pages, and a run on the terminal."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documented_commands import run_by
from fastapi.testclient import TestClient

from marsrl.commands.cli import main
from marsrl.commands.look.api import MOST_CHARS, Api, differences
from marsrl.commands.look.export import PAGES
from marsrl.commands.look.server import make_app
from marsrl.trainer.runs.directory import RunDirectory


@pytest.fixture
def stranger(runs: list[Path]) -> TestClient:
    return TestClient(make_app(runs, "secret"), base_url="http://127.0.0.1:1234")


def test_requests_without_the_token_are_refused(stranger: TestClient) -> None:
    for path in ("/", "/api/runs", "/?token=guess", "/?token=", "/nowhere"):
        assert stranger.get(path).status_code == 403
    shown = stranger.get("/?page=curves&token=secret&words=1", follow_redirects=False)
    assert (shown.status_code, shown.headers["location"]) == (303, "/?page=curves&words=1")
    assert {"HttpOnly", "SameSite=strict"} <= set(shown.headers["set-cookie"].split("; "))
    assert stranger.get("/api/runs").status_code == stranger.get("/").status_code == 200
    assert stranger.post("/api/runs").status_code == 405 and stranger.get("/api/nothing").status_code == 404


def test_a_foreign_host_name_is_rejected_even_with_the_token(stranger: TestClient) -> None:
    """DNS rebinding: a page of another site whose name resolves to 127.0.0.1."""
    for host in ("example.com", "127.0.0.1.example.com", ""):
        assert stranger.get("/?token=secret", headers={"host": host}, follow_redirects=False).status_code == 400
    assert stranger.get("/?token=secret", headers={"host": "localhost:99"}, follow_redirects=False).status_code == 303


def test_every_answer_forbids_what_the_pages_do_not_need(stranger: TestClient) -> None:
    for path in ("/api/runs", "/?token=secret", "/", "/nowhere", "/api/samples?run=x"):
        headers = stranger.get(path, follow_redirects=False).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-") and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"


def test_the_documents_commands_view_a_run(runs: list[Path], tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / "runs").mkdir()
    for command in run_by("test_the_documents_commands_view_a_run"):
        words = shlex.split(command)
        if not words[2].startswith("--") and not (tmp_path / words[2]).exists():
            (tmp_path / words[2]).symlink_to(runs[1])
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
        assert process.stdout is not None
        said = process.stdout.readline()
        if "--text" in words:
            assert said == "made-up: not finished, last step logged: 2\n"
        else:
            assert said.startswith("open http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(300) == 0, command


def test_what_cannot_be_answered_says_why(stranger: TestClient) -> None:
    stranger.get("/?token=secret")
    for path, reason in (
        ("samples?run=7", "run is 7; expected a number from 0 to 1"),
        ("samples?run=0&low=nan", "finite number"),
        *((f"samples?run=0&before={at}", "expected step.line") for at in ("1", "1.", "x.1", "1.x", f"1.{10**18}")),
        ("samples?run=0&flag=bad", "is not a filter"),
        ("samples?run=0&words=%2B-", "no letter or digit"),
        ("samples?run=0&nothing=1", "cannot be read"),
        ("sample?run=0&step=1&line=1", "has not been read yet"),
    ):
        answer = stranger.get(f"/api/{path}")
        assert answer.status_code == 400 and reason in answer.json()["detail"]


def test_the_libraries_are_those_that_were_published(stranger: TestClient) -> None:
    row = r"^\| (\S+) \|.*LICENSE\.(\w+) \| (\w{64}) \|$"
    listed = re.findall(row, (PAGES / "vendor" / "VERSIONS.md").read_text(), re.M)
    assert {name for name, _, _ in listed} == {path.name for path in (PAGES / "vendor").glob("*.*s")}
    for name, licence, digest in listed:
        assert hashlib.sha256((PAGES / "vendor" / name).read_bytes()).hexdigest() == digest
        assert (PAGES / "vendor" / f"LICENSE.{licence}").read_text()


def test_a_diff_marks_words_and_leaves_what_both_have() -> None:
    changed = [("=", "same\nx is "), ("-", "3"), ("+", "4"), ("=", ".\n")]
    assert differences("same\nx is 3.\n", "same\nx is 4.\n") == changed
    assert differences("a" * (MOST_CHARS + 1), "a") is None
    assert differences("a" * MOST_CHARS, "a" * MOST_CHARS) == [("=", "a" * MOST_CHARS)]


@pytest.fixture
def ask(runs: list[Path]) -> Callable[..., Any]:
    """Return ask(question, **parameters), which returns the viewer's answer."""
    api = Api(runs)
    for catalog in api.catalogs:
        catalog.refresh(None)
    return lambda question, **asked: api.questions[question](**asked)


def test_tokens_are_the_kept_ones_or_the_nearest_readable(ask: Callable[..., Any]) -> None:
    found = ask("tokens", run=0, step=6, line=3)
    kept, near = found["kept"], found["near"]["samples"]
    assert kept["segments"] == [[0, 40, 4], [40, 80, 5], [80, 120, 6]] and kept["given"] == [*range(110, 120)]
    marks = [kept[name] for name in ("clipped", "gated", "masked")]
    assert marks == [[*range(1, 110, 4)], [*range(2, 110, 4)], [i for i in range(110) if i % 4 > 1]]
    assert (kept["trainer"][7], kept["entropy"][7], kept["trainer"][110]) == (-0.7, 0.35, None)
    assert "".join(kept["text"]) == ask("sample", run=0, step=6, line=3)["record"]["text"] and len(kept["text"]) == 120
    assert [each["line"] for each in near] == [3, 1]  # samples of the same agent come first
    # Step 0 is nearer to step 1, but its file is damaged.
    assert ask("tokens", run=0, step=1, line=1) == {"kept": None, "near": {"step": 6, "samples": near[::-1]}}
    with pytest.raises(ValueError, match="step_0.parquet is not a token log"):
        ask("tokens", run=0, step=0, line=1)
    assert ask("tokens", run=1, step=1, line=1) == {"kept": None, "near": None}


def test_only_a_repair_is_compared_with_its_solution(ask: Callable[..., Any]) -> None:
    diffs = [ask("sample", run=0, step=6, line=line)["diff"] for line in (1, 2, 3, 4)]
    # Without a diff: an answer, a verdict, and a sample that is its own parent. The third line has a diff without parts: its text
    # is too long.
    assert [each and (each["of"]["line"], each["parts"]) for each in diffs] == [None, None, (1, None), None]
    row = next(row for row in ask("samples", run=1)["rows"] if row["agent"] == "corrector1")
    found = ask("sample", run=1, step=row["step"], line=row["line"])
    solution = found["diff"]["of"]
    assert (solution["agent"], solution["rollout"]) == ("solver", row["rollout"])
    text = ask("sample", run=1, step=solution["step"], line=solution["line"])["record"]["text"]
    assert "".join(each for kind, each in found["diff"]["parts"] if kind != "+") == text


def test_a_page_of_samples_begins_where_it_is_asked_to(ask: Callable[..., Any]) -> None:
    lines = [ask("samples", run=1, **{place: "1.3"})["rows"][0]["line"] for place in ("before", "through")]
    assert lines == [2, 3] and ask("samples", run=1, through="1.999") == ask("samples", run=1)  # there is no 1.999


def test_a_hostile_run_steers_no_terminal(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", *map(str, runs), "--text"]) == 0
    shown = capsys.readouterr().out
    assert not re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    assert "␛" in shown and "⟨U+202E⟩" in shown.replace("\n", "")
    assert "last step logged: 5" in shown and "not finished, last step logged: 2" in shown
    assert re.search(r"reward/solver/mean +│ +0.2727 │ +0.4545│", shown) and re.search(
        r"corrector1/mean +│ +– │ +0.75│", shown
    )
    assert shown.count("mpt/fraction_masked") == 2  # once for each run
    assert "│   └── verifier1, 4 samples" in shown  # below the solution that it reads
    assert "says wrong" in shown and "is not a file of samples" in shown and "reward/solver/mean" in shown


def test_a_terminal_shows_the_last_twenty_warnings_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    run.warnings.write_text("".join(f'{{"step": {i}, "text": "slow"}}\n' for i in range(30)))
    assert main(["view", str(run.path), "--text"]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    run.write_config({})
    assert main(["view", str(run.path), "--text"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"warning: step {i}: slow" for i in range(10, 30)]
