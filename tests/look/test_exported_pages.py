"""A run as one file: its contents, and its pages in a real Chromium, which `make test-all` finds or installs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hostile_run import ATTACK
from made_up_run import AGENTS, make_group, make_run, make_sample, make_summary
from playwright.sync_api import Browser
from watched import Watched

from marsrl.commands.look.export import write_report
from marsrl.rollout.types import Sample
from marsrl.trainer.report.samples_log import write_samples
from marsrl.trainer.report.summary import save_summary
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.lock import RunLock

pytestmark = [pytest.mark.slow, pytest.mark.smoke]


def answers_in(page: Path) -> dict[str, Any]:
    """Return the answers in the file, by question."""
    found = re.search(r"window\.EXPORTED = (.*);\n", page.read_text("utf-8"))
    assert found
    content: dict[str, Any] = json.loads(found[1])
    return {key.replace("\n", "?", 1).replace("\n", "&"): value for key, value in content["answers"].items()}


def report_of(run: RunDirectory) -> dict[str, Any]:
    return answers_in(write_report(run.path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of a finished run's report."""
    return report_of(make_run(tmp_path_factory.mktemp("whole")))


def test_model_text_is_data_of_a_script_that_loads_nothing(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path, text=ATTACK).path).read_text("utf-8")
    assert text.count("<script>") == text.count("</script>") == 7  # six libraries, and the pages with their data
    assert "<img src=http" not in text and "1337" not in text
    assert not set(text) & set("\x00\x1b\u2028\u202e") and "\\u27e8U+202E\\u27e9" in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and policy[1].startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy[1]
    assert policy[1].count("'sha256-") == 8 and "connect-src 'none'" in policy[1] and "http" not in policy[1]


def test_a_report_has_every_part_of_the_run(whole: dict[str, Any]) -> None:
    seen = whole["overview?run=0"]
    rows = {row["name"]: row for row in seen["rows"]}
    assert rows["solver"]["after"]["mean"] == pytest.approx(0.88)
    assert not rows["corrector1 breaks a right one"]["is_bar"]
    facts = dict(seen["facts"])
    assert (facts["engine.library"], facts["engine.version"], facts["commit"]) == ("vllm", "0.0-test", "0123abc")
    assert facts["tokens_per_engine"] == "412,345" and seen["num_non_finite"] == 1 and "made-up" in seen["config"]
    assert [each["title"] for each in seen["confusions"]] == ["verifier1 on fixed solutions", "verifier1 in the loop"]
    spans = whole["spans?run=0"]["spans"]
    assert {"engine/0", "rank/0", "sync/main", "reward/0"} <= {span[0] for span in spans}
    assert sum(span[0] == "mark/step" for span in spans) == sum(span[0] == "mark/stage" for span in spans) == 6
    charts = whole["charts?run=0"]
    assert {"Reward", "Entropy", "Time per step"} <= {chart["title"] for chart in charts}
    for chart in charts:  # exactly the questions that the page asks
        names = "&".join(f"name={each['key']}" for each in chart["series"])
        assert len(whole[f"curves?run=0&{names}"]) == len(chart["series"])
    assert len(whole["tree?run=0&rollout=p1.0#0"]) == 20  # the rollout is stored once, not with each of its samples
    assert len(whole["problems?run=0&agent=solver"]["rows"]) == 18
    assert whole["axes?run=0"]["tokens"][:3] == [3000, 6000, 9000]
    for row in whole["samples?run=0"]["rows"]:
        assert whole[f"sample?run=0&step={row['step']}&line={row['line']}"]["row"] == row
    # The rollout is complete, over several steps.
    own = [row for row in whole["samples?run=0"]["rows"] if row["rollout"] == "p1.0#0"]
    assert [(row["agent"], row["step"]) for row in own[::-4]] == [*zip(AGENTS, range(1, 6), strict=True)]


