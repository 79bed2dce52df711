"""How often a team is right decides, whoever is in it; what was played is not played again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from curation import read, run

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import EvaluateConfig
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.rewards.judge import known
from marsrl.rollout.tasks.arithmetic import ArithmeticTask, parse_chain
from marsrl.rollout.tasks.config import ArithmeticOptions
from marsrl.rollout.team import WatchedJudge
from marsrl.rollout.types import Problem, Reward
from marsrl.trainer.commands.curate.best_of_n import best_of_n
from marsrl.trainer.commands.curate.rows import Row, Stage
from marsrl.trainer.config.curate import BestOfNConfig
from marsrl.trainer.evaluate.evaluator import Evaluator

EVALUATE = EvaluateConfig(accept_after=1, max_iterations=2, temperature=1.0, top_p=1.0)
N = 4


def rows(num: int) -> list[Row]:
    """Different problems; the i-th is answered right i times of N, again and again."""
    found = {p.question: p for p in ArithmeticTask(ArithmeticOptions()).held_out(3 * num, 0)}
    problems = list(found.values())[:num]
    assert len(problems) == num
    return [
        Row(i, replace(p, id=f"raw:{i + 1}"), {"question": p.question, "answer": p.answer}, ("question", "answer"))
        for i, p in enumerate(problems)
    ]


@dataclass
class Players:
    """A Solver that is right in as many of the draws as `right` says of a question.

    played: (question, draw) in order. seeds: of every request, by its uid.
    """

    make_team: Any
    folder: Path
    right: Callable[[str], int]
    fail: Callable[[str, int], bool] = lambda question, draw: False
    orchestration: str = "solver"
    played: list[tuple[str, int]] = field(default_factory=list)
    seeds: dict[str, list[int]] = field(default_factory=dict)

    def draw(self, request: DecodeRequest) -> int:
        return int(request.uid.partition("/")[0].rpartition(".")[2])

    @contextmanager
    def open(self, problems: Sequence[Problem]) -> Iterator[Evaluator]:
        assert problems
        renderers: list[ChatRenderer] = []

        def question(request: DecodeRequest) -> str:
            words = renderers[0].decode(request.token_ids).split()
            return " ".join(words[1 : words.index("<|assistant|>")])

        def script(request: DecodeRequest, renderer: ChatRenderer, rng: Random) -> str:
            if "verifier" in request.uid:
                return "claim 3 Verdict: correct"
            text = question(request)
            self.played.append((text, self.draw(request)))
            answer = int(parse_chain(text).answer)
            return f"Answer: {answer if self.draw(request) < self.right(text) else (answer + 1) % 10}"

        def fail(request: DecodeRequest) -> str | None:
            self.seeds.setdefault(request.uid, []).append(request.seed)
            is_verifier = "verifier" in request.uid
            return "no engine" if not is_verifier and self.fail(question(request), self.draw(request)) else None

        team, _, task = self.make_team(self.folder, script=script, fail=fail, evaluate=EVALUATE)
        renderers.append(team.renderers["main"])
        if self.orchestration == "solver":
            team = replace(team, orchestration=build_orchestration("solver", {}, task.prompts))
        yield Evaluator(team, EVALUATE, task, max_tokens=40, seed=0)

    def stage(self, out: Path, team: Mapping[str, Any] | None = None, **settings: Any) -> Stage:
        config = BestOfNConfig(**{"n": N, "keep": (1, 2), "batch": 3, **settings})
        return best_of_n(config, team or {"model": "a"}, self.open, out / "stages/best_of_n/answers.jsonl")


@pytest.fixture
def players(scripted_team: Any, tmp_path: Path) -> Callable[..., Players]:
    return lambda right, **more: Players(scripted_team, tmp_path / "tokenizer", right, **more)


@pytest.mark.parametrize("orchestration", ["solver", "verifier_corrector"])
def test_rows_that_are_right_too_often_or_too_rarely_are_dropped(
    orchestration: str, players: Callable[..., Players], tmp_path: Path
) -> None:
    given = rows(10)
    number = {row.problem.question: row.number for row in given}
    team = players(lambda question: number[question] % 5, orchestration=orchestration)
    (_, record), _ = run(tmp_path, [read(), team.stage(tmp_path)], given)
    assert record.tally.kept == {"right now and then": 4} and record.tally.dropped == {"too hard": 2, "too easy": 4}
    kept = [json.loads(line) for line in (tmp_path / "stages/best_of_n/kept.jsonl").open()]
    assert [(line["row"], line["detail"]) for line in kept] == [
        (1, "1 of 4 right"), (2, "2 of 4 right"), (6, "1 of 4 right"), (7, "2 of 4 right"),
    ]  # fmt: skip
    assert len(team.played) == len(set(team.played)) == 10 * N


def test_draws_do_not_depend_on_what_is_played_beside_them(players: Callable[..., Players]) -> None:
    given = rows(4)
    team = players(lambda question: 2)
    with team.open([given[0].problem]) as evaluator:
        together = evaluator.correctness({f"p{row.number}": row.problem for row in given}, N, {"main": 0})
        alone = evaluator.correctness({"p2": given[2].problem}, N, {"main": 0})
    assert together["p2"] == alone["p2"] == [1.0, 1.0, 0.0, 0.0]
    assert sorted(map(len, team.seeds.values())) == [1] * 3 * N + [2] * N
    assert len({seed for seeds in team.seeds.values() for seed in seeds}) == 4 * N


def test_another_range_asks_nobody_and_another_team_is_asked_anew(
    players: Callable[..., Players], tmp_path: Path
) -> None:
    given, team = rows(4), players(lambda question: 3)
    (_, record), _ = run(tmp_path, [read(), team.stage(tmp_path)], given)
    assert record.tally.num_kept == 0
    (_, record), said = run(tmp_path, [read(), team.stage(tmp_path, keep=(1, 3))], given)
    assert record.tally.num_kept == 4 and len(team.played) == 4 * N
    assert "curate.best_of_n: keep is [1, 3], was [1, 2]" in said
    run(tmp_path, [read(), team.stage(tmp_path, {"model": "b"})], given)
    assert len(team.played) == 2 * 4 * N


@pytest.mark.parametrize(
    ("right", "num_failed", "kind"),
    [(1, 1, "right now and then"), (2, 1, "undecided"), (3, 1, "too easy"), (0, 1, "undecided"), (1, 2, "undecided")],
)
def test_unknown_answers_leave_a_row_undecided_only_where_they_matter(
    right: int, num_failed: int, kind: str, players: Callable[..., Players], tmp_path: Path
) -> None:
    team = players(lambda question: right, fail=lambda question, draw: draw >= N - num_failed)
    (_, record), _ = run(tmp_path, [read(), team.stage(tmp_path, max_missing_share=1.0)], rows(1))
    assert {**record.tally.kept, **record.tally.dropped} == {kind: 1}


def test_no_answer_at_all_is_wrong_and_a_failed_judge_is_not_known(
    players: Callable[..., Players], tmp_path: Path
) -> None:
    (row,) = rows(1)
    with players(lambda question: 4).open([row.problem]) as evaluator:
        lost = replace(evaluator.team, judge=WatchedJudge(lambda problem, answer: known(Reward(math.nan, math.nan))))
        unknown = replace(evaluator, team=lost).correctness({"p": row.problem}, N, {"main": 0})["p"]
        cut = replace(evaluator, max_tokens=1).correctness({"q": row.problem}, N, {"main": 0})["q"]
    assert all(math.isnan(value) for value in unknown) and len(unknown) == N
    assert cut == [0.0] * N
