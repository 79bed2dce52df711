"""Stage best_of_n keeps rows by their number of right answers, and does not play again what is saved."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from curation import prompt_of, read, rows_of, run
from letters import END, make_team

from marsrl.commands.curate.best_of_n import best_of_n
from marsrl.commands.curate.rows import Row, Stage
from marsrl.rollout.config import AgentConfig, EvaluateConfig
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.orchestrations.registry import agent_names, build_orchestration
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.rewards.judge import known
from marsrl.rollout.team import WatchedJudge
from marsrl.rollout.types import Problem, Reward
from marsrl.trainer.config.curate import BestOfNConfig
from marsrl.trainer.evaluate.evaluator import Evaluator

EVALUATE = EvaluateConfig(accept_after=1, max_iterations=2, temperature=1.0, top_p=1.0)
N = 4


def rows(num: int) -> list[Row]:
    """Return `num` rows; the question of row i is "What is [i]?"."""
    return rows_of(f"What is [{i}]?" for i in range(num))


@dataclass
class Players:
    """A team whose Solver answers row i correctly in the first right(i) draws.

    fail: function of a draw's number; if it returns True, the draw's requests fail.
    played: (row, draw) in order. seeds: seeds of the requests, by uid.
    """

    right: Callable[[int], int]
    fail: Callable[[int], bool] = lambda draw: False
    orchestration: str = "solver"
    played: list[tuple[int, int]] = field(default_factory=list)
    seeds: dict[str, list[int]] = field(default_factory=dict)

    def draw(self, request: DecodeRequest) -> int:
        return int(request.uid.partition("/")[0].rpartition(".")[2])

    def say(self, request: DecodeRequest) -> list[int]:
        text = "Verdict: correct"
        if "verifier" not in request.uid:
            row, draw = int(re.findall(r"\[(\d+)\]", prompt_of(request))[0]), self.draw(request)
            self.played.append((row, draw))
            text = f"\\boxed{{{row if draw < self.right(row) else row + 1}}}"
        return [*map(ord, text), END]

    def refuse(self, request: DecodeRequest) -> str | None:
        self.seeds.setdefault(request.uid, []).append(request.seed)
        return "no engine" if "verifier" not in request.uid and self.fail(self.draw(request)) else None

    @contextmanager
    def open(self, problems: Sequence[Problem]) -> Iterator[Evaluator]:
        assert problems
        no_task: Any = None  # problems are passed in
        agents = {name: AgentConfig() for name in agent_names(self.orchestration)}
        team = build_orchestration(self.orchestration, agents, "math", evaluate=EVALUATE)
        with EnginePool(LocalReplicas([ScriptedEngine(self.say, fail=self.refuse)])) as pool:
            yield Evaluator(make_team(agents, team, pool), EVALUATE, no_task, max_tokens=40, seed=0)

    def stage(self, out: Path, team: Mapping[str, Any] | None = None, **settings: Any) -> Stage:
        config = BestOfNConfig(**{"n": N, "keep": (1, 2), "batch": 3, **settings})
        return best_of_n(config, team or {"model": "a"}, self.open, out / "stages/best_of_n/answers.jsonl")


@pytest.mark.parametrize("orchestration", ["solver", "verifier_corrector"])
def test_rows_that_are_right_too_often_or_too_rarely_are_dropped(orchestration: str, tmp_path: Path) -> None:
    team = Players(lambda row: row % 5, orchestration=orchestration)
    (_, record), _ = run(tmp_path, [read(), team.stage(tmp_path)], rows(10))
    assert record.kept == {"sometimes right": 4} and record.dropped == {"too hard": 2, "too easy": 4}
    kept = [json.loads(line) for line in (tmp_path / "stages/best_of_n/kept.jsonl").open()]
    assert [(line["row"], line["detail"]) for line in kept] == [
        (1, "1 of 4 right"), (2, "2 of 4 right"), (6, "1 of 4 right"), (7, "2 of 4 right"),
    ]  # fmt: skip
    assert len(team.played) == len(set(team.played)) == 10 * N


def test_draws_do_not_depend_on_what_is_played_beside_them() -> None:
    given, team = rows(4), Players(lambda row: 2)
    with team.open([given[0].problem]) as evaluator:
        together = evaluator.correctness({f"p{row.number}": row.problem for row in given}, N, {"main": 0})
        alone = evaluator.correctness({"p2": given[2].problem}, N, {"main": 0})
    assert together["p2"] == alone["p2"] == [1.0, 1.0, 0.0, 0.0]
    assert sorted(map(len, team.seeds.values())) == [1] * 3 * N + [2] * N
    assert len({seed for seeds in team.seeds.values() for seed in seeds}) == 4 * N


def test_a_new_range_reuses_answers_and_a_new_team_does_not(tmp_path: Path) -> None:
    given, team = rows(4), Players(lambda row: 3)
    (_, record), _ = run(tmp_path, [read(), team.stage(tmp_path)], given)
    assert record.num_kept == 0
    (_, record), said = run(tmp_path, [read(), team.stage(tmp_path, keep=(1, 3))], given)
    assert record.num_kept == 4 and len(team.played) == 4 * N
    assert "curate.best_of_n: keep is [1, 3], was [1, 2]" in said
    run(tmp_path, [read(), team.stage(tmp_path, {"model": "b"})], given)
    assert len(team.played) == 2 * 4 * N


@pytest.mark.parametrize(
    ("right", "num_failed", "kind"),
    [(1, 1, "sometimes right"), (2, 1, "undecided"), (3, 1, "too easy"), (0, 1, "undecided"), (1, 2, "undecided")],
)
def test_unknown_answers_leave_rows_undecided_only_if_decisive(
    right: int, num_failed: int, kind: str, tmp_path: Path
) -> None:
    team = Players(lambda row: right, fail=lambda draw: draw >= N - num_failed)
    (_, record), _ = run(tmp_path, [read(), team.stage(tmp_path, max_missing_share=1.0)], rows(1))
    assert {**record.kept, **record.dropped} == {kind: 1}


def test_no_answer_is_wrong_and_a_failed_judge_is_unknown() -> None:
    (row,) = rows(1)
    with Players(lambda row: 4).open([row.problem]) as evaluator:
        lost = replace(evaluator.team, judge=WatchedJudge(lambda problem, answer: known(Reward(math.nan, math.nan))))
        unknown = replace(evaluator, team=lost).correctness({"p": row.problem}, N, {"main": 0})["p"]
        cut = replace(evaluator, max_tokens=1).correctness({"q": row.problem}, N, {"main": 0})["q"]
    assert all(math.isnan(value) for value in unknown) and len(unknown) == N
    assert cut == [0.0] * N
