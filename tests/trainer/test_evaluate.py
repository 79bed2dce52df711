"""Evaluation of scripted teams whose numbers are known beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import EvaluateConfig
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.state import decode, encode
from marsrl.rollout.tasks.arithmetic import parse_chain
from marsrl.trainer.evaluate.evaluator import Evaluator, Probe
from marsrl.trainer.report.summarise_run import meets_gate, missed_gates
from marsrl.trainer.report.summary import Evaluation

VERSIONS = {"main": 0}
CONFIG = EvaluateConfig(num_problems=40, accept_after=1, max_iterations=4, probe_size=20, temperature=1.0, top_p=1.0)


def answer_of(words: list[str]) -> str:
    """The right answer to the problem that a Solver's or Corrector's prompt states."""
    return parse_chain(" ".join(words[1 : words.index("<|assistant|>")])).answer


def judge_of(words: list[str]) -> tuple[str, str]:
    """(right answer, claimed answer) of a Verifier's prompt."""
    line = words.index("\n")
    return parse_chain(" ".join(words[3:line])).answer, words[-2]


def words_of(request: DecodeRequest, renderer: ChatRenderer) -> list[str]:
    return renderer.decode(request.token_ids).replace("\n", " \n ").split(" ")


def is_verifier(request: DecodeRequest) -> bool:
    return request.uid.rpartition("/")[2].startswith("verifier")


def is_solver(request: DecodeRequest) -> bool:
    return request.uid.endswith("/solver:0")


def wrong(answer: str) -> str:
    return str((int(answer) + 1) % 10)


def evaluator(folder: Path, scripted_team: Any, script: Any, config: EvaluateConfig = CONFIG) -> Evaluator:
    team, _, task = scripted_team(folder, script=script, evaluate=config)
    return Evaluator(team, config, task, max_tokens=40, seed=0)


def perfect_critics(request: DecodeRequest, renderer: ChatRenderer, rng: Random) -> str:
    """A Solver that is right half of the time, a Verifier and a Corrector that never err."""
    words = [w for w in words_of(request, renderer) if w]
    if is_verifier(request):
        right, claimed = judge_of(words)
        return f"said {claimed} Verdict: {'correct' if right == claimed else 'wrong'}"
    right = answer_of(words)
    return f"Answer: {right if not is_solver(request) or rng.random() < 0.5 else wrong(right)}"


def test_perfect_critics_make_a_perfect_system_of_a_mediocre_solver(tmp_path: Path, scripted_team: Any) -> None:
    judged = evaluator(tmp_path, scripted_team, perfect_critics)
    probe = judged.make_probe(VERSIONS)
    result = judged.evaluate(VERSIONS)
    verifier, corrector = probe.inputs["verifier1"], probe.inputs["corrector1"]
    assert len(verifier.right) == len(verifier.wrong) == 10
    assert corrector.wrong and not corrector.right
    assert encode(decode(Probe, encode(probe))) == encode(probe)
    assert list(result.rows) == ["solver", "verifier1", "corrector1", "verifier2", "system"]  # nothing is flagged twice
    assert 0.2 < (result.agents["solver"].mean or 0) < 0.8
    assert result.agents["solver"].n == 40
    assert result.agents["verifier1"].mean == 1.0
    confusion = result.agents["verifier1"].confusion
    assert confusion is not None and confusion.right_correct == confusion.wrong_wrong == 10
    assert result.agents["corrector1"].mean == 1.0
    assert result.agents["verifier2"].confusion is None and result.agents["verifier2"].loop_confusion is not None
    assert result.system.mean == 1.0


def always_wrong(request: DecodeRequest, renderer: ChatRenderer, rng: Random) -> str:
    """A Verifier that flags everything, and a Corrector that breaks what it is shown."""
    words = [w for w in words_of(request, renderer) if w]
    if is_verifier(request):
        return "said 3 Verdict: wrong"
    right = answer_of(words)
    return f"Answer: {right if is_solver(request) and rng.random() < 0.5 else wrong(right)}"


