"""Stages that need no model: rows that are problems, and the academic level that a field of the row names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marsrl.rollout.tasks.data import lookup
from marsrl.trainer.config.curate import LevelConfig
from marsrl.trainer.curate.rows import Decision, Row


class Readable:
    """Rows that hold a question and an answer, the question not too long."""

    name = "read"

    def __init__(self, max_question_chars: int, origin: Mapping[str, Any]) -> None:
        """origin: what the rows come from, and how they are read, as JSON."""
        self._max_chars, self._origin = max_question_chars, origin

    def settings(self) -> Mapping[str, Any]:
        return {"max_question_chars": self._max_chars, **self._origin}

    def decisions(self, rows: Iterator[Row]) -> Iterator[tuple[Row, Decision]]:
        for row in rows:
            num_chars = len(row.problem.question)
            if row.fault:
                yield row, Decision(False, "unreadable row", row.fault)
            elif num_chars > self._max_chars:
                yield row, Decision(False, "long question", f"{num_chars:,} characters, at most {self._max_chars:,}")
            else:
                yield row, Decision(True, "read")

    def close(self) -> None:
        """It holds nothing."""


class Level:
    """Rows whose field has one of the wanted values."""

    name = "level"

    def __init__(self, config: LevelConfig) -> None:
        self._config = config
        self._wanted = {_comparable(value) for value in config.keep}

    def settings(self) -> Mapping[str, Any]:
        return self._config.model_dump(mode="json")

    def decisions(self, rows: Iterator[Row]) -> Iterator[tuple[Row, Decision]]:
        for row in rows:
            yield row, self._decision(lookup(row.fields, self._config.field))

    def _decision(self, found: object) -> Decision:
        values = found if isinstance(found, Sequence) and not isinstance(found, str) else [found]
        if found is None or not values:
            return Decision(self._config.missing == "keep", "no level", f"{self._config.field} is not there")
        said = ", ".join(str(value)[:80] for value in values[:5])
        is_kept = any(_comparable(value) in self._wanted for value in values)
        return Decision(is_kept, "wanted level" if is_kept else "other level", f"{self._config.field}: {said}")

    def close(self) -> None:
        """It holds nothing."""


def _comparable(value: object) -> str:
    """Texts in any case; 3 and "3" are one."""
    return str(value).strip().casefold()
