"""Training and evaluation problems of one or several files, and the order of their draws.

Several training files have counts or weights (data.train); each evaluation file is a named set (data.eval).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from marsrl.rollout.rewards.judge import Judge
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.config import EvalFile, TrainFile
from marsrl.rollout.tasks.data import ReadResult, draw_held_out, in_epochs
from marsrl.rollout.tasks.protocol import ProblemSource, Task
from marsrl.rollout.types import Problem

_File = TypeVar("_File", TrainFile, EvalFile)
Read = Callable[[str], ReadResult]
"""Reader of a path's problems: data.read_problems with the settings shared by all files."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A set of evaluation problems, each drawn `repeat` times. name: name in metrics; "" if it is the only set."""

    name: str
    problems: Sequence[Problem]
    repeat: int


class Mixture(tuple[Problem, ...]):
    """Problems of several files in order; `draw_endlessly` draws files by weight."""

    files: tuple[tuple[Problem, ...], ...]
    weights: tuple[float, ...]

    def __new__(cls, files: Sequence[Sequence[Problem]], weights: Sequence[float]) -> Mixture:
        """Build from at least one problem per file."""
        mixture = super().__new__(cls, (problem for file in files for problem in file))
        mixture.files, mixture.weights = tuple(map(tuple, files)), tuple(weights)
        return mixture

    def without(self, questions: Collection[str]) -> Mixture:
        """Return a Mixture without these questions; ValueError names a file that would be empty."""
        files = [[problem for problem in file if problem.question not in questions] for file in self.files]
        for index, file in enumerate(files):
            if not file:
                raise ValueError(
                    f"data.train[{index}]: all of its {len(self.files[index])} questions are held out for evaluation; set "
                    "data.eval, or use a longer file"
                )
        return Mixture(files, self.weights)


def read_train(train: str | Sequence[TrainFile], read: Read, seed: int) -> ReadResult:
    """Read the problems of data.train: a path, files with counts, or files with weights, which give a Mixture.

    With a list of files, ids begin with the file's index (`0/train.jsonl:7`), and error messages name it (`data.train[0]: ...`).
    """
    if isinstance(train, str):
        return read_named("data.train", train, read)
    files: list[list[Problem]] = []
    num_bad, warnings = 0, list[str]()
    for index, (file, result) in enumerate(_each("data.train", train, read)):
        problems: Sequence[Problem] = result.problems
        if file.count is not None:
            drawn = random.Random(f"data/{seed}/count/{index}").sample(range(len(problems)), file.count)
            problems = [problems[i] for i in sorted(drawn)]
        files.append([replace(problem, id=f"{index}/{problem.id}") for problem in problems])
        num_bad += result.num_bad
        warnings += result.warnings
    weights = [file.weight for file in train if file.weight is not None]
    listed = Mixture(files, weights) if weights else tuple(problem for file in files for problem in file)
    return ReadResult(listed, num_bad, tuple(warnings))


def read_eval(
    files: Sequence[EvalFile], read: Read, task: str, seed: int, num_problems: int | None, repeat: int
) -> tuple[tuple[HeldOut, ...], int, tuple[str, ...]]:
    """Return (one set per file, number of skipped lines, warnings). Ids begin with the set's name, `aime25/aime25.jsonl:7`.

    A file's draw does not depend on the other files. num_problems (maximum per file; None: all) and repeat: defaults for
    files without their own count or repeat. A ValueError of read_problems names the file's index.
    """
    sets, num_bad, warnings = [], 0, list[str]()
    for file, result in _each("data.eval", files, read):
        drawn = draw_held_out(result.problems, file.count or num_problems, task, seed)
        problems = [replace(problem, id=f"{file.set_name}/{problem.id}") for problem in drawn]
        sets.append(HeldOut(file.set_name, problems, file.repeat or repeat))
        num_bad += result.num_bad
        warnings += result.warnings
    return tuple(sets), num_bad, tuple(warnings)


def read_named(key: str, path: str, read: Read) -> ReadResult:
    """Read the problems of a path; ValueError begins with the setting that names it."""
    try:
        return read(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{key}: {str(error).removeprefix('data: ')}") from error


def _each(key: str, files: Sequence[_File], read: Read) -> Iterator[tuple[_File, ReadResult]]:
    """Yield each file with its problems; ValueError names a file that is unreadable or has fewer than its count."""
    for index, file in enumerate(files):
        result = read_named(f"{key}[{index}]", file.path, read)
        if file.count is not None and len(result.problems) < file.count:
            raise ValueError(
                f"{key}[{index}]: {file.path} has {len(result.problems):,} problems, fewer than count = {file.count:,}; "
                "lower it"
            )
        yield file, result


def draw_endlessly(problems: Sequence[Problem], seed: int) -> ProblemSource:
    """Return endless draws determined by the seed: each problem once per epoch.

    For a mixture, each draw picks a file by weight, and then its next problem.
    """
    if not isinstance(problems, Mixture):
        return in_epochs(problems, seed)
    sources = [in_epochs(file, derive_seed(seed, "file", i)) for i, file in enumerate(problems.files)]
    # For each draw so far: (index of the file, number of earlier draws of that file).
    picked: list[tuple[int, int]] = []
    num_drawn = [0] * len(sources)

    def draw(number: int) -> Problem:
        for each in range(len(picked), number + 1):
            rng = random.Random(f"data/{seed}/mixture/{each}")
            [file] = rng.choices(range(len(sources)), problems.weights)
            picked.append((file, num_drawn[file]))
            num_drawn[file] += 1
        file, place = picked[number]
        return sources[file](place)

    return draw


def listed_task(
    name: str,
    prompts: str,
    train: Sequence[Problem],
    held_out: Sequence[Problem],
    judge: Judge,
    close: Callable[[], None] = lambda: None,
) -> Task:
    """Build a task from given problems. Held-out problems are drawn without replacement."""
    return Task(
        name,
        prompts,
        lambda seed: draw_endlessly(train, seed),
        lambda num_problems, seed: draw_held_out(held_out, num_problems, name, seed),
        judge,
        close=close,
    )
