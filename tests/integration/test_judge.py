"""A model judges answers: runs and evaluations in which the judge is a frozen policy or a server, and refused settings."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from completions_server import Handler, completions_server
from letters import NO, YES, answer_in
from scripted_pool import engines_are, on_sevens, saying, train_here

from marsrl.commands.evaluate import evaluate_alone
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.read import ConfigError, read_config
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import read_samples
from marsrl.trainer.report.summary import load_summary
from marsrl.trainer.runs.directory import step_files

pytestmark = [pytest.mark.slow, pytest.mark.smoke]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_model("tiny", "bytes", tmp_path_factory.mktemp("model") / "model")


Say = Callable[[str], str]


@pytest.fixture
def engines(model: Path) -> Iterator[Callable[[Say, Say], object]]:
    """Yield engines(team, judge), which sets the functions that write completions: `team` from a sample's uid, `judge` from the
    judged answer.
    """
    renderer = ChatRenderer(model)

    def says(request: DecodeRequest, team: Say, judge: Say) -> str:
        is_judge = request.uid.startswith("judge/")
        return judge(answer_in(renderer.decode(request.token_ids))) if is_judge else team(request.uid)

    with ExitStack() as stack:
        yield lambda team, judge: stack.enter_context(
            engines_are(saying(model, functools.partial(says, team=team, judge=judge)))
        )


def solve(uid: str) -> str:
    return f"So the answer is \\boxed{{{random.Random(uid).choice(['7', '8', '9'])}}}."


def math_words(tmp_path: Path, model: Path, *more: str) -> list[str]:
    judge = f"policies.judge={{frozen: true, model: {model}}}"
    words = ["orchestration=solver", f"sync.directory={tmp_path}", judge, "judge={policy: judge, when: always}"]
    words += ["rollout.prompts_per_step=4", "rollout.group_size=8", "evaluate.num_problems=4"]
    return on_sevens(tmp_path, model, *words, *more)


def only_8(answer: str) -> str:
    return YES if answer == "8" else NO


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_run_is_trained_and_evaluated_by_what_the_judge_says(
    tmp_path: Path, model: Path, engines: Any, overlap: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With overlap, the judge is behind a server, and it also judges an evaluation outside the run."""
    engines(solve, only_8)
    words = math_words(tmp_path, model, f"rollout.overlap={overlap}", "judge.cache_entries=0")

    def reply(handler: Handler, body: dict[str, Any], before: int) -> None:
        handler.complete(only_8(answer_in(body["prompt"])))

    with completions_server(reply) as server:
        if overlap:
            served = f"{{base_url: '{server.base_url}', model: big, retries: 0, backoff_s: 0.01}}"
            words += ["policies.judge.engine=openai", f"policies.judge.openai={served}"]
        train_here(tmp_path, [*words, "run.steps=2"])
        run = train_here(tmp_path, [*words, "run.steps=3", "run.resume=auto"])
        if overlap:
            capsys.readouterr()
            evaluate_alone(*read_config(None, words, trains=False), tmp_path / "evaluated", resume=str)
            found, shown = json.loads((tmp_path / "evaluated/evaluation.json").read_text()), capsys.readouterr().err
            assert found["judge"]["policy"] == "judge" and found["judge"]["calls"] == 4 and "judge (judge)" in shown
            assert found["system"]["mean"] == found["judge"]["yes_share"]
            assert all(body["temperature"] == 0 and body["max_tokens"] == 1024 for body in server.bodies)
        assert bool(server.bodies) == bool(overlap)
    steps = [list(read_samples(path)) for path in step_files(run.samples).values()]
    samples = [sample for step in steps for sample in step]
    assert len({r.uid for r in samples}) == len(samples) == 3 * 32
    assert all(r.reward == (r.answer == "8") for r in samples)  # the task says 7 is right
    rows = read_metrics(run.metrics)
    assert [row.step for row in rows] == [1, 2, 3]
    for row, of_step in zip(rows, steps, strict=True):
        values = row.values
        assert values["judge/missing_share"] == 0
        if overlap == 0:  # with overlap, some samples are judged before the step that trains them
            judged = [r.answer for r in of_step]
            assert values["judge/calls"] == len(judged)
            assert values["judge/yes_share"] == pytest.approx(judged.count("8") / len(judged))
            assert values["judge/agreement"] == pytest.approx(judged.count("9") / len(judged))
    summary = load_summary(run.summary)
    assert summary.after is not None and summary.after.judge is not None
    judged = summary.after.judge
    assert (judged.policy, judged.calls, judged.missing) == ("judge", 4, 0)
    assert judged.yes_share == summary.after.system.mean and len(summary.tokens_per_engine) == 2


