"""`marsrl check-answers`: check that the judge rewards a reference in any notation, and rejects wrong answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.table import Table
from rich.text import Text

from marsrl.commands.check_answers import alterations, notations
from marsrl.rollout.agents.parsers import Parser
from marsrl.rollout.agents.prompts import prompt_set
from marsrl.rollout.rewards.judge import Judge
from marsrl.rollout.tasks.data import draw_held_out, right_answers, shared_answers
from marsrl.rollout.tasks.placeholders import is_placeholder
from marsrl.rollout.tasks.qa import normalised
from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.types import Problem, Reward
from marsrl.trainer.checks.problems import read_data
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.origin import check_words
from marsrl.trainer.config.read import ConfigError, read_config
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.runs.directory import opened_atomically
from marsrl.trainer.visible import visible

_AT_ONCE = 16  # problems judged at once: more than there are judge processes, so that no process idles
_MOST_UNJUDGED = 3  # failed judgements before a problem is given up: each may take task_options.timeout_s
_MOST_ROWS, _MOST_ANSWERS, _MOST_CHARS = 10, 8, 80  # printed problems, answers per problem, characters per answer

Read = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Trial:
    """A judged answer. rule: how the answer was made from the reference. is_right: True if the judge should accept it."""

    problem: Problem
    rule: str
    answer: str
    is_right: bool
    reward: Reward

    @property
    def is_misjudged(self) -> bool:
        """True if a right answer is not rewarded in full, a wrong one is, or the reference itself cannot be judged."""
        if self.reward.is_missing:
            return self.rule == notations.ITSELF
        return (self.reward.correct >= 1) != self.is_right


@dataclass(frozen=True, slots=True)
class Checked:
    """Results of a check, in the order of the file.

    num_tried: number of problems tried. num_known: number of problems with a reference. num_skipped: lines without a problem.
    warnings: warnings about answers that many problems share.
    """

    trials: Sequence[Trial]
    num_tried: int
    num_known: int
    num_skipped: int
    warnings: Sequence[str]

    @property
    def misjudged(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.is_misjudged]


def check_answers(words: Sequence[str], config_file: str | None, num_problems: int, seed: int) -> Checked:
    """Judge answers to problems of a file, or of data.train, with the task's reward.

    words: a file, settings, or both. num_problems: maximum number of problems, sampled with the seed.

    Raises ValueError: the settings or the problems are invalid.
    """
    check_words(words)
    files = [word for word in words if "=" not in word or Path(word).exists()]
    if len(files) > 1:
        raise ConfigError(f"expected one file, found {', '.join(files)}; list several in data.train")
    arguments = [*([] if config_file else ["task=math"]), *(word for word in words if word not in files)]
    arguments += [f"data.train={json.dumps(file)}" for file in files]
    config, origin = read_config(
        config_file, [*arguments, "data.on_placeholder=keep", "data.on_bad_line=skip"], trains=False
    )
    with origin.places_in_errors():
        data = read_data(config)
        known = [problem for problem in data.train if problem.answer is not None]
        if not known:
            raise ConfigError("data.train has no problem with a reference answer; name a file that has")
        problems = draw_held_out(known, num_problems, "check-answers", seed)
        trials = _judged(config, problems, seed)
    return Checked(trials, len(problems), len(known), data.num_skipped, shared_answers(known, "data.train"))


def _judged(config: RunConfig, problems: Sequence[Problem], seed: int) -> list[Trial]:
    task = build_task(config.task, config.task_options, problems)
    read = _reader(prompt_set(task.prompts).parsers.get("answer"))
    trials: list[Trial] = []

    def tried(problem: Problem) -> list[Trial]:
        rng = Random(f"check-answers/{seed}/{problem.id}")
        return _tried(problem, task.judge, read, rng, is_text=config.task == "qa")

    with (
        contextlib.closing(task),
        ThreadPoolExecutor(_AT_ONCE) as threads,
        RunConsole().progress("check-answers", len(problems), "problems") as bar,
    ):
        for found in threads.map(tried, problems):
            trials += found
            bar.advance(note=f"{len(trials):,} answers")
    return trials


def _reader(parser: Parser | None) -> Read:
    """Return a function that writes an answer in the form that the prompt asks for, and parses it as in training."""
    form = None if parser is None else next((each for each in parser.examples if "ANSWER" in each), None)

    def read(answer: str) -> str | None:
        if parser is None or form is None:
            return answer
        found = parser.read(form.replace("ANSWER", answer))
        return found if isinstance(found, str) else None

    return read


def _tried(problem: Problem, judge: Judge, read: Read, rng: Random, *, is_text: bool) -> list[Trial]:
    """Judge the problem's answers one by one, and stop once _MOST_UNJUDGED of them could not be judged.

    is_text: answers are compared as text (task=qa).
    """
    references = right_answers(problem.answer or "") if is_text else [problem.answer or ""]
    planned: list[tuple[str, str, bool]] = []
    if not all(map(is_placeholder, references)):
        planned += [(*variant, True) for text in references for variant in notations.of(text, is_text=is_text)]
    right = {normalised(text) for text in references} if is_text else set()
    altered = alterations.of(references[0], rng, is_text=is_text)
    planned += [
        (*variant, False)
        for variant in altered
        if variant[0] == alterations.PLACEHOLDER or normalised(variant[1]) not in right
    ]
    trials: list[Trial] = []
    num_unjudged = 0
    for rule, answer, is_right in dict.fromkeys(planned):
        said = read(answer)
        reward = Reward(0.0, 0.0, note="no answer can be read") if said is None else judge(problem, said).result()
        trials.append(Trial(problem, rule, answer, is_right, reward))
        num_unjudged += reward.is_missing
        if num_unjudged == _MOST_UNJUDGED:
            break
    return trials


def counts(checked: Checked) -> Table:
    """Return a table with the number of trials of each rule."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    for _ in range(3):
        table.add_column(justify="right")
    for is_right, said, rules in ((True, "rejected", notations.RULES), (False, "accepted", alterations.RULES)):
        table.add_row(f"{'right' if is_right else 'wrong'} answers", "tried", said, "not judged")
        for rule in rules:
            if own := [trial for trial in checked.trials if (trial.rule, trial.is_right) == (rule, is_right)]:
                numbers = (len(own), sum(t.is_misjudged for t in own), sum(t.reward.is_missing for t in own))
                table.add_row(Text(f"  {rule}"), *(f"{number:,}" if number else "" for number in numbers))
    return table


