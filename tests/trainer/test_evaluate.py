"""Evaluation of scripted teams whose results are known in advance."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import EvaluateConfig
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.state import decode, encode
from marsrl.rollout.tasks.arithmetic import Chain
from marsrl.rollout.tasks.data import one_spaced
from marsrl.rollout.tasks.problem_files import HeldOut
from marsrl.trainer.checks.preflight import Checked, preflight
from marsrl.trainer.config.read import read_config
from marsrl.trainer.evaluate.draws import Draw, Kept, Said, read_draws
from marsrl.trainer.evaluate.evaluator import Evaluator, FixedInputs
from marsrl.trainer.evaluate.score import Scorer, at_k, eval_metrics, majorities, pass_at
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.summary import Evaluation

Script = Callable[[DecodeRequest, ChatRenderer, Random], str]
VERSIONS = {"main": 0}
CONFIG = EvaluateConfig(num_problems=40, accept_after=1, max_iterations=4, fixed_inputs=20, temperature=1.0, top_p=1.0)


def answer_of(words: list[str], start: int = 1, end: str = "<|assistant|>") -> str:
    """Return the right answer to the problem that a prompt's words state from `start` to `end`.

    The defaults fit the prompts of Solvers and Correctors.
    """
    chain = words[start : words.index(end)]
    return Chain(int(chain[1]), tuple(chain[3::2])).answer


def words_of(request: DecodeRequest, renderer: ChatRenderer) -> list[str]:
    return renderer.decode(request.token_ids).replace("\n", " \n ").split(" ")


def is_verifier(request: DecodeRequest) -> bool:
    return request.uid.rpartition("/")[2].startswith("verifier")


def is_solver(request: DecodeRequest) -> bool:
    return request.uid.endswith("/solver:0")


def critics(*, err: bool) -> Script:
    """Return a script with a Solver that is right half of the time, and Verifiers and Correctors that never err.

    err: the Verifiers flag every answer, and the Correctors change it to a wrong one.
    """

    def say(request: DecodeRequest, renderer: ChatRenderer, rng: Random) -> str:
        words = [w for w in words_of(request, renderer) if w]
        if is_verifier(request):
            right, claimed = answer_of(words, 3, "\n"), words[-2]
            return f"said {claimed} Verdict: {'correct' if right == claimed and not err else 'wrong'}"
        right = answer_of(words)
        is_right = rng.random() < 0.5 if is_solver(request) else not err
        return f"Answer: {right if is_right else (int(right) + 1) % 10}"

    return say


perfect_critics = critics(err=False)


@pytest.fixture
def evaluator(scripted_team: Any, tmp_path: Path) -> Callable[..., Evaluator]:
    """Return a function evaluator(script, config) that builds an evaluator with a scripted team."""

    def make(script: Script, config: EvaluateConfig = CONFIG, **more: Any) -> Evaluator:
        team, _, task = scripted_team(tmp_path, script=script, evaluate=config, **more)
        return Evaluator(team, config, task, max_tokens=40, seed=0)

    return make


def test_perfect_critics_make_a_mediocre_solvers_team_perfect(evaluator: Any) -> None:
    judged = evaluator(perfect_critics)
    fixed = judged.collect_inputs(VERSIONS)
    result = judged.evaluate(VERSIONS)
    assert len(fixed.inputs["verifier1"]) == 20
    assert encode(decode(FixedInputs, encode(fixed))) == encode(fixed)
    # There is no row for corrector2, because no solution is rejected twice.
    assert list(result.rows) == ["solver", "verifier1", "corrector1", "verifier2", "alone", "system"]
    assert 0.2 < (result.agents["solver"].mean or 0) < 0.8
    assert result.agents["solver"].n == 40
    assert result.agents["verifier1"].mean == 1.0
    confusion = result.agents["verifier1"].confusion
    assert confusion is not None and confusion.right_correct == confusion.wrong_wrong == 10
    corrector = result.agents["corrector1"]
    # The Corrector gets no right solution.
    assert corrector.mean == 1.0 and corrector.breaks is not None and corrector.breaks.n == 0
    assert result.agents["verifier2"].confusion is None and result.agents["verifier2"].loop_confusion is not None
    assert result.system.mean == 1.0


def test_a_verifier_flagging_everything_scores_at_chance(evaluator: Any) -> None:
    judged = evaluator(critics(err=True))
    judged.collect_inputs(VERSIONS)
    result = judged.evaluate(VERSIONS)
    verifier = result.agents["verifier1"]
    assert verifier.mean == 0.5 and result.agents["corrector1"].mean == 0.0
    assert verifier.detection_recall is not None and verifier.detection_recall.mean == 1.0
    assert verifier.detection_precision is not None and 0.2 < (verifier.detection_precision.mean or 0) < 0.8
    breaks = result.agents["corrector1"].breaks
    assert breaks is not None and breaks.mean == 1.0
    # Nothing is accepted; the earliest of equal solutions counts.
    assert result.system.mean == result.agents["solver"].mean
    loops = [result.agents[name].loop_confusion for name in ("verifier1", "verifier2")]
    # four Verifier calls a problem
    assert sum(each.right_wrong + each.wrong_wrong for each in loops if each is not None) == 40 * 4


def test_a_solver_alone_is_the_system_without_fixed_inputs(evaluator: Any) -> None:
    with_critics = evaluator(perfect_critics)
    solver_alone = build_orchestration("solver", {}, with_critics.task.prompts)
    judged = replace(with_critics, team=replace(with_critics.team, orchestration=solver_alone))
    assert judged.collect_inputs(VERSIONS) == FixedInputs()
    alone = judged.evaluate(VERSIONS)
    assert list(alone.rows) == ["solver", "alone", "system"]
    solver = alone.agents["solver"]
    assert solver.model_dump(include={"mean", "low", "high", "n"}) == alone.system.model_dump()
    assert solver == with_critics.evaluate(VERSIONS).agents["solver"]
    assert Evaluation.model_validate_json(alone.model_dump_json()) == alone


def test_a_missing_verdict_is_an_error_not_an_acceptance(evaluator: Any) -> None:
    def mute(request: DecodeRequest, renderer: ChatRenderer, rng: Random) -> str:
        return "= =" if is_verifier(request) else f"Answer: {answer_of(words_of(request, renderer))}"

    judged = evaluator(mute)
    judged.collect_inputs(VERSIONS)
    result = judged.evaluate(VERSIONS)
    verifier = result.agents["verifier1"]
    assert verifier.n == 0 and verifier.mean is None  # the Solver is never wrong, so the fixed inputs have one class
    assert verifier.confusion is not None and verifier.confusion.none == 10
    assert verifier.loop_confusion is not None and verifier.loop_confusion.none > 0
    form = "have no verdict in the form Verdict: correct or Verdict: wrong"
    assert result.notes == (
        f'100 % of verifier1\'s completions (50 of 50) {form}; one ends "= ="',  # 10 on the fixed inputs
        f'100 % of verifier2\'s completions (120 of 120) {form}; one ends "= ="',
    )
    assert verifier.missing == 1 and result.agents["solver"].missing == 0
    metrics = eval_metrics(result)
    assert metrics["eval/verifier1/missing"] == 1 and metrics["eval/solver/missing"] == 0


def test_failed_and_unknown_draws_are_noted_with_a_reason() -> None:
    """The team's own metrics are means over draws that did not fail, because failed ones have none."""
    why = "the program failed: Traceback:\n  line 3\nValueError: no\n"
    ended = ((1.0, {"calls": 3.0}, ""), (0.0, {}, why), (None, {"calls": 1.0}, ""), (0.0, {}, why))
    draws = [
        Draw(
            of="", problem="p", question=f"q{i}", system=Said(correct=it), alone=None, calls=[], team=team, error=error
        )
        for i, (it, team, error) in enumerate(ended)
    ]
    result = Scorer((), {}).evaluation(draws, {})
    assert (result.system.n, result.system.mean, result.team) == (3, pytest.approx(1 / 3), {"calls": 2.0})
    assert result.notes == (
        "2 of 4 draws failed and count as wrong; the first: ValueError: no",
        "1 of 4 draws have no known correctness and are left out",
    )
    assert Scorer((), {}).evaluation(draws[:1], {}).notes == ()


