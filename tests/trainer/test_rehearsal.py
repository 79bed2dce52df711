"""`marsrl try`: whom a team asks, with made-up answers or those of a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from marsrl.trainer.commands.cli import main
from marsrl.trainer.config.read import read_config
from marsrl.trainer.evaluate.rehearsal import first_update_line

CHAIN = ["--question", "a 3 b *7", "--reference", "1", "rollout.group_size=2"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["try", *words]) == 0, capsys.readouterr().err
    return [line.rstrip() for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]


def test_a_table_answers_call_by_call_and_the_tree_says_what_that_earns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "answers.yaml"
    table.write_text('solver: ["so Answer: 1", "Answer: 2"]\nverifier: ["Verdict: wrong"]\n')
    lines = shown(capsys, *CHAIN, "orchestration=solver_verifier", "credit.normalise=agent", "--answers", str(table))
    assert lines[0] == "a 3 b *7   (answer: 1)"
    right, wrong = (next(i for i, line in enumerate(lines) if f"episode 000001.{n}" in line) for n in (0, 1))
    first = lines[right + 1 : wrong]
    # calls of the Solver: 1 and 2 in the first turn, 1 and 2 again in the second; its four rewards are 1 0 1 0
    assert [line.partition("─ ")[2] for line in first] == [
        "solver:0  'so Answer: 1'  reward 1, advantage +1.00",
        "verifier:0  'Verdict: wrong'  reward 0, advantage -1.00",
        "solver:0  'so Answer: 1'  reward 1, advantage +1.00",
    ]
    assert "solver:0  'Answer: 2'  reward 0, advantage -1.00" in lines[wrong + 1]
    assert "verifier:0  'Verdict: wrong'  reward 1, advantage +1.00" in lines[wrong + 2]


def test_answers_are_made_up_by_the_seed_and_prompts_are_shown_when_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["rollout.group_size=4", "agents.verifier1.pick=random"]
    lines = shown(capsys, *words)
    assert lines == shown(capsys, *words) != shown(capsys, *words, "run.seed=1")
    assert any("verifier1:0" in line for line in lines) and not any("it read:" in line for line in lines)
    told = shown(capsys, *words, "--prompts")
    assert sum("it read:" in line for line in told) == sum("reward" in line for line in lines)


def test_math_is_judged_by_its_own_judge_and_needs_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(
        capsys, "task=math", "orchestration=solver", "rollout.group_size=6",
        "--question", "What is half of one?", "--reference", r"\frac{1}{2}",
    )  # fmt: skip
    said = [line for line in lines if "solver:" in line]
    right = [r"\\frac{1}{2}" in line for line in said]
    assert len(said) == 6 and ["reward 1" in line for line in said] == right and set(right) == {True, False}
    assert main(["try", "task=math", "orchestration=solver"]) == 2
    assert "task=math needs problems: set data.train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("judge: [hm]", "the team has no agent 'judge'; it has solver"),
        ("solver: hm", "expected a table of agents"),
        ("solver: []", "expected a table of agents"),
        ("[solver", "while parsing a flow sequence"),
    ],
)
def test_a_table_that_is_none_is_refused(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answers.yaml").write_text(text)
    assert main(["try", "orchestration=solver", "--answers", str(tmp_path / "answers.yaml")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], []),
        (["rollout.pipeline=trajectory", "orchestration=debate"], []),
        (["orchestration=debate"], ["first update: comes at step 2 of 24"]),
        (["orchestration=debate", "orchestration_options.rounds=4"], ["first update: comes at step 4 of 24"]),
        (["orchestration=debate", "run.steps=1"], ["first update: does not come in run.steps = 1"]),
    ],
)
def test_a_dry_run_knows_at_which_step_the_first_update_comes(words: list[str], line: list[str]) -> None:
    config, _ = read_config(None, words)
    assert [text.partition(",")[0] for text in first_update_line(config)] == line
