"""`marsrl tool` calls one tool with the settings of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from marsrl.trainer.commands.cli import main


def tool(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """(exit status, what it prints, and of errors) of `marsrl tool`."""
    status = main(["tool", *words])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    rows = [{"title": "Lima", "text": "The capital\x1b[2J of Peru.\nA city."}, {"title": "Oslo", "text": "x" * 5000}]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"tools.search.corpus={tmp_path}/corpus.jsonl"


def test_without_a_config_it_calls_the_built_in_world(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = tool(capsys, "search", "home trade", "task_options.people=20", "tools.search.top_k=2")
    assert status == 0 and re.search(r"\ADoc 1\(Title: .*\nDoc 2\(.*\n# \d+\.\d{3} s, 2 parts, whole\n\Z", shown)
    status, shown, _ = tool(capsys, "scholar", "author", "task_options.papers=9")
    assert status == 0 and "Paper 5(Title: " in shown and ", 5 parts, whole\n" in shown


def test_a_text_or_an_object_and_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str], corpus: str) -> None:
    status, shown, _ = tool(capsys, "search", "lima=x", corpus)
    assert status == 0 and shown.startswith("Doc 1(Title: Lima) The capital\ufffd[2J of Peru.\nA city.\n# ")
    status, shown, _ = tool(
        capsys, "search", '{"queries": ["oslo", "lima"]}', corpus, "tools.search.max_output_chars=99"
    )
    assert status == 0 and "of 5,019 characters]\nDoc 2(Title: Lima)" in shown and shown.endswith(" 2 parts, cut\n")
    status, shown, _ = tool(capsys, "search", "[1]", corpus)  # JSON, and no object: a text
    assert status == 0 and shown.startswith("No documents match.\n# ") and shown.endswith(" s, whole\n")


@pytest.mark.parametrize("argument", ["!!", '{"q": "lima"}', '{"queries": []}'])
def test_an_error_is_exit_status_1(capsys: pytest.CaptureFixture[str], corpus: str, argument: str) -> None:
    status, shown, _ = tool(capsys, "search", argument, corpus)
    assert status == 1 and shown.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bing", "x"], "there is no tool 'bing'; there are: search, scholar, visit, python"),
        (["search", "x", "task=math"], "tools.search is not set"),
        (["search", "x", "data.train=questions.jsonl"], "tools.search.corpus is null, and the task has no documents"),
        (["search", "x", "--config", "none.yaml"], "--config none.yaml: no such file"),
    ],
)
def test_settings_that_cannot_be_used_are_exit_status_2(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    status, shown, error = tool(capsys, *words)
    assert status == 2 and not shown and said in error
