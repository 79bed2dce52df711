"""Options of the tasks (`task_options` of a run). Import-light: pydantic only."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from marsrl.rollout.config import MOST, Count, Settings, Share, Tokens, read_settings


class TrainFile(Settings):
    """One of several files of problems: with a count, or with a weight."""

    path: str = Field(description="jsonl, json, parquet or HF dataset directory")
    count: Count | None = Field(None, description="so many of its problems, by a seeded draw")
    weight: float | None = Field(None, gt=0, le=MOST)
    """chance that a draw is of this file, beside the other weights"""


class EvalFile(Settings):
    """One of several files of problems to evaluate on."""

    path: str = Field(description="jsonl, json, parquet or HF dataset directory")
    name: str | None = Field(None, description="of its metrics: letters, digits, _ and -; default: the file's name")
    count: Count | None = None
    """so many of its problems, by a seeded draw; default: all, or evaluate.num_problems"""
    repeat: Count | None = Field(None, description="draws of every problem; default: evaluate.repeat")

    @property
    def set_name(self) -> str:
        return self.name or re.sub(r"[^\w-]", "_", Path(self.path).stem, flags=re.ASCII)


_EXPECTED = {
    "data.train": "expected a path, or a list of {path, count}, or of {path, weight}",
    "data.eval": "expected a path, or a list of paths and of {path, name, count, repeat}",
}
_TAKEN = ("system", "alone", "tokens", "spent")  # of the sets in metrics eval/...
_File = TypeVar("_File", TrainFile, EvalFile)


def _listed(value: Any, key: str, kind: type[_File], *accepted: type) -> list[_File]:
    """The files of a list; ValueError names the index of the invalid item. accepted: describes a valid item."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{key} is {value!r:.80}; {_EXPECTED[key]}")
    files: list[_File] = []
    for place, each in enumerate(value):
        if not isinstance(each, (kind, *accepted)):
            raise ValueError(f"{key}[{place}] is {each!r:.80}; {_EXPECTED[key]}")
        given: Any = {"path": each} if isinstance(each, str) else each
        files.append(given if isinstance(given, kind) else read_settings(kind, given, f"{key}[{place}]."))
    return files


def read_train_files(value: Any) -> Any:
    """Validate data.train: a path unchanged, a list as TrainFiles; ValueError names the index of the invalid item."""
    if value is None or isinstance(value, str):
        return value
    files = _listed(value, "data.train", TrainFile, dict)
    places: dict[str, int] = {}
    for place, file in enumerate(files):
        if (file.count is None) == (file.weight is None) or (file.count is None) != (files[0].count is None):
            raise ValueError(
                f"data.train[{place}]: give every file a count, or every file a weight; {_EXPECTED['data.train']}"
            )
        if (other := places.setdefault(os.path.realpath(file.path), place)) != place:
            raise ValueError(
                f"data.train[{place}] is the file of data.train[{other}], {file.path}, whose problems would come twice; "
                "list it once, with the sum"
            )
    return tuple(files)


def read_eval_files(value: Any) -> Any:
    """Validate data.eval: a path unchanged, a list as EvalFiles; ValueError names the index of the invalid item."""
    if value is None or isinstance(value, str):
        return value
    files: dict[str, EvalFile] = {}
    for place, file in enumerate(_listed(value, "data.eval", EvalFile, str, dict)):
        name = file.set_name
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) or name in _TAKEN:
            raise ValueError(
                f"data.eval[{place}]: its metrics would be called {name!r:.80}; give it a name of 1 to 64 letters, digits, _ and "
                f"-, other than {', '.join(_TAKEN)}"
            )
        if name in files:
            raise ValueError(f"data.eval[{place}]: two sets are called {name}; give one of them another name")
        files[name] = file
    return tuple(files.values())