def test_prompts_too_long_count_as_wrong_and_cut_ones_are_asked(evaluator: Any) -> None:
    asked: list[int] = []

    def script(request: DecodeRequest, renderer: ChatRenderer, rng: Random) -> str:
        asked.append(len(request.token_ids)) if is_solver(request) else None
        return "Answer: 1"

    judged = evaluator(script)
    agents: Any = judged.team.agents
    agents["solver"] = agents["solver"].model_copy(update={"max_input_tokens": 2})
    result = judged.evaluate(VERSIONS)
    solver = result.agents["solver"]
    assert (solver.mean, solver.n, result.system.mean, asked) == (0, 40, 0, [])
    agents["solver"] = agents["solver"].model_copy(update={"max_input_tokens": 8, "long_prompts": "cut_left"})
    solver = judged.evaluate(VERSIONS).agents["solver"]
    assert asked == [8] * solver.n and solver.n == 40 and solver.mean is not None and solver.mean > 0


def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_draw() -> None:
    for n, c in ((5, 2), (6, 0), (4, 4), (7, 1)):
        found = pass_at(n, c, [1, 2, 3, 9])
        for k in (1, 2, 3):
            choices = list(combinations([True] * c + [False] * (n - c), k))
            assert found[k] == pytest.approx(sum(map(any, choices)) / len(choices))
        assert math.isnan(found[9])


