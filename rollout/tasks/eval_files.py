"""Problems to evaluate on, of several files: each a set with a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from marsrl.rollout.tasks.config import EvalFile
from marsrl.rollout.tasks.data import draw_held_out, read_problems
from marsrl.rollout.types import Problem


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Problems that are evaluated, each so many times. name: of their numbers; "" of the only ones. num_given: of the file."""

    name: str
    problems: Sequence[Problem]
    repeat: int
    num_given: int = 0


def read_eval(
    files: Sequence[EvalFile],
    task: str,
    seed: int,
    num_problems: int | None,
    repeat: int,
    question_key: str | None = None,
    answer_key: str | None = None,
    on_bad_line: Literal["error", "skip"] = "error",
) -> tuple[tuple[HeldOut, ...], int]:
    """(a set a file, number of lines that were skipped). Ids begin with the set's name, `aime25/aime25.jsonl:7`.

    Args:
        seed: of the draw of so many problems of a file, which does not depend on the other files.
        num_problems, repeat: of files without a count or a repeat of their own; a file may have fewer than num_problems; None:
            all of it.

    Raises:
        ValueError: as read_problems; the text names the place.
    """
    sets, num_bad = [], 0
    for place, file in enumerate(files):
        try:
            read = read_problems(file.path, task, question_key, answer_key, on_bad_line)
        except (ValueError, OSError) as error:
            raise ValueError(f"data.eval[{place}]: {str(error).removeprefix('data: ')}") from error
        if file.count is not None and len(read.problems) < file.count:
            raise ValueError(
                f"data.eval[{place}]: {file.path} has {len(read.problems):,} problems, fewer than count = {file.count:,}; "
                "lower it"
            )
        drawn = draw_held_out(read.problems, file.count or num_problems, task, seed)
        problems = [replace(problem, id=f"{file.set_name}/{problem.id}") for problem in drawn]
        sets.append(HeldOut(file.set_name, problems, file.repeat or repeat, len(read.problems)))
        num_bad += read.num_bad
    return tuple(sets), num_bad