class ArithmeticOptions(Settings):
    """The last-digit chain: which problems are made and how often the tutors slip, relative to each other."""

    min_operations: int = Field(4, ge=1, le=7, description="operations of the shortest problem")
    max_operations: int = Field(7, ge=1, le=7, description="operations of the longest problem (a letter names each)")
    slip_add: float = Field(1.0, ge=0, description="weight of a tutor's slips at +")
    slip_subtract: float = Field(1.5, ge=0, description="weight of a tutor's slips at -")
    slip_multiply: float = Field(2.5, ge=0, description="weight of a tutor's slips at *")

    @model_validator(mode="after")
    def _lengths_agree(self) -> ArithmeticOptions:
        if self.min_operations > self.max_operations:
            raise ValueError(
                f"task_options.min_operations is {self.min_operations}, above task_options.max_operations = "
                f"{self.max_operations}"
            )
        return self


class ArithmeticSlips(Settings):
    """Error rates of the tutors on the last-digit chain."""

    slip_solver: Share = 0.10
    """wrong lines of the Solver's tutor in phase 2, as a share: fewer leave RL less to improve (docs/cpu_default.md)"""
    slip_verifier: Share = 0.10
    """wrong lines where the Verifier's tutor works the chain out itself, as a share"""
    slip_corrector: Share = Field(0.12, description="wrong lines of the Corrector's tutor, as a share")
    anchor: Share = Field(0.2, description="share of reports that take the claim as their own result")
    restate: Share = Field(0.4, description="share of corrections that rebut whatever the report says")
    hard_claims: Share = 0.5
    """share of the Verifier's inputs that are full of slips; without them some seeds learn to copy, and stay at chance"""
    slip_hard: Share = Field(0.4, description="slips a line in those")


class FactsOptions(Settings):
    """The built-in corpus of linked facts, and the questions about it."""

    people: int = Field(200, ge=2, le=1600, description="of the generated world")
    places: int = Field(24, ge=2, le=40, description="of the generated world")
    papers: int = Field(200, ge=2, le=1600, description="by people of the generated world: what tools.scholar finds")
    about: Literal["facts", "papers"] = "facts"
    """what is asked: facts of people and places, or of papers and those who wrote them"""
    min_hops: int = Field(1, ge=1, le=4, description="facts that the simplest question needs")
    max_hops: int = Field(2, ge=1, le=4, description="facts that the hardest question needs")
    calculations: Share = 0.0
    """share of the questions that ask to calculate (7 times 8), for a team that has Python"""
    world_seed: int = Field(0, ge=0, le=2**31 - 1, description="of the facts; the same in runs of every run.seed")
    wording: Literal["sentences", "terse"] = "sentences"
    """sentences: `the home of lotte holt is brill .`, `what is the river of the home of lotte holt ?`; terse, for tiny
    policies: names of one word (40 people at most), `mira home tarn .`, `mira home river ?`"""

    @model_validator(mode="after")
    def _settings_agree(self) -> FactsOptions:
        if self.min_hops > self.max_hops:
            raise ValueError(f"task_options.min_hops is {self.min_hops}, above task_options.max_hops = {self.max_hops}")
        if self.wording == "terse" and self.people > 40:
            raise ValueError(
                f"task_options.people is {self.people}, and with task_options.wording=terse there are 40 names; set 40 or fewer"
            )
        return self


class SearchSlips(Settings):
    """Error rates of the search team's tutors on linked facts."""

    slip_router: Share = Field(0.15, description="of what the Verifier says with a fact still missing: yes")
    slip_searcher: Share = Field(0.2, description="of the queries after the first: for another fact of the document")
    slip_answerer: Share = Field(0.25, description="of the answers: another fact of the document")


class DualSystemSlips(Settings):
    """Error rates of the tutors of System 2 and System 1 on linked facts and calculations."""

    slip_call: Share = Field(0.08, description="of System 2's calls: its JSON has no end")
    slip_purpose: Share = Field(0.12, description="of its searches: for another fact of the document")
    slip_guess: Share = Field(0.5, description="of the calculations: answered without a call, by any number")
    slip_distiller: Share = Field(0.15, description="of what System 1 writes down: another fact")


class QaOptions(FactsOptions):
    """The judgement of answers to questions; and the built-in questions, where data.train is null."""

    reward: Literal["exact", "f1"] = "exact"
    """of the right answer that fits best: exact: equal but for case, articles, punctuation and space (SQuAD); f1: of its
    words"""
    max_answer_chars: Tokens = Field(2000, description="a longer answer is wrong")