def answered(answer: str | None, correct: float | None = 0.0, tokens: int = 10) -> Said:
    return Said(correct=correct, answer=answer, tokens=tokens)


def test_the_majoritys_answer_counts_and_ties_share() -> None:
    right = answered("7", 1.0)
    assert majorities([right, right, answered("8")], [3])[3][0] == 1
    # White space does not make another answer.
    assert majorities([right, answered(" 8"), answered("8 ")], [3])[3][0] == 0
    assert majorities([right, answered("8")], [2])[2][0] == 0.5
    # Two spellings of the right answer count as one answer.
    assert (
        majorities([answered("7", 1.0), answered("7.0", 1.0), answered("8"), answered("8"), answered("9")], [5])[5][0]
        == 0.5
    )
    assert majorities([right, answered(None), answered(None)], [3])[3][0] == 1  # samples without an answer do not vote
    assert majorities([answered(None)] * 2, [2])[2][0] == 0
    assert math.isnan(majorities([right], [2])[2][0])
    # Two of {7, 7, 8} are drawn: a third of the pairs agree on 7; in the others, one of the two answers is right.
    assert majorities([right, right, answered("8")], [2])[2][0] == pytest.approx(1 / 3 + 2 / 3 / 2, abs=0.1)
    # One draw is its own majority, also if there are more draws than orders.
    assert majorities([right, answered("8"), answered("9")], [1])[1] == pytest.approx((1 / 3, 1 / 3))
    assert majorities([right, answered("8")] * 50, [1])[1] == pytest.approx((0.5, 0.5), abs=0.2)


def test_unjudged_draws_are_left_out_and_single_draws_have_no_k() -> None:
    assert at_k({"p": [answered("7", 1.0)], "q": [answered("8")]}).pass_at == {}
    found = at_k({"p": [answered("7", 1.0), answered("8")], "q": [answered("7", 1.0), answered("8", None)]})
    assert found.pass_at[2].mean == 1.0 and found.pass_at[2].n == 1  # problem q has only one draw
    assert found.pass_at[1].mean == 0.75


def counting(asked: list[str]) -> Script:
    def counted(request: DecodeRequest, renderer: ChatRenderer, rng: Random) -> str:
        asked.append(request.uid)
        return perfect_critics(request, renderer, rng)

    return counted


SMALL = CONFIG.model_copy(update={"num_problems": 8, "repeat": 2, "fixed_inputs": 4})


def test_kept_draws_are_reused_only_for_one_version_and_team(evaluator: Any, tmp_path: Path) -> None:
    asked: list[str] = []
    judged = evaluator(counting(asked), SMALL)
    with Kept(tmp_path / "kept") as kept:
        found = judged.evaluate(VERSIONS, kept=kept)
        num_asked = len(asked)
        assert judged.evaluate(VERSIONS, kept=kept) == found and len(asked) == num_asked  # also the latency is kept
        assert judged.num_kept({"main": 1}, kept) == (0, 16)
        assert replace(judged, identity={"team": "another"}).num_kept(VERSIONS, kept) == (0, 16)
        more = replace(judged, config=SMALL.model_copy(update={"repeat": 3}))
        assert more.num_kept(VERSIONS, kept) == (16, 24)


def test_draws_hold_texts_and_files_without_them_are_read(evaluator: Any, tmp_path: Path) -> None:
    judged = evaluator(perfect_critics, SMALL)
    with Kept(tmp_path) as kept:
        judged.collect_inputs(VERSIONS, kept=kept)
        evaluation = judged.evaluate(VERSIONS, kept=kept)
        assert not any(draw.prompts for draw in kept.draws.values())  # prompts are kept only on disk
    file = tmp_path / "draws.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for draw in (line["answer"] for line in lines):
        read = [draw["prompts"][call["prompt"]] for call in draw["calls"]]
        assert len(set(draw["prompts"])) == len(draw["prompts"]) == len(set(read))
        assert draw["calls"][0]["text"].startswith("Answer: ") and "<|user|>" in read[0], read
        assert draw["calls"][0]["text"].split()[1] in read[1].split()  # its verifier's prompt
    for line in (tmp_path / "fixed_answers.jsonl").read_text().splitlines():
        fixed = json.loads(line)["answer"]
        assert fixed["call"]["text"] and len(fixed["prompts"]) == 1 and fixed["call"]["prompt"] == 0
    for line in lines:
        del line["answer"]["prompts"]
        line["answer"]["calls"] = [
            {name: value for name, value in call.items() if name not in ("is_read", "prompt", "text")}
            for call in line["answer"]["calls"]
        ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))  # like files of versions that saved no texts
    with Kept(tmp_path) as kept:
        old = judged.evaluate(VERSIONS, kept=kept)
    assert old.system == evaluation.system and old.agents["solver"].missing is None and old.notes == ()


