"""Settings of tasks: the files of problems (data.train, data.eval), `task_options`, and what tutors of the warm start write.

Imports only pydantic. A tutor writes completions for an agent to learn from; a *slip* is a deliberate mistake in them,
which leaves RL something to improve.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from marsrl.rollout.config import MOST, Count, CountOr0, Settings, Share, Tokens, read_settings


class TrainFile(Settings):
    """One of several files of training problems, with a count or a weight."""

    path: str = Field(description="jsonl, json, parquet or HF dataset directory")
    count: Count | None = Field(None, description="number of its problems to sample (seeded)")
    weight: float | None = Field(None, gt=0, le=MOST)
    """share of draws from this file, relative to the other weights"""


class EvalFile(Settings):
    """One of several files of evaluation problems, with separate metrics."""

    path: str = Field(description="jsonl, json, parquet or HF dataset directory")
    name: str | None = Field(None, description="name in metrics: letters, digits, _ and -; default: the file's name")
    count: Count | None = None
    """number of its problems to sample (seeded); default: all, or evaluate.num_problems"""
    repeat: Count | None = Field(None, description="draws per problem; default: evaluate.repeat")

    @property
    def set_name(self) -> str:
        """Name of the set in metrics: `name`, or the file's name with other characters replaced by _."""
        return self.name or re.sub(r"[^\w-]", "_", Path(self.path).stem, flags=re.ASCII)


_EXPECTED = {
    "data.train": "expected a path, or a list of {path, count}, or of {path, weight}",
    "data.eval": "expected a path, or a list of paths and of {path, name, count, repeat}",
}
_RESERVED = ("system", "alone", "tokens")  # eval/<set> would hide these metrics of evaluations
_File = TypeVar("_File", TrainFile, EvalFile)


def read_train_files(value: Any) -> Any:
    """Validate data.train: a list becomes a tuple of TrainFiles, a path stays. ValueError names the invalid item's index."""
    if value is None or isinstance(value, str):
        return value
    files = _read_list(value, "data.train", TrainFile, dict)
    index_of_path: dict[str, int] = {}
    for index, file in enumerate(files):
        has_one = (file.count is None) != (file.weight is None)
        if not has_one or (file.count is None) != (files[0].count is None):
            raise ValueError(
                f"data.train[{index}]: found a mix of counts and weights, or neither; {_EXPECTED['data.train']}; give "
                "every file a count, or every file a weight"
            )
        if (first := index_of_path.setdefault(os.path.realpath(file.path), index)) != index:
            raise ValueError(
                f"data.train[{index}] is the same file as data.train[{first}], {file.path}: its problems would be used "
                "twice; list it once, with the sum of its counts or weights"
            )
    return tuple(files)


def read_eval_files(value: Any) -> Any:
    """Validate data.eval: a list becomes a tuple of EvalFiles, a path stays. ValueError names the invalid item's index."""
    if value is None or isinstance(value, str):
        return value
    files: dict[str, EvalFile] = {}
    for index, file in enumerate(_read_list(value, "data.eval", EvalFile, str, dict)):
        name = file.set_name
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) or name in _RESERVED:
            raise ValueError(
                f"data.eval[{index}]: its metrics would be called {name!r:.80}; give it a name of 1 to 64 letters, digits, _ and "
                f"-, other than {', '.join(_RESERVED)}"
            )
        if name in files:
            raise ValueError(f"data.eval[{index}]: two sets are called {name}; give one of them another name")
        files[name] = file
    return tuple(files.values())


