"""How often the team of the config answers a question right, of n times: never and (nearly) always teach nothing.

The answers are those of `marsrl evaluate` (Evaluator.correctness): any orchestration, the sampling of the section evaluate,
the judge of the task.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from marsrl.rollout.types import Problem
from marsrl.trainer.config.curate import BestOfNConfig
from marsrl.trainer.curate.missing import MissingShare
from marsrl.trainer.curate.rows import Decision, Row
from marsrl.trainer.evaluate.evaluator import Evaluator
from marsrl.trainer.runs.answers import Answers, key_of

_UNDECIDED = "undecided"

OpenEvaluator = Callable[[Sequence[Problem]], AbstractContextManager[Evaluator]]
"""Given some of the questions: a team is checked on them before it starts."""


class BestOfN:
    """See the module. The team's engines start with the first question that has not been played yet."""

    name = "best_of_n"

    def __init__(
        self, config: BestOfNConfig, team: Mapping[str, Any], open_evaluator: OpenEvaluator, answers: Path
    ) -> None:
        """team: what tells it from others, as JSON. answers: the file that keeps how its answers were."""
        self._config, self._team = config, team
        self._open_evaluator = open_evaluator
        self._evaluator: Evaluator | None = None
        self._stack = ExitStack()
        self._answers: Answers[list[float]] = Answers(answers, _read)
        self._stack.callback(self._answers.close)
        self._share = MissingShare("curate.best_of_n.max_missing_share", config.max_missing_share)

    def settings(self) -> Mapping[str, Any]:
        return {**self._config.model_dump(mode="json", exclude={"batch"}), "team": self._team}

    def decisions(self, rows: Iterator[Row]) -> Iterator[tuple[Row, Decision]]:
        while batch := list(itertools.islice(rows, self._config.batch)):
            keyed = [(row, self._key(row.problem)) for row in batch]
            played = self._play({key: row.problem for row, key in keyed if key not in self._answers})
            for row, key in keyed:
                correct = played[key] if key in played else self._answers[key]
                decision = self._decision(correct)
                self._share.count(decision.kind == _UNDECIDED)
                if decision.kind == _UNDECIDED:
                    self._share.check_early(f"{row.problem.id}: {decision.detail}")
                yield row, decision
        self._share.check("the stage is at its end")

    def close(self) -> None:
        self._stack.close()

    def _key(self, problem: Problem) -> str:
        return key_of(n=self._config.n, team=self._team, question=problem.question, answer=problem.answer)

    def _play(self, problems: Mapping[str, Problem]) -> Mapping[str, list[float]]:
        """By key: NaN where it is not known whether an answer is right. Kept where all are known."""
        if not problems:
            return {}
        if self._evaluator is None:
            self._evaluator = self._stack.enter_context(self._open_evaluator(list(problems.values())))
        versions = dict.fromkeys(self._evaluator.team.pools, 0)
        found = self._evaluator.correctness(problems, self._config.n, versions)
        for key, correct in found.items():
            if not any(math.isnan(value) for value in correct):
                self._answers.add(key, {"correct": correct})
        return found

    def _decision(self, correct: Sequence[float]) -> Decision:
        """A value below 1 is not right, as for a Verifier (docs/own_task.md)."""
        low, high = self._config.keep
        num_right = sum(value >= 1 for value in correct)
        num_unknown = sum(math.isnan(value) for value in correct)
        said = f"{num_right} of {len(correct)} right" + (f", {num_unknown} not known" if num_unknown else "")
        if num_right > high:
            return Decision(False, "too easy", said)
        if num_right + num_unknown < low:
            return Decision(False, "too hard", said)
        if low <= num_right and num_right + num_unknown <= high:
            return Decision(True, "right now and then", said)
        return Decision(self._config.missing == "keep", _UNDECIDED, said)


def _read(answer: Any) -> list[float] | None:
    """An answer of the file."""
    found = answer.get("correct") if isinstance(answer, dict) else None
    is_list = isinstance(found, list) and all(isinstance(value, int | float) for value in found)
    return [float(value) for value in found] if is_list and found else None
