"""Stages without a model: valid problems, and the academic level in a field of the row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marsrl.rollout.tasks.data import lookup
from marsrl.trainer.commands.curate.rows import Decision, Row, Stage
from marsrl.trainer.config.curate import LevelConfig


def readable(max_question_chars: int, origin: Mapping[str, Any]) -> Stage:
    """Rows with a question, not too long, and an answer. origin: the inputs and how they are read, as JSON."""

    def decide(row: Row) -> Decision:
        num_chars = len(row.problem.question)
        if row.fault:
            return Decision(False, "unreadable row", row.fault)
        if num_chars > max_question_chars:
            return Decision(False, "long question", f"{num_chars:,} characters, at most {max_question_chars:,}")
        return Decision(True, "read")

    return _row_by_row("read", {"max_question_chars": max_question_chars, **origin}, decide)


def level(config: LevelConfig) -> Stage:
    """Rows with one of the wanted values in the field."""
    wanted = {_comparable(value) for value in config.keep}

    def decide(row: Row) -> Decision:
        found = lookup(row.fields, config.field)
        values = found if isinstance(found, Sequence) and not isinstance(found, str) else [found]
        if found is None or not values:
            return Decision(config.missing == "keep", "no level", f"{config.field} is not there")
        said = ", ".join(str(value)[:80] for value in values[:5])
        is_kept = any(_comparable(value) in wanted for value in values)
        return Decision(is_kept, "wanted level" if is_kept else "other level", f"{config.field}: {said}")

    return _row_by_row("level", config.model_dump(mode="json"), decide)


def _row_by_row(name: str, settings: Mapping[str, Any], decide: Callable[[Row], Decision]) -> Stage:
    return Stage(name, settings, lambda rows: ((row, decide(row)) for row in rows))


def _comparable(value: object) -> str:
    """The value for comparison: ignores case; 3 and "3" are equal."""
    return str(value).strip().casefold()
