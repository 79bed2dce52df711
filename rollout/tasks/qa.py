"""Questions with short answers, judged as in SQuAD: from files, or about the built-in linked facts."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from decimal import Decimal

from marsrl.rollout.rewards.judge import known
from marsrl.rollout.tasks.config import QaOptions
from marsrl.rollout.tasks.data import draw_held_out, right_answers
from marsrl.rollout.tasks.facts import World
from marsrl.rollout.tasks.problem_files import listed_task
from marsrl.rollout.tasks.protocol import HELD_OUT, Task
from marsrl.rollout.types import MISSING, Problem, Reward

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII = str.maketrans("‘’“”–—−", "''\"\"---")
_NO_PUNCTUATION = str.maketrans("", "", f"{string.punctuation}…")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[+-]?\.\d+")


def normalised(text: str) -> str:
    """Lower the case and remove punctuation, articles and extra space (in the order of SQuAD's evaluation script).

    Unlike the script, composes accents first (Unicode NFC), and also removes typographic quotes, dashes and invisible characters.
    """
    text = _plain(text).lower()
    return " ".join(_ARTICLES.sub(" ", text.translate(_NO_PUNCTUATION)).split())


def _plain(text: str) -> str:
    """Return the text with composed accents and ASCII quotes and dashes, without invisible characters such as U+200B."""
    text = unicodedata.normalize("NFC", text).translate(_ASCII)
    return "".join(char for char in text if unicodedata.category(char) != "Cf")


def _number(text: str) -> Decimal | None:
    text = _plain(text).strip().removesuffix(".")
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def exact_match(answer: str, right: str) -> float:
    """Return 1 if both texts are equal after normalisation, or if both are numbers of the same value.

    If normalisation leaves nothing ("The", "!"), the texts themselves must be equal.
    """
    number, right_number = _number(answer), _number(right)
    if number is not None and right_number is not None:
        return float(number == right_number)  # without punctuation 1.5 would equal 15, and -5 would equal 5
    normal_answer, normal_right = normalised(answer), normalised(right)
    if not normal_answer or not normal_right:
        return float(answer.strip().lower() == right.strip().lower())
    return float(normal_answer == normal_right)


def f1(answer: str, right: str) -> float:
    """Return the harmonic mean of precision and recall over the normalised words, counted with multiplicity.

    For two numbers, the result is 1 or 0, by value.
    """
    if _number(answer) is not None and _number(right) is not None:
        return exact_match(answer, right)
    answer_words, right_words = Counter(normalised(answer).split()), Counter(normalised(right).split())
    if not answer_words or not right_words:
        return exact_match(answer, right)
    return 2 * (answer_words & right_words).total() / (answer_words.total() + right_words.total())


def qa_task(train: Sequence[Problem], held_out: Sequence[Problem], options: QaOptions) -> Task:
    """Build the task. `train`: problems read from files; if empty, the problems are about the world of options.world_seed."""

    def judge(problem: Problem, answer: str) -> Future[Reward]:
        return known(_judgement(problem, answer, options))

    if train:
        return listed_task("qa", "qa", train, held_out, judge)
    world = World(options)

    def questions(num_problems: int | None, seed: int) -> list[Problem]:
        if held_out:
            return draw_held_out(held_out, num_problems, "qa", seed)
        return world.held_out(HELD_OUT if num_problems is None else num_problems, seed)

    papers = tuple(paper.document for paper in world.papers)
    return Task("qa", "qa", world.questions, questions, judge, world.documents, papers)


def _judgement(problem: Problem, answer: str, options: QaOptions) -> Reward:
    if problem.answer is None:
        return Reward(MISSING, MISSING, note="the question has no reference answer")
    if len(answer) > options.max_answer_chars:
        note = f"the answer has {len(answer):,} characters, more than task_options.max_answer_chars"
        return Reward(0.0, 0.0, {"answer": 0.0}, note)
    measure = exact_match if options.reward == "exact" else f1
    value = max(measure(answer, right) for right in right_answers(problem.answer))
    return Reward(value, value, {"answer": value})