def test_a_verifier_that_flags_everything_is_at_chance_and_the_first_answer_counts(
    tmp_path: Path, scripted_team: Any
) -> None:
    judged = evaluator(tmp_path, scripted_team, always_wrong)
    judged.make_probe(VERSIONS)
    result = judged.evaluate(VERSIONS)
    assert result.agents["verifier1"].mean == 0.5
    assert result.agents["corrector1"].mean == 0.0
    breaks = result.agents["corrector1"].breaks
    assert breaks is not None and breaks.mean == 1.0
    assert result.system.mean == result.agents["solver"].mean  # nothing is accepted; the earliest of equals counts
    loops = [result.agents[name].loop_confusion for name in ("verifier1", "verifier2")]
    # four Verifier calls a problem
    assert sum(each.right_wrong + each.wrong_wrong for each in loops if each is not None) == 40 * 4


def test_a_solver_alone_is_the_system_and_nothing_is_probed(tmp_path: Path, scripted_team: Any) -> None:
    five, _, task = scripted_team(tmp_path, script=perfect_critics, evaluate=CONFIG)
    team = replace(five, orchestration=build_orchestration("solver", {}, task.prompts))
    judged, with_critics = (Evaluator(each, CONFIG, task, max_tokens=40, seed=0) for each in (team, five))
    assert judged.make_probe(VERSIONS) == Probe()
    alone = judged.evaluate(VERSIONS)
    assert list(alone.rows) == ["solver", "system"]
    solver = alone.agents["solver"]
    assert solver.model_dump(include={"mean", "low", "high", "n"}) == alone.system.model_dump()
    assert solver == with_critics.evaluate(VERSIONS).agents["solver"]
    assert Evaluation.model_validate_json(alone.model_dump_json()) == alone
    low = {"solver": (0.9, 1.0), "verifier1": (0.0, 0.1)}
    assert missed_gates(alone, low) == [f"solver {solver.mean}, wanted (0.9, 1.0)"]
    assert meets_gate(alone, {"solver": (0.1, 0.9), "verifier1": (0.0, 0.1), "system": (0.1, 0.9)})


def mute(request: DecodeRequest, renderer: ChatRenderer, rng: Random) -> str:
    return "= =" if is_verifier(request) else f"Answer: {answer_of(words_of(request, renderer))}"


def test_no_verdict_is_an_error_of_the_verifier_not_an_acceptance(tmp_path: Path, scripted_team: Any) -> None:
    judged = evaluator(tmp_path, scripted_team, mute)
    judged.make_probe(VERSIONS)
    result = judged.evaluate(VERSIONS)
    verifier = result.agents["verifier1"]
    assert verifier.n == 0 and verifier.mean is None  # never wrong: the probe has one class only
    assert verifier.confusion is not None and verifier.confusion.none == 10
    assert verifier.loop_confusion is not None and verifier.loop_confusion.none > 0


def test_the_same_seed_draws_the_same_evaluation(tmp_path: Path, scripted_team: Any) -> None:
    results = []
    for name in ("a", "b"):
        judged = evaluator(tmp_path / name, scripted_team, perfect_critics)
        judged.make_probe(VERSIONS)
        results.append(judged.evaluate(VERSIONS))
    assert results[0] == results[1]


def test_repeats_are_counted(tmp_path: Path, scripted_team: Any) -> None:
    judged = evaluator(
        tmp_path, scripted_team, perfect_critics, CONFIG.model_copy(update={"repeat": 3, "num_problems": 5})
    )
    assert judged.evaluate(VERSIONS).agents["solver"].n == 15


@pytest.mark.parametrize("limit", [2])
def test_a_prompt_that_does_not_fit_counts_as_wrong(tmp_path: Path, scripted_team: Any, limit: int) -> None:
    judged = evaluator(tmp_path, scripted_team, perfect_critics)
    agents = judged.team.agents
    agents["solver"] = agents["solver"].model_copy(update={"max_input_tokens": limit})  # type: ignore[index]
    result = judged.evaluate(VERSIONS)
    assert result.agents["solver"].mean == 0.0
    assert result.system.mean == 0.0


def test_a_prompt_that_is_cut_is_asked(tmp_path: Path, scripted_team: Any) -> None:
    asked: list[int] = []

    def script(request: DecodeRequest, renderer: ChatRenderer, rng: Random) -> str:
        asked.append(len(request.token_ids)) if is_solver(request) else None
        return "Answer: 1"

    judged = evaluator(tmp_path, scripted_team, script)
    agents = judged.team.agents
    agents["solver"] = agents["solver"].model_copy(update={"max_input_tokens": 8, "long_prompts": "cut_left"})  # type: ignore[index]
    solver = judged.evaluate(VERSIONS).agents["solver"]
    assert asked == [8] * solver.n and solver.n == 40 and solver.mean is not None and solver.mean > 0