def _read_list(value: Any, key: str, kind: type[_File], *accepted: type) -> list[_File]:
    """Read the items of a list of files. accepted: item types besides `kind`; a str is a path. ValueError names the index."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{key} is {value!r:.80}; {_EXPECTED[key]}")
    files: list[_File] = []
    for index, item in enumerate(value):
        if not isinstance(item, (kind, *accepted)):
            raise ValueError(f"{key}[{index}] is {item!r:.80}; {_EXPECTED[key]}")
        fields: Any = {"path": item} if isinstance(item, str) else item
        files.append(fields if isinstance(fields, kind) else read_settings(kind, fields, f"{key}[{index}]."))
    return files


class ArithmeticOptions(Settings):
    """Last-digit chains (docs/cpu_default.md): their length, and the relative error rates of tutors by operator."""

    min_operations: int = Field(4, ge=1, le=7, description="operations in the shortest problem")
    max_operations: int = Field(7, ge=1, le=7, description="operations in the longest problem (each has a letter)")
    slip_add: float = Field(1.0, ge=0, description="relative error rate of tutors at +")
    slip_subtract: float = Field(1.5, ge=0, description="relative error rate of tutors at -")
    slip_multiply: float = Field(2.5, ge=0, description="relative error rate of tutors at *")

    @model_validator(mode="after")
    def _lengths_agree(self) -> ArithmeticOptions:
        if self.min_operations > self.max_operations:
            raise ValueError(
                f"task_options.min_operations is {self.min_operations}; expected at most task_options.max_operations = "
                f"{self.max_operations}"
            )
        return self


class FactsOptions(Settings):
    """The generated world of linked facts (people, places, papers), and the questions about it."""

    people: int = Field(200, ge=2, le=1600, description="people in the generated world")
    places: int = Field(24, ge=2, le=40, description="places in the generated world")
    papers: int = Field(200, ge=2, le=1600, description="papers in the generated world, for tools.scholar")
    about: Literal["facts", "papers"] = "facts"
    """subject of the questions: facts about people and places, or papers and their authors"""
    min_hops: int = Field(1, ge=1, le=4, description="facts needed for the simplest question")
    max_hops: int = Field(2, ge=1, le=4, description="facts needed for the hardest question")
    calculations: Share = 0.0
    """share of questions that need a calculation (7 times 8), for teams with the tool python"""
    world_seed: int = Field(0, ge=0, le=2**31 - 1, description="seed of the facts, independent of run.seed")
    wording: Literal["sentences", "terse"] = "sentences"
    """sentences: `the home of lotte holt is brill .`, `what is the river of the home of lotte holt ?`. terse: names of
    one word (at most 40 people), for tiny policies: `mira home tarn .`, `mira home river ?`"""

    @model_validator(mode="after")
    def _settings_agree(self) -> FactsOptions:
        if self.min_hops > self.max_hops:
            raise ValueError(
                f"task_options.min_hops is {self.min_hops}; expected at most task_options.max_hops = {self.max_hops}"
            )
        if self.wording == "terse" and self.people > 40:
            raise ValueError(
                f"task_options.people is {self.people}, but task_options.wording=terse has 40 names; set 40 or fewer"
            )
        return self


class QaOptions(FactsOptions):
    """Judgement of answers to questions, and the built-in questions if data.train is null."""

    reward: Literal["exact", "f1"] = "exact"
    """reward of an answer, by the best-matching reference. exact: equal up to case, articles, punctuation and spaces (SQuAD), or
    two equal numbers; f1: word overlap"""
    max_answer_chars: Tokens = Field(2000, description="longer answers count as wrong")


class TutorConfig(Settings):
    """Settings of the tutors for last-digit chains: form of a step, and shares of wrong lines."""

    slip_solver: Share = 0.10
    """share of wrong lines of the Solver's tutor in phase 2; a lower share leaves RL less to improve (docs/cpu_default.md)"""
    slip_verifier: Share = 0.10
    """share of wrong lines of the Verifier's tutor when the tutor computes the chain itself"""
    slip_corrector: Share = Field(0.12, description="share of wrong lines of the Corrector's tutor")
    anchor: Share = Field(0.2, description="share of reports that copy the Solver's answer as their own result")
    solver_batch: Count = Field(
        32, description="problems per step in phase 1, which teaches one role; for the search team, drills per step"
    )
    team_batch: Count = Field(16, description="problems per step in phase 2 (all roles)")
    short_steps: CountOr0 = Field(120, description="number of steps at the start of phase 1 with short problems")
    equality_drills: CountOr0 = Field(64, description="drills per step in which the Verifier compares two digits")
    table_drills: CountOr0 = Field(256, description="drills of a single operation, per step in phase 1")
