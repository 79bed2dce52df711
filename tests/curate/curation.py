"""Helpers of the curation tests: rows, stages that are killed, and a judge whose engine follows a script."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from letters import END, LetterRenderer

from marsrl.commands.curate.judged import judged
from marsrl.commands.curate.pipeline import Pipeline, StageRecord
from marsrl.commands.curate.rows import Decisions, Row, Stage, readable
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.types import Problem
from marsrl.trainer.config.curate import CriterionConfig
from marsrl.trainer.report.console import RunConsole

YES, NO = "It is. <verdict>yes</verdict>", "It is not. <verdict>no</verdict>"


def by_length(question: str) -> str:
    return YES if len(question) % 2 else NO


class Killed(Exception):
    """Raised in place of kill -9."""


def rows_of(questions: Iterable[str], answer: str | None = None) -> list[Row]:
    """Return rows. answer: answer of all rows; None: each row's number."""
    pairs = [(q, answer or str(i)) for i, q in enumerate(questions)]
    return [
        Row(i, Problem(f"raw.jsonl:{i + 1}", q, a, "math"), {"question": q, "answer": a}, ("question", "answer"))
        for i, (q, a) in enumerate(pairs)
    ]


def read() -> Stage:
    return readable(5000, {})


def cut_short(stage: Stage, number: int) -> Stage:
    """Return the stage, killed before it decides on row `number`."""

    def decide(rows: Iterator[Row]) -> Decisions:
        with closing(stage.decide(rows)) as decisions:
            for row, decision in decisions:
                if row.number >= number:
                    raise Killed
                yield row, decision

    return replace(stage, decide=decide)


def run(out: Path, stages: Sequence[Stage], rows: Sequence[Row]) -> tuple[list[StageRecord], str]:
    """Run the stages; return the records and the terminal output."""
    said = io.StringIO()
    records = Pipeline(out, stages, lambda: iter(rows), "math", RunConsole(stream=said)).run()
    return records, said.getvalue()


def prompt_of(request: DecodeRequest) -> str:
    """Return the prompt's text, as LetterRenderer writes it."""
    return "".join(chr(token - 2) for token in request.token_ids[:-1].tolist())


@dataclass
class ScriptedJudge:
    """Judge that answers questions by a script.

    script: returns a question's answer. fail: returns a question's error, or None. asked: the questions in order.
    prompts: prompts of all requests. num_opened: number of times that `open` was called.
    """

    script: Callable[[str], str]
    fail: Callable[[str], str | None] = lambda question: None
    asked: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    num_opened: int = 0

    def question(self, request: DecodeRequest) -> str:
        return prompt_of(request).split("begins after this line.\n\n", 1)[1].rsplit("\n\nThe question has ended.", 1)[0]

    def answer(self, request: DecodeRequest) -> list[int]:
        self.asked.append(self.question(request))
        self.prompts.append(prompt_of(request))
        return [*map(ord, self.script(self.asked[-1])), END]

    @contextmanager
    def open(self) -> Iterator[tuple[Any, EnginePool]]:
        self.num_opened += 1
        engine = ScriptedEngine(self.answer, fail=lambda request: self.fail(self.question(request)))
        with EnginePool(LocalReplicas([engine])) as pool:
            yield LetterRenderer(), pool

    def stage(self, out: Path, name: str = "clarity", policy: Any = None, **settings: Any) -> Stage:
        answers = out / "stages" / name / "answers.jsonl"
        return judged(name, CriterionConfig(**settings), policy or {"model": "judge"}, 0, self.open, answers)
