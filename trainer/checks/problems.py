"""Training and evaluation problems of a run, from files or the user's task."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from marsrl.rollout.tasks.data import ReadResult, one_spaced, read_problems, repeats, shared_answers
from marsrl.rollout.tasks.find_task import lists_problems, own_problems
from marsrl.rollout.tasks.problem_files import HeldOut, Mixture, read_eval, read_named, read_train
from marsrl.rollout.tasks.protocol import EVALUATION_SET, HELD_OUT
from marsrl.rollout.types import Problem
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import ConfigError


@dataclass(frozen=True, slots=True)
class RunProblems:
    """Problems to train and to evaluate on.

    train: problems to train on; () for a task that generates them.
    held_out: problems to evaluate on.
    sets: the sets of data.eval, if that is a list.
    num_skipped: number of skipped lines in data.train and data.eval (data.on_bad_line=skip).
    num_taken: number of problems taken from the training data for evaluation; 0 if the run has evaluation problems.
    warnings: sentences about repeated questions, and about answers that are placeholders.
    """

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    sets: tuple[HeldOut, ...] = ()
    num_skipped: int = 0
    num_taken: int = 0
    warnings: tuple[str, ...] = ()


def sources(task: str) -> tuple[str, str]:
    """Return the sources of training and evaluation problems, as the user named them."""
    return ("problems", "held_out") if lists_problems(task) else ("data.train", "data.eval")


def problems_of(config: RunConfig, *, trains: bool, given: Sequence[Problem] | None) -> RunProblems:
    """Return the problems of the files or the user's task.

    Without evaluation problems, some training problems are held out.

    given: problems to evaluate on; no files are read then. None: read the files.
    """
    data = read_data(config) if given is None else RunProblems((), given)
    train_source, eval_source = sources(config.task)
    train, held_out, num_taken = data.train, data.held_out, 0
    warnings = [*data.warnings, *repeats(train, train_source), *repeats(held_out, eval_source)]
    warnings += [*shared_answers(train, train_source), *shared_answers(held_out, eval_source)]
    if trains and held_out:
        warnings += _trained_too(train, held_out, train_source, eval_source)
    if not trains and not train:
        train = held_out  # Never sampled, but a task that reads files needs training problems.
    if train and not held_out:
        train, held_out = hold_out(train, config.evaluate.num_problems or HELD_OUT)
        num_taken = len(held_out)
        if not held_out:
            no_problem_left = (
                f"{train_source} has one question, so none is left to evaluate on; give other problems in {eval_source}"
            )
            if not trains:
                raise ConfigError(no_problem_left)
            if config.run.evaluate or config.run.eval_every:
                warnings.append(f"{no_problem_left}, or set run.evaluate=false; nothing is evaluated")
    return RunProblems(train, held_out, data.sets, data.num_skipped, num_taken, tuple(warnings))


def _trained_too(
    train: Sequence[Problem], held_out: Sequence[Problem], train_source: str, eval_source: str
) -> list[str]:
    """Return a warning if some evaluation questions are also training questions; raise ConfigError if all are."""
    trained = {one_spaced(problem.question) for problem in train}
    both = [problem for problem in held_out if one_spaced(problem.question) in trained]
    if not both:
        return []
    overlap = f"{len(both):,} of the {len(held_out):,} problems of {eval_source} are also in {train_source}, first {both[0].id}"
    if len(both) == len(held_out):
        raise ConfigError(
            f"{overlap}; an evaluation would measure memorisation: give other problems, or remove {eval_source} to hold "
            f"out a part of {train_source}"
        )
    return [f"{overlap}; their results do not measure generalisation"]


def read_data(config: RunConfig) -> RunProblems:
    """Read data.train and data.eval, or the problems of the user's task; () for a file that is not set."""
    data = config.data

    def read(path: str) -> ReadResult:
        return read_problems(
            path, config.task, data.question_key, data.answer_key, data.on_bad_line, data.on_placeholder
        )

    train: Sequence[Problem] = ()
    held_out: tuple[Problem, ...] = ()
    sets: tuple[HeldOut, ...] = ()
    num_skipped, warnings = 0, list[str]()
    if data.train:
        result = read_train(data.train, read, config.run.seed)
        train, num_skipped = result.problems, result.num_bad
        warnings += result.warnings
    if isinstance(data.eval, str):
        result = read_named("data.eval", data.eval, read)
        held_out, num_skipped = result.problems, num_skipped + result.num_bad
        warnings += result.warnings
    elif data.eval:
        sizes = config.evaluate
        sets, num_bad, set_warnings = read_eval(
            data.eval, read, config.task, EVALUATION_SET, sizes.num_problems, sizes.repeat
        )
        held_out, num_skipped = (
            tuple(problem for held_out_set in sets for problem in held_out_set.problems),
            num_skipped + num_bad,
        )
        warnings += set_warnings
    if lists_problems(config.task):
        if isinstance(train, Mixture):
            raise ConfigError(
                f"data.train has weights, but task={config.task} lists its problems, each sampled once per epoch; give "
                "counts (data.train: [{path, count}, ...])"
            )
        own_train, own_held_out = own_problems(config.task, config.task_options, train, held_out)
        if sets and tuple(own_held_out) != held_out:
            raise ConfigError(
                f"data.eval is a list, but task={config.task} defines its evaluation problems (held_out); give one path, or "
                "have held_out return self.eval_data"
            )
        return RunProblems(own_train, own_held_out, sets, num_skipped, warnings=tuple(warnings))
    return RunProblems(train, held_out, sets, num_skipped, warnings=tuple(warnings))


def hold_out(problems: Sequence[Problem], max_questions: int) -> tuple[Sequence[Problem], list[Problem]]:
    """Return (train, held out). Held out is the tenth of the questions with the lowest hashes, at most `max_questions`.

    The split does not depend on the file's order and keeps questions together that differ only in white space. Of two or more
    questions, each side gets at least one.
    """
    alike: dict[str, set[str]] = {}
    for problem in problems:
        alike.setdefault(one_spaced(problem.question), set()).add(problem.question)
    questions = sorted(alike.values(), key=lambda group: min((zlib.crc32(text.encode()), text) for text in group))
    most = min(max_questions, max(1, len(questions) // 10)) if len(questions) > 1 else 0
    chosen = set[str]().union(*questions[:most])
    held_out = [problem for problem in problems if problem.question in chosen]
    if isinstance(problems, Mixture):
        return problems.without(chosen), held_out
    return [problem for problem in problems if problem.question not in chosen], held_out


def check_judge(config: RunConfig, problems: RunProblems, *, trains: bool) -> list[str]:
    """Return a warning if some problems have no reference answer; raise ConfigError if none has one."""
    judge, warnings = config.judge, list[str]()
    if judge is None:
        return warnings
    train_source, eval_source = sources(config.task)
    sets = [(train_source, problems.train)] if trains and judge.when == "always" else []
    for where, judged in [*sets, (eval_source, problems.held_out)]:
        num_without = sum(problem.answer is None for problem in judged)
        if judged and num_without == len(judged):
            raise ConfigError(
                f"judge.policy={judge.policy} needs reference answers, but none of the {len(judged)} problems of {where} has "
                "one; add them, or remove the judge so that the task judges"
            )
        if num_without:
            warnings.append(
                f"{num_without} of {len(judged)} problems of {where} have no reference answer; answers to them are not "
                "judged and have no reward"
            )
    return warnings