def test_a_run_that_has_not_finished_has_a_page_that_says_so(tmp_path: Path) -> None:
    empty = report_of(RunDirectory.create(tmp_path, "empty", "p"))
    assert empty["overview?run=0"]["summary"] is None and empty["samples?run=0"]["rows"] == []
    unfinished = report_of(make_run(tmp_path, finished=False, num_steps=1))
    assert unfinished["overview?run=0"]["last_step"] == 0 and unfinished["samples?run=0"]["num"] == 12
    run = RunDirectory.create(tmp_path, "blind", "p")
    save_summary(run.summary, make_summary(before=None, after=None))
    assert report_of(run)["overview?run=0"]["rows"] == [] and report_of(run)["overview?run=0"]["summary"]
    save_summary(run.summary, make_summary(before=None))
    seen = report_of(run)["overview?run=0"]
    assert [row["before"] for row in seen["rows"]] == [None] * 5 and len(seen["confusions"]) == 2
    run.summary.write_text("{}")
    assert "is not a run summary" in report_of(run)["overview?run=0"]["why_not"]


def test_a_run_is_running_finished_or_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that wrote its report has finished; a killed one has stopped."""
    run = make_run(tmp_path, num_steps=1)
    lock = RunLock(run)
    assert report_of(run)["runs"][0]["standing"] == "finished"
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert report_of(run)["runs"][0]["standing"] == "running"
    lock.release()
    assert report_of(run)["runs"][0]["standing"] == "finished"
    run.summary.unlink()
    assert report_of(run)["runs"][0]["standing"] == "stopped"
    run.lock.unlink()
    assert report_of(run)["runs"][0]["standing"] == "not finished"


def test_a_parent_that_is_not_there_hides_no_sample(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    write_samples(run, 0, [make_group(make_sample("child", "verifier1", parent_uid="gone", text="x" * 7000))])
    assert [row["uid"] for row in report_of(run)["samples?run=0"]["rows"]] == ["child"]
    assert "1,000 characters left out" in report_of(run)["sample?run=0&step=0&line=1"]["record"]["text"]


def test_a_browser_shows_a_hostile_run_without_complaints(browser: Browser, tmp_path: Path) -> None:
    """Open every page of the file, a sample, a diff and a zoom, without a server or network."""
    file = write_report(make_run(tmp_path, text=ATTACK).path)
    seen = Watched(browser)
    page = seen.page
    page.goto(file.as_uri())
    page.wait_for_selector("svg.bars rect")
    page.get_by_role("link", name="samples").click()
    page.wait_for_selector(".item.here")
    assert "<script>document.title" in page.locator(".side").inner_text()
    page.get_by_role("tab", name="what it changed").click()
    page.wait_for_selector("pre.diff")
    page.get_by_text("its life in the pipeline").click()
    page.wait_for_selector("svg.timeline rect.hot")
    page.get_by_role("button", name="zoom to it").click()
    page.wait_for_url("**low_s=**")
    page.get_by_role("link", name="curves").click()
    page.wait_for_selector(".chart canvas")
    page.get_by_role("link", name="warnings").click()
    page.wait_for_selector("text=metrics that were not finite")
    assert "PWNED" not in page.title() and not seen.complaints and seen.asked == [file.as_uri()]
    assert seen.is_refused_what_is_elsewhere()  # a request to another host would have been noticed


def test_sessions_are_lines_with_branches_below_their_sample(browser: Browser, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    run.write_config({"external": {"function": "my_program.py:run"}, "agents": {"solver": {}, "verifier": {}}})

    def said(agent: str, name: str, parent: str | None = None) -> Sample:
        return make_sample(f"000001.{name}", agent, rollout_id="000001", group_id=agent, parent_uid=parent)

    branch = said("solver", "0/solver#1:0", "000001.0/solver:0")
    solvers = make_group(said("solver", "0/solver:0"), branch, said("solver", "1/solver:0"))
    write_samples(run, 0, [solvers, make_group(said("verifier", "0/verifier:0"))])
    seen = Watched(browser)
    seen.page.goto(write_report(run.path).as_uri())
    seen.page.get_by_role("link", name="samples").click()
    seen.page.wait_for_selector(".tree .line")
    lines = [" ".join(text.split()) for text in seen.page.locator(".tree .line").all_inner_texts()]
    assert lines == ["session 000001.0 solver 1 verifier 1", "solver on solver:0 solver 1", "session 000001.1 solver 1"]
    assert not seen.complaints