def rows(checked: Checked) -> str:
    """Return the problems with the most misjudged answers as text for a terminal; "" if there are none."""
    by_problem: dict[str, list[Trial]] = {}
    for trial in checked.misjudged:
        by_problem.setdefault(trial.problem.id, []).append(trial)
    worst = sorted(by_problem.items(), key=lambda each: -len(each[1]))[:_MOST_ROWS]
    lines = (
        [f"{len(by_problem):,} of {checked.num_tried:,} problems have misjudged answers; the worst:"] if worst else []
    )
    for uid, trials in worst:
        lines.append(f"{uid}: {len(trials)} misjudged, reference {_short(trials[0].problem.answer or '')}")
        for trial in trials[:_MOST_ANSWERS]:
            said = "not judged" if trial.reward.is_missing else "rejected" if trial.is_right else "accepted"
            note = f": {_short(trial.reward.note)}" if trial.reward.note else ""
            lines.append(f"  {said}: {_short(trial.answer)} ({trial.rule}){note}")
    return "\n".join(lines)


def _short(text: str) -> str:
    line = visible(" ".join(text.split()))
    return line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]}..."


def write(checked: Checked, path: Path) -> None:
    """Write every misjudged answer as one JSON object per line."""
    with opened_atomically(path) as file:
        for trial in checked.misjudged:
            reward = None if trial.reward.is_missing else trial.reward.correct
            made = {
                "reference": trial.problem.answer,
                "answer": trial.answer,
                "rule": trial.rule,
                "is_right": trial.is_right,
            }
            row = {"id": trial.problem.id, **made, "reward": reward, "note": trial.reward.note}
            file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
