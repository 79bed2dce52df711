"""Problems of one file or of several, to train on and to evaluate on, and the order in which they are drawn.

To train on, several files have counts or weights (data.train); to evaluate on, each is a set with a name of its own (data.eval).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.config import EvalFile, TrainFile
from marsrl.rollout.tasks.data import DataCursor, ReadResult, draw_held_out
from marsrl.rollout.tasks.protocol import CursorState, ProblemSource
from marsrl.rollout.types import Problem

_File = TypeVar("_File", TrainFile, EvalFile)
Read = Callable[[str], ReadResult]
"""Reads the problems behind a path: data.read_problems with the settings of all files."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Problems that are evaluated, each so many times. name: of their numbers; "" of the only ones. num_given: of the file."""

    name: str
    problems: Sequence[Problem]
    repeat: int
    num_given: int = 0


class Mixture(tuple[Problem, ...]):
    """The problems of several files, one file after the other, which draws (`draw_endlessly`) take by weight."""

    files: tuple[tuple[Problem, ...], ...]
    weights: tuple[float, ...]

    def __new__(cls, files: Sequence[Sequence[Problem]], weights: Sequence[float]) -> Mixture:
        """At least one problem a file."""
        mixture = super().__new__(cls, (problem for file in files for problem in file))
        mixture.files, mixture.weights = tuple(map(tuple, files)), tuple(weights)
        return mixture

    def without(self, questions: Collection[str]) -> Mixture:
        """The same files without these questions; ValueError names one of which nothing is left."""
        files = [[problem for problem in file if problem.question not in questions] for file in self.files]
        for place, file in enumerate(files):
            if not file:
                raise ValueError(
                    f"data.train[{place}]: all of its {len(self.files[place])} questions are held out for evaluation; give "
                    "data.eval, or a longer file"
                )
        return Mixture(files, self.weights)


def read_train(train: str | Sequence[TrainFile], read: Read, seed: int) -> ReadResult:
    """The problems of data.train: a file's or directory's, of files with counts so many of each, of files with weights a Mixture.

    Ids of a list's problems begin with the place of their file, `0/train.jsonl:7`.

    Raises:
        ValueError: as read_problems; of a list the text names the place.
    """
    if isinstance(train, str):
        return read(train)
    files: list[list[Problem]] = []
    num_bad = 0
    notes: list[str] = []
    for place, (file, found) in enumerate(_each("data.train", train, read)):
        problems: Sequence[Problem] = found.problems
        if file.count is not None:
            drawn = random.Random(f"data/{seed}/count/{place}").sample(range(len(problems)), file.count)
            problems = [problems[i] for i in sorted(drawn)]
        files.append([replace(problem, id=f"{place}/{problem.id}") for problem in problems])
        num_bad += found.num_bad
        notes += found.notes
    weights = [file.weight for file in train if file.weight is not None]
    listed = Mixture(files, weights) if weights else tuple(problem for file in files for problem in file)
    return ReadResult(listed, num_bad, tuple(notes))


def read_eval(
    files: Sequence[EvalFile], read: Read, task: str, seed: int, num_problems: int | None, repeat: int
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
    for file, found in _each("data.eval", files, read):
        drawn = draw_held_out(found.problems, file.count or num_problems, task, seed)
        problems = [replace(problem, id=f"{file.set_name}/{problem.id}") for problem in drawn]
        sets.append(HeldOut(file.set_name, problems, file.repeat or repeat, len(found.problems)))
        num_bad += found.num_bad
    return tuple(sets), num_bad


def _each(key: str, files: Sequence[_File], read: Read) -> Iterator[tuple[_File, ReadResult]]:
    """Each file with its problems; ValueError names the one that cannot be read, or has fewer than its count."""
    for place, file in enumerate(files):
        try:
            found = read(file.path)
        except (ValueError, OSError) as error:
            raise ValueError(f"{key}[{place}]: {str(error).removeprefix('data: ')}") from error
        if file.count is not None and len(found.problems) < file.count:
            raise ValueError(
                f"{key}[{place}]: {file.path} has {len(found.problems):,} problems, fewer than count = {file.count:,}; "
                "lower it"
            )
        yield file, found


class MixtureCursor:
    """Endless draws from several files: which one is next is drawn by weight, and each has a cursor of its own."""

    def __init__(self, mixture: Mixture, seed: int) -> None:
        self._weights, self._seed, self._position = mixture.weights, seed, 0
        self._cursors = [DataCursor(file, derive_seed(seed, "file", i)) for i, file in enumerate(mixture.files)]

    def next_problem(self) -> Problem:
        rng = random.Random(f"data/{self._seed}/mixture/{self._position}")
        self._position += 1
        return rng.choices(self._cursors, self._weights)[0].next_problem()

    def state(self) -> CursorState:
        return CursorState(0, self._position, tuple(cursor.state() for cursor in self._cursors))

    def load(self, state: CursorState) -> None:
        if len(state.files) != len(self._cursors):
            raise ValueError(
                f"the checkpoint stands in {len(state.files) or 'no'} files with a weight, but data.train has "
                f"{len(self._cursors)}; resume with the data that the run was started with"
            )
        self._position = state.position
        for cursor, each in zip(self._cursors, state.files, strict=True):
            cursor.load(each)


def draw_endlessly(problems: Sequence[Problem], seed: int) -> ProblemSource:
    """Draws that derive from the seed alone: by weight of a mixture, else each problem once an epoch."""
    return MixtureCursor(problems, seed) if isinstance(problems, Mixture) else DataCursor(problems, seed)
