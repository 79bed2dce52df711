"""Best of n: drop problems that the config's team solves in none or in (nearly) all of n tries, as they give no gradient.

Answers are sampled and judged as in `marsrl evaluate` (Evaluator.correctness), with the settings `evaluate`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

from marsrl.commands.curate.rows import Decision, Decisions, MissingShare, Row, Stage
from marsrl.rollout.types import Problem
from marsrl.trainer.config.curate import BestOfNConfig
from marsrl.trainer.evaluate.evaluator import Evaluator
from marsrl.trainer.runs.answers import Answers, key_of

NAME = "best_of_n"
_UNDECIDED = "undecided"

OpenEvaluator = Callable[[Sequence[Problem]], AbstractContextManager[Evaluator]]
"""Opens an evaluator. Its argument is a sample of the questions, on which the team is checked before engines start."""


def best_of_n(config: BestOfNConfig, team: Mapping[str, Any], open_evaluator: OpenEvaluator, answers: Path) -> Stage:
    """Return the best-of-n stage. The team's engines start with the first question that has no saved answers.

    team: JSON that identifies the team. answers: file with the correctness of the team's answers.
    """

    def decide(rows: Iterator[Row]) -> Decisions:
        share = MissingShare(f"curate.{NAME}.max_missing_share", config.max_missing_share)
        evaluator: Evaluator | None = None
        with closing(Answers(answers, _read)) as saved, ExitStack() as stack:
            while batch := list(itertools.islice(rows, config.batch)):
                keyed = [
                    (row, key_of(n=config.n, team=team, question=row.problem.question, answer=row.problem.answer))
                    for row in batch
                ]
                unplayed = {key: row.problem for row, key in keyed if key not in saved}
                if unplayed and evaluator is None:
                    evaluator = stack.enter_context(open_evaluator(list(unplayed.values())))
                played = {} if evaluator is None else _played(evaluator, config.n, unplayed, saved)
                for row, key in keyed:
                    decision = _decision(config, played[key] if key in played else saved[key])
                    share.count(f"{row.problem.id}: {decision.detail}" if decision.kind == _UNDECIDED else None)
                    yield row, decision
            share.check()

    settings = {**config.model_dump(mode="json", exclude={"batch"}), "team": team}
    return Stage(NAME, settings, decide)


def _played(
    evaluator: Evaluator, n: int, problems: Mapping[str, Problem], saved: Answers[list[float]]
) -> Mapping[str, list[float]]:
    """Play the problems, and return the correctness of each one's answers, by key (NaN: not judged).

    Saves the correctness of a problem only if all its answers were judged.
    """
    versions = dict.fromkeys([*evaluator.team.pools, *evaluator.team.adapters], 0)
    results = evaluator.correctness(problems, n, versions) if problems else {}
    for key, correct in results.items():
        if not any(math.isnan(value) for value in correct):
            saved.add(key, {"correct": correct})
    return results


def _decision(config: BestOfNConfig, correct: Sequence[float]) -> Decision:
    """Keep or drop a question. An answer with a correctness below 1 counts as wrong, as for a Verifier (docs/own_task.md)."""
    low, high = config.keep
    num_right = sum(value >= 1 for value in correct)
    num_unknown = sum(math.isnan(value) for value in correct)
    counts = f"{num_right} of {len(correct)} right" + (f", {num_unknown} not judged" if num_unknown else "")
    if num_right > high:
        return Decision(False, "too easy", counts)
    if num_right + num_unknown < low:
        return Decision(False, "too hard", counts)
    if low <= num_right and num_right + num_unknown <= high:
        return Decision(True, "sometimes right", counts)
    return Decision(config.missing == "keep", _UNDECIDED, counts)


def _read(answer: Any) -> list[float] | None:
    return [float(value) for value in answer["correct"]] or None
