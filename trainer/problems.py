"""The problems of a run: those of its files or its own task, and those held out for evaluation."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from marsrl.rollout.own_classes import is_own
from marsrl.rollout.tasks.data import read_problems
from marsrl.rollout.tasks.eval_files import HeldOut, read_eval
from marsrl.rollout.tasks.own_task import own_problems
from marsrl.rollout.tasks.protocol import EVALUATION_SET
from marsrl.rollout.tasks.train_files import Mixture, read_train
from marsrl.rollout.types import Problem
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import ConfigError


def read_data(config: RunConfig) -> tuple[Sequence[Problem], Sequence[Problem], tuple[HeldOut, ...], int]:
    """Problems to train on, problems to evaluate on, the sets that those are of (() unless data.eval is a list), and the number
    of lines of data.train and data.eval left out.

    Those of the files, nothing where there is no file; or what a user's own task makes of them.
    """
    data = config.data
    how = (data.question_key, data.answer_key, data.on_bad_line)
    train: Sequence[Problem] = ()
    held_out: tuple[Problem, ...] = ()
    sets: tuple[HeldOut, ...] = ()
    num_skipped = 0
    if data.train:
        found = read_train(data.train, config.task, config.run.seed, *how)
        train, num_skipped = found.problems, found.num_bad
    if isinstance(data.eval, str):
        read = read_problems(data.eval, config.task, *how)
        held_out, num_skipped = read.problems, num_skipped + read.num_bad
    elif data.eval:
        if config.task == "arithmetic":
            raise ConfigError("data.eval is a list, and task=arithmetic makes its own problems; leave it out")
        sizes = config.evaluate
        sets, num_bad = read_eval(data.eval, config.task, EVALUATION_SET, sizes.num_problems, sizes.repeat, *how)
        held_out, num_skipped = tuple(problem for each in sets for problem in each.problems), num_skipped + num_bad
    if is_own(config.task):
        if isinstance(train, Mixture):
            raise ConfigError(
                f"data.train has weights, and task={config.task} lists its problems itself, each drawn once an epoch; give "
                "counts (data.train: [{path, count}, ...])"
            )
        own_train, own_held_out = own_problems(config.task, config.task_options, train, held_out)
        if sets and tuple(own_held_out) != held_out:
            raise ConfigError(
                f"data.eval is a list, and task={config.task} has other problems to evaluate on (held_out): give one path, or "
                "have held_out return self.eval_data"
            )
        return own_train, own_held_out, sets, num_skipped
    return train, held_out, sets, num_skipped


def hold_out(problems: Sequence[Problem], wanted: int) -> tuple[Sequence[Problem], list[Problem]]:
    """(train, held out): a tenth of the questions, those of the lowest hash, at most as many as an evaluation uses.

    The same questions whatever the order of the file, and equal questions on the same side. At least one question is
    left on either side; of a single one nothing is held out.
    """
    questions = sorted({p.question for p in problems}, key=lambda question: (zlib.crc32(question.encode()), question))
    chosen = set(questions[: min(wanted, max(1, len(questions) // 10))]) if len(questions) > 1 else set()
    held_out = [problem for problem in problems if problem.question in chosen]
    if isinstance(problems, Mixture):
        return problems.without(chosen), held_out
    return [problem for problem in problems if problem.question not in chosen], held_out