def test_progress_names_agent_and_round_and_counts_kept_draws(evaluator: Any) -> None:
    judged, reported = evaluator(critics(err=True), SMALL), list[tuple[int, int, int, str]]()
    kept = Kept()
    judged.collect_inputs(VERSIONS, lambda *progress: reported.append(progress), kept)
    assert {total for _, total, _, _ in reported} == {12} and reported[-1][0] == 12
    assert judged.ended(VERSIONS, kept) == "12 of 12 episodes for fixed inputs, 0 of 16 draws"
    reported.clear()
    first = replace(judged, config=SMALL.model_copy(update={"repeat": 1}))
    first.evaluate(VERSIONS, lambda *progress: reported.append(progress), kept)
    numbered = [
        re.fullmatch(r"(\w+), (round \d+|fixed inputs): (\d+) of (\d+) calls|", calls) for *_, calls in reported
    ]
    assert all(numbered) and {("verifier1", "round 1"), ("verifier2", "round 3")} < {
        progress.group(1, 2) for progress in numbered if progress
    }
    assert all(int(progress[3]) < int(progress[4]) for progress in numbered if progress and progress[1])
    assert reported[-1][:2] == (8, 8) and reported[-1][3] == ""
    assert [tokens for _, _, tokens, _ in reported] == sorted(tokens for _, _, tokens, _ in reported) and reported[-1][
        2
    ] > 100
    reported.clear()
    judged.evaluate(VERSIONS, lambda *progress: reported.append(progress), kept)
    assert (
        reported[-1][:2] == (16, 16)
        and min(over for over, *_ in reported) >= 8
        and {total for _, total, *_ in reported} == {16}
    )


def test_a_draw_that_an_engine_gave_up_is_not_kept(evaluator: Any, tmp_path: Path) -> None:
    def fail(request: DecodeRequest) -> str | None:
        return "on fire" if request.uid.startswith("eval00000.0/") else None

    judged = evaluator(perfect_critics, SMALL, fail=fail)
    with Kept(tmp_path / "kept") as kept:
        assert judged.evaluate(VERSIONS, kept=kept).num_episodes == 16
    assert len(read_draws(tmp_path / "kept")) == 15


def test_solver_alone_and_team_are_measured_on_the_same_rollouts(evaluator: Any) -> None:
    asked: list[str] = []
    evaluation = evaluator(counting(asked), SMALL).evaluate(VERSIONS)
    assert sum(uid.endswith("/solver:0") for uid in asked) == 16 and evaluation.alone is not None
    assert evaluation.alone.mean == evaluation.agents["solver"].mean and evaluation.system.mean == 1.0
    assert list(evaluation.alone_at.pass_at) == [1, 2] and evaluation.alone_at.pass_at[1].mean == pytest.approx(
        evaluation.alone.mean
    )
    assert (evaluation.alone_at.pass_at[2].mean or 0) >= (evaluation.alone_at.majority_at[2].mean or 0)
    verifier = evaluation.agents["verifier1"]
    assert verifier.detection_recall is not None and verifier.detection_recall.mean == 1.0
    assert verifier.detection_precision is not None and verifier.detection_precision.mean == 1.0
    assert verifier.length is not None and verifier.length.longest >= verifier.length.mean > 1
    metrics = eval_metrics(evaluation)
    assert metrics["eval/system"] == 1.0 and metrics["eval/system/low"] < 1 and "eval/alone/pass_at_2" in metrics
    assert metrics["eval/verifier1/detection_recall"] == 1.0 and metrics["eval/tokens"] > 0