def test_an_unreadable_judge_stops_the_run_with_its_output(tmp_path: Path, model: Path, engines: Any) -> None:
    engines(solve, lambda answer: "correct: yes" if answer == "7" else "\x1b[2Jwho knows?")
    with pytest.raises(RuntimeError) as caught:
        train_here(tmp_path, math_words(tmp_path, model, "run.steps=3", "run.evaluate=false", "judge.retries=0"))
    said = str(caught.value)
    assert said.startswith("step 1: the judge (judge.policy=judge) did not judge ") and "\x1b" not in said
    assert "judge.max_missing_share = 0.2; the last reason: no line `correct:`: '\\x1b[2Jwho knows?'" in said
    (row,) = read_metrics(tmp_path / "runs" / "scripted" / "metrics.jsonl")
    assert row.values["judge/missing"] == row.values["reward/solver/missing"] > 0  # the user finds the metrics on disk


OPEN = """
from marsrl.rollout.tasks.own_task import OwnTask
class Open(OwnTask):
    def problems(self):
        return [(f'Question {i}?', str(i) if i < 5 else None) for i in range(40)]
    def held_out(self):
        return [(f'Held out {i}?', None) for i in range(4)]
class Half(Open):
    def held_out(self):
        return [('a?', None), ('b?', 'b')]
"""


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("judge.max_response_tokens=1000000", "judge.max_response_tokens is 1000000, but policies.judge.model has"),
        ("judge=null", "policies.judge: no agent .* and no judge .* uses it; remove it"),
    ],
)
def test_a_judge_must_fit_its_model_and_be_used(word: str, message: str, tmp_path: Path, model: Path) -> None:
    with pytest.raises(ValueError, match=message):
        preflight(read_config(None, math_words(tmp_path, model, word))[0], world_size=1)


def test_unjudged_problems_and_unasked_forms_are_warned_of(tmp_path: Path, model: Path) -> None:
    task = tmp_path / "open_task.py"
    task.write_text(OPEN)
    words = [word for word in math_words(tmp_path, model) if not word.startswith(("task=", "data."))]
    with pytest.raises(ConfigError, match="none of the 4 problems of held_out has one; add them"):
        preflight(read_config(None, [*words, "preset=math_default", f"task={task}:Open"])[0], world_size=1)
    checked = preflight(read_config(None, [*words, f"task={task}:Half"])[0], world_size=1)
    told = [warning for warning in checked.warnings if "reference" in warning]
    assert [told[0][:28], told[1][:28]] == ["35 of 40 problems of problem", "1 of 2 problems of held_out "]
    in_evaluation = preflight(read_config(None, [*words, f"task={task}:Half", "judge.when=evaluate"])[0], world_size=1)
    assert sum("reference" in warning for warning in in_evaluation.warnings) == 1
    (tmp_path / "bare.yaml").write_text('answer: boxed\nturns: {solver: [user: "{problem}"]}\n')
    words += [f"task={task}:Half", f"agents.solver.prompt={tmp_path}/bare.yaml"]
    assert any(
        "its answer, \\boxed{...}, in 40 of 40" in each for each in preflight(read_config(None, words)[0], 1).warnings
    )
    assert not any("the form" in warning for warning in checked.warnings)
