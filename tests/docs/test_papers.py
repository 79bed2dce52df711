"""Every number of a paper equals the number in its preset, or papers.yaml gives the reason; docs/papers.md lists them all."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_commands import run_by
from documents import ROOT

from marsrl.trainer.config.keys import all_keys, as_key
from marsrl.trainer.config.read import CONFIGS, preset_names
from marsrl.trainer.runs.existing_run import flat

_spec = importlib.util.spec_from_file_location("papers", ROOT / "docs" / "papers.py")
assert _spec is not None and _spec.loader is not None
papers = sys.modules["papers"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(papers)

PAPERS = papers.papers()
MINIATURES = {name for name in preset_names() if name.startswith("cpu_")}
# Settings that describe the machine, or that a paper leaves open. No table contains them.
MACHINE = re.compile(
    r"(run|task|task_options|data|orchestration|trainer\.max_tokens_per_micro_batch|agents\.<name>\.prompt"
    r"|policies\.main\.(dtype|layout|recompute|optimizer\.offload)|tools\.(pages|python)"
    r"|tools\.(search|scholar)\.(kind|url|timeout_s|request_timeout_s|concurrency|max_output_chars)"
    r"|rollout\.(vllm|engine|placement|engines|ray_address|max_unfinished|deadline_s|object_store_mib|group_completion)"
    r")(\..*)?"
)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.preset)
def test_a_preset_has_the_papers_numbers_or_a_reason(paper: Any) -> None:
    config = paper.config(paper.preset)
    for row in paper.rows:
        ours = papers.value_of(config, row.key)
        is_the_papers = row.value is not None and row.value == ours
        assert is_the_papers != bool(row.why), f"{row.key}: the paper's {row.value}, ours {ours}, reason {row.why!r}"


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.preset)
def test_presets_of_one_paper_differ_only_in_rows_with_a_reason(paper: Any) -> None:
    first, others = paper.config(paper.preset), [paper.config(other) for other in paper.others]
    differing = {
        row.key
        for row in paper.rows
        if any(papers.value_of(each, row.key) != papers.value_of(first, row.key) for each in others)
    }
    assert differing == set(paper.whys)


def test_every_preset_is_of_a_paper_and_every_key_is_a_setting() -> None:
    named = [preset for paper in PAPERS for preset in (paper.preset, *paper.others)]
    assert sorted(named) == sorted(set(preset_names()) - MINIATURES)
    known = {*all_keys(), "orchestration_options.max_loops", "orchestration_options.max_turns"}
    for paper in PAPERS:
        keys = [row.key for row in paper.rows]
        assert len(keys) == len(set(keys))
        assert {key if key in known else as_key(key.split(".")) for key in keys} <= known


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.preset)
def test_what_a_preset_sets_is_in_its_table(paper: Any) -> None:
    rows = {row.key for row in paper.rows}
    settings = flat(yaml.safe_load((CONFIGS / f"{paper.preset}.yaml").read_text("utf-8")))
    written = [re.sub(r"(?<=\.template_options)\..*", "", key) for key in settings]
    names = [{key, as_key(key.split("."))} for key in written]
    missing = [each for each in names if not each & rows and not any(map(MACHINE.fullmatch, each))]
    assert not missing, "give each a row of docs/papers.yaml"


@pytest.mark.parametrize("command", run_by("test_the_command_writes_the_page"))
def test_the_command_writes_the_page(command: str, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("papers.py", "papers.yaml"):
        shutil.copy(ROOT / "docs" / name, docs)
    words, _, _ = papers.PAGE.read_text("utf-8").partition(papers.HEADING)
    (docs / "papers.md").write_text(words)
    # A new process would import everything again.
    runpy.run_path(str(tmp_path / command.split()[1]), run_name="__main__")
    assert (docs / "papers.md").read_text("utf-8") == papers.PAGE.read_text("utf-8")
