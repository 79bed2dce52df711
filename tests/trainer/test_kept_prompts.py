"""Prompt files in a run: found as other paths are, kept with it, the same when it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.evaluate.identity import team_identity
from marsrl.trainer.main import main
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.existing_run import resume_lines
from marsrl.trainer.runs.kept_prompts import keep_prompts, with_kept_prompts

WORDS = 'answer: answer_word\nturns:\n  solver:\n    - user: "{problem} SAY"\n'


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "words.yaml"
    path.parent.mkdir()
    path.write_text(WORDS)
    return path


def settings(*given: str) -> RunConfig:
    return read_config(None, ["orchestration=solver", "run.resume=auto", "run.name=a", *given])[0]


def begun(folder: Path, config: RunConfig) -> RunDirectory:
    run = RunDirectory.create(folder, "a", "p")
    keep_prompts(run, config)
    run.write_config(with_kept_prompts(config).model_dump(mode="json"))
    run.metrics.write_text("{}\n")
    return run


def test_a_run_keeps_its_prompts_and_is_gone_on_with_and_evaluated_in_them(words: Path, tmp_path: Path) -> None:
    config = settings(f"agents.solver.prompt={words}")
    run = begun(tmp_path / "runs", config)
    kept = yaml.safe_load(run.config.read_text())["agents"]["solver"]["prompt"]
    assert (run.path / kept).read_text() == WORDS and not Path(kept).is_absolute()
    assert len(resume_lines(run, config, {})) == 1  # nothing differs
    moved = run.path.rename(tmp_path / "moved")
    words.unlink()
    again = read_config(moved / "config.yaml")[0]
    assert Path(again.agents["solver"].prompt or "").read_text() == WORDS
    assert len(resume_lines(RunDirectory(moved), again, {})) == 1
    assert with_kept_prompts(again).agents["solver"].prompt == kept


def test_a_run_does_not_go_on_with_a_file_that_has_changed_but_with_one_of_another_name(
    words: Path, tmp_path: Path
) -> None:
    config = settings(f"agents.solver.prompt={words}")
    run = begun(tmp_path / "runs", config)
    words.write_text(WORDS.replace("SAY", "TELL"))
    (kept,) = (run.path / "prompts").iterdir()
    said = rf"cannot go on with other agents.solver.prompt \(the file has changed; .*{kept}"
    with pytest.raises(ValueError, match=said):
        resume_lines(run, config, {})
    other = words.rename(words.with_name("other.yaml"))
    _, differs = resume_lines(run, settings(f"agents.solver.prompt={other}"), {})
    assert f"agents.solver.prompt prompts/{kept.name} -> prompts/other-" in differs
    assert len(resume_lines(run, settings(f"agents.solver.prompt={kept}"), {})) == 1


def test_answers_are_told_apart_by_the_words_of_a_file_and_not_by_its_place(words: Path) -> None:
    copy = words.with_name("copy.yaml")
    copy.write_text(WORDS)
    one, other = (settings(f"agents.solver.prompt={path}") for path in (words, copy))
    before = team_identity(one)
    assert before == team_identity(other)
    words.write_text(WORDS.replace("SAY", "TELL"))
    assert before != team_identity(one)


def test_a_dry_run_refuses_a_file_in_one_line_that_says_who_names_it(
    words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (words.parent / "run.yaml").write_text("orchestration: solver\nagents:\n  solver: {prompt: words.yaml}\n")
    words.write_text(WORDS.replace("user", "usr"))
    for said in ("words.yaml:4: unknown key usr", "words.yaml: No such file or directory"):
        assert main(["--dry-run", "--config", str(words.parent / "run.yaml")]) == 2
        told = capsys.readouterr().err.splitlines()
        assert f"agents.solver.prompt: {words.parent}/{said}" in told[0]
        assert f"(agents.solver.prompt: {words.parent}/run.yaml:3)" in told[0]
        words.unlink(missing_ok=True)
