"""`task: reasoning_gym`: problems drawn by reasoning-gym, and its scorers (PyPI: reasoning-gym; the extra reasoning_gym).

    task_options: {dataset: chain_sum, min_terms: 2, size: 1000, seed: 0}

Some datasets depend on Python's hash seed (word_ladder, ransom_note, ...), so problems are drawn, and judged, in processes with a
fixed hash seed. A judge draws a problem again by its id, because scorers need more than the question and answer.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from marsrl.rollout.config import Count
from marsrl.rollout.rewards.config import JudgeOptions
from marsrl.rollout.rewards.judge import judge_processes
from marsrl.rollout.tasks.own_task import OwnTask
from marsrl.rollout.types import Problem
from marsrl.rollout.worker_process import Answer, Failed, NotStarted

_DRAW_S = 600.0  # timeout for drawing all problems; most datasets draw a thousand in a second


class ReasoningGym(OwnTask):
    """Problems of one dataset, or of several by weight: dataset=composite."""

    name = "reasoning_gym"
    prompts = "qa"  # prompt set that asks for an answer between <answer> tags; the answer may have several lines

    class Options(JudgeOptions):
        """Settings of reasoning_gym under task_options. All other keys are settings of the dataset."""

        model_config = ConfigDict(extra="allow")

        dataset: str = Field(description="for example chain_sum; composite: several datasets, listed in `datasets`")
        size: Count = Field(1000, description="training problems to draw; repeated and held-out ones are removed")
        seed: int = Field(0, ge=0, lt=2**31, description="seed of the training problems")
        eval_size: Count = Field(200, description="evaluation problems to draw; repeated ones are removed")
        eval_seed: int = Field(2**30, ge=0, lt=2**31, description="seed of the evaluation problems")

        @model_validator(mode="after")
        def _draws_are_apart(self) -> ReasoningGym.Options:
            first, second = sorted([(self.seed, self.size), (self.eval_seed, self.eval_size)])
            if second[0] < sum(first):  # reasoning-gym draws problem i of a dataset by seed + i
                raise ValueError(
                    f"task_options.seed={self.seed} with size={self.size} and eval_seed={self.eval_seed} with "
                    f"eval_size={self.eval_size} draw the same problems; expected seeds that differ by size or more"
                )
            return self

    options: Options

    def problems(self) -> list[Problem]:
        held_out = {problem.question for problem in self.held_out()}
        return [problem for problem in self._drawn[0] if problem.question not in held_out]

    def held_out(self) -> list[Problem]:
        return self._drawn[1]

    def reward(self, problem: Problem, answer: str) -> float:
        seed, index = map(int, problem.id.split("/"))
        data = self._data_of(seed)
        entry = data[index]
        if entry["question"] != problem.question:
            raise ValueError(
                f"{self.options.dataset} no longer draws the same problem as {problem.id}; install the version of "
                "reasoning-gym that drew it"
            )
        return float(data.score_answer(answer, entry))

    @functools.cached_property
    def _drawn(self) -> tuple[list[Problem], list[Problem]]:
        """Return training and evaluation problems, without repeated questions."""
        given = {"options": self.options.model_dump()}
        pool = judge_processes(1, f"{__name__}:load_drawer", given)
        try:
            reply = pool.ask({}, timeout_s=_DRAW_S)
        except (NotStarted, Failed) as error:
            raise ValueError(
                f"the process that draws problems of task_options.dataset={self.options.dataset} {error}; lower "
                "task_options.size, or see its output above"
            ) from error
        finally:
            pool.close()
        if "error" in reply:
            raise ValueError(f"task_options: {reply['error']}")
        train, held_out = (
            [
                Problem(uid, question, answer, self.name)
                for uid, question, answer in {drawn[1]: drawn for drawn in reply[key]}.values()
            ]
            for key in ("train", "held_out")
        )
        return train, held_out

    @functools.cache  # noqa: B019  # two seeds, and the object lives as long as its process
    def _data_of(self, seed: int) -> Any:
        """Return the dataset with this seed."""
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS, create_dataset

        options, name = dict(self.options.model_extra or {}), self.options.dataset
        if name not in DATASETS:
            near = ", ".join(difflib.get_close_matches(name, DATASETS, n=5, cutoff=0))
            raise ValueError(
                f"dataset is {name!r}; expected one of reasoning_gym's {len(DATASETS)} datasets, the closest: {near}"
            )
        if name == "composite":
            given = options.pop("datasets", ())
            options["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **each}) for each in given]
        size = self.options.size if seed == self.options.seed else self.options.eval_size
        return create_dataset(name, seed=seed, size=size, **options)


def gym_judge(task: str, options: dict[str, Any]) -> Callable[[Problem, str], float]:
    """Return the function that judges answers, for a judge process. Imports reasoning_gym before a judgement is timed."""
    judge_task = ReasoningGym(ReasoningGym.Options(**options))
    judge_task._data_of(judge_task.options.seed)
    return judge_task.reward


def load_drawer(options: dict[str, Any]) -> Answer:
    """Return the function that draws all problems, for a worker process."""
    task = ReasoningGym(ReasoningGym.Options(**options))

    def draw(seed: int, size: int) -> list[tuple[str, str, str | None]]:
        data = task._data_of(seed)
        return [(f"{seed}/{i}", entry["question"], entry["answer"]) for i in range(size) for entry in [data[i]]]

    given = task.options
    return lambda _: {"train": draw(given.seed, given.size), "held_out": draw(given.eval_seed, given.eval_size)}