def test_sets_are_reported_separately_and_together(evaluator: Any) -> None:
    judged = evaluator(perfect_critics)
    problems = judged.task.held_out(12, 0)
    judged = replace(judged, sets=(HeldOut("easy", problems[:4], 3), HeldOut("hard", problems[4:], 1)))
    evaluation = judged.evaluate(VERSIONS)
    easy, hard = evaluation.sets["easy"], evaluation.sets["hard"]
    assert (easy.num_problems, easy.num_episodes, hard.num_problems, hard.num_episodes) == (4, 12, 8, 8)
    assert evaluation.num_episodes == 20 and evaluation.system.n == 20
    assert list(easy.system_at.pass_at) == [1, 2, 3] and not hard.system_at.pass_at
    assert list(evaluation.rows)[:4] == ["easy/alone", "easy/system", "hard/alone", "hard/system"]
    metrics = eval_metrics(evaluation)
    assert {"eval/system", "eval/easy/system", "eval/hard/solver", "eval/easy/alone/pass_at_3"} <= metrics.keys()
    assert Evaluation.model_validate_json(evaluation.model_dump_json()) == evaluation


def test_scripted_redraws_cost_but_are_not_the_solvers_draws(evaluator: Any) -> None:
    def cut_first(request: DecodeRequest, renderer: ChatRenderer, rng: Random) -> str:
        if request.uid.endswith("/solver:0"):
            return "= " * 60
        return perfect_critics(request, renderer, rng)

    config = SMALL.model_copy(update={"compat": "marsrl"})
    found = evaluator(cut_first, config).evaluate(VERSIONS)
    solver = found.agents["solver"]
    assert (solver.mean, solver.n, found.usage["solver"].calls) == (1.0, 16, 32)
    assert found.alone is not None and found.alone.mean == 1.0
    strict = evaluator(cut_first, SMALL).evaluate(VERSIONS)
    assert strict.agents["solver"].mean == strict.system.mean == 0.0


def test_problems_are_held_out_or_files_played_whole(tmp_path: Path) -> None:
    for name, number in (("train", 20), ("aime25", 30), ("beyondaime", 100)):
        spaces = [" ", " \n"] if name == "train" else [" "]
        rows = [{"question": f"{name}{space}{i}?", "answer": str(i)} for space in spaces for i in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = init_model("tiny", "bytes", tmp_path / "model")
    words = ["task=math", f"policies.main.model={model}", f"data.train={tmp_path}/train.jsonl", f"run.dir={tmp_path}"]

    def checked(*more: str) -> Checked:
        return preflight(read_config(None, [*words, *more])[0], world_size=1)

    alone = checked()
    held_out = {one_spaced(p.question) for p in alone.task.held_out(100, 0)}
    trained = {one_spaced(problem.question) for problem in map(alone.task.problems(0), range(200))}
    # A tenth of the 20 questions is held out; each question occurs twice, with different white space.
    assert len(held_out) == 2 and alone.problems.num_taken == 4
    assert not held_out & trained and len(held_out | trained) == 20
    one, both = f"data.eval={tmp_path}/beyondaime.jsonl", f"[{tmp_path}/aime25.jsonl, {tmp_path}/beyondaime.jsonl]"
    found = checked(one)
    assert len(found.task.held_out(found.config.evaluate.num_problems, 0)) == 100
    assert [len(each.problems) for each in checked(f"data.eval={both}").problems.sets] == [30, 100]
    assert "\nheld out of data.train for evaluation: 4 of 40 problems (no data.eval is given)\n" in alone.text()
    assert "\nproblems to evaluate on: 100 of data.eval\n" in checked(one).text()
    fewer = checked(one, "evaluate.num_problems=200").text()
    assert "\nproblems to evaluate on: 100 of data.eval, fewer than evaluate.num_problems = 200\n" in fewer


def test_a_single_question_trains_and_warns_about_evaluation(tmp_path: Path) -> None:
    row = json.dumps({"question": "What is 2 + 2?", "answer": "4"})
    (tmp_path / "one.jsonl").write_text(f"{row}\n{row}\n")
    words = [f"policies.main.model={init_model('tiny', 'bytes', tmp_path / 'model')}", "task=math"]
    words += [f"data.train={tmp_path}/one.jsonl", "evaluate.num_problems=3"]
    message = "data.train has one question, so none is left to evaluate on; give other problems in data.eval"

    def checked(*more: str, trains: bool = True) -> Checked:
        return preflight(read_config(None, [*words, *more], trains=trains)[0], world_size=1, trains=trains)

    assert f"\nwarning: {message}, or set run.evaluate=false; nothing is evaluated" in checked().text()
    assert "none is left" not in checked("run.evaluate=false").text()
    assert "none is left" in checked("run.evaluate=false", "run.eval_every=1").text()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        checked(trains=False)
