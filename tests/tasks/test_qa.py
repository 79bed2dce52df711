"""Answers to questions are judged as SQuAD's script judges them; the built-in facts are what their documents say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from marsrl.rollout.tasks.config import FactsOptions
from marsrl.rollout.tasks.data import read_problems, reference, right_answers
from marsrl.rollout.tasks.linked_facts import World, write_linked_facts
from marsrl.rollout.tasks.qa import QaTask, exact_match, f1
from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.tools.documents import read_corpus, read_papers
from marsrl.rollout.types import Problem

PARIS = Problem("1", "capital?", reference(["Paris", "City of Paris"]), "qa")


def judged(answer: str, problem: Problem = PARIS, **options: str | int) -> float:
    task = build_task("qa", options, [problem])
    return task.judge(problem, answer).result().value


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("The  Beatles!", "beatles", True),
        ("well-known", "well known", False),  # as the script: the hyphen goes, and leaves no space
        ("a an the x", "x", True),
        ("theatre", "atre", False),
        ("Tokyo\n", " tokyo ", True),
        ("?", "the", False),  # nothing is left of either
        ("", "", True),
    ],
)
def test_exact_match_is_squad_s(one: str, other: str, same: bool) -> None:
    assert exact_match(one, other) == exact_match(other, one) == float(same)


@pytest.mark.parametrize(
    ("answer", "right", "value"),
    [
        ("the big red dog", "red dog", 0.8),  # 2 of 3 words, all 2
        ("red red", "red dog", 0.5),  # a word counts as often as it stands there
        ("A dog.", "dog", 1.0),
        ("", "dog", 0.0),
        ("!", "!", 1.0),
    ],
)
def test_f1_is_that_of_words(answer: str, right: str, value: float) -> None:
    assert f1(answer, right) == pytest.approx(value) == f1(right, answer)


def test_the_right_answer_that_fits_best_counts() -> None:
    assert judged("the city of paris") == judged("PARIS.") == 1.0
    assert judged("Paris, France") == judged("") == 0.0
    assert judged("Paris, France", reward="f1") == pytest.approx(2 / 3)


def test_hostile_answers_are_judged_in_linear_time_or_wrong() -> None:
    assert judged("paris " * 10_000_000) == 0.0  # longer than max_answer_chars: not looked at
    assert judged("\ud800\x00 paris") == 0.0
    assert judged("the " * 100_000 + "paris", max_answer_chars=1_000_000) == 1.0


@pytest.mark.parametrize("answers", [["x"], ["x", "y"], ["[x"], ['["a"]'], ["[1]", "é\n"], ["[" * 10_000]])
def test_a_reference_gives_its_answers_back(answers: list[str]) -> None:
    assert right_answers(reference(answers)) == answers


@pytest.mark.parametrize("written", ["[", "[1]", "[]", "[" * 100_000, "plain"])
def test_what_a_user_writes_as_a_reference_is_one_answer_where_it_is_no_list_of_texts(written: str) -> None:
    assert right_answers(written) == [written]


# Files.


def read(tmp_path: Path, *rows: object, task: str = "qa") -> list[str | None]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return [problem.answer for problem in read_problems(path, task).problems]


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"question": "q", "golden_answers": ["a", "b"]}, ["a", "b"]),
        ({"question": "q", "answer": " a "}, ["a"]),
        ({"question": "q", "answer": ["a", 7]}, ["a", "7"]),
        # Search-R1's rows, and those that Dr. MAS's script makes of them
        ({"question": "q", "prompt": [{"role": "user", "content": "long"}], "golden_answers": ["a"]}, ["a"]),
        ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": {"target": ["a"]}}}, ["a"]),
        ({"question": "q", "answer": "it is #### 7"}, ["it is #### 7"]),  # GSM8K's mark means nothing here
    ],
)
def test_rows_of_questions_are_read(tmp_path: Path, row: dict[str, object], answers: list[str]) -> None:
    [found] = read(tmp_path, row)
    assert right_answers(found or "") == answers


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([], "is an empty list"),
        (["a", ""], "is empty"),
        ([["a"]], "is list"),
        ("\ud800", "lone surrogate"),
        (True, "is bool"),
    ],
)
def test_a_row_without_right_answers_is_named(tmp_path: Path, answers: object, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"rows.jsonl:1: .*{reason}"):
        read(tmp_path, {"question": "q", "golden_answers": answers})


# Linked facts.


@pytest.fixture(scope="module")
def world() -> World:
    return World(FactsOptions(max_hops=3))


def follow(world: World, question: str) -> str:
    """The answer, looked up in documents and papers alone, hop by hop."""
    said = {each.title: each.text for each in (*world.documents, *(paper.document for paper in world.papers))}
    words = question.removeprefix("what is ").removesuffix(" ?")
    path, _, value = words.rpartition(" of ")
    relations = [each.removeprefix("the ") for each in reversed(path.split(" of "))]
    if words == question.removesuffix(" ?"):  # in terse wording
        value, *relations = words.split()
    for relation in relations:
        found = re.findall(
            rf"the {relation} of {value} is ([a-z ]+) \.|\b{value} {relation} ([a-z]+) \.|{relation.title()}: (\d+)\.",
            said[value],
        )
        [value] = ["".join(each) for each in found]
    return value


@pytest.mark.parametrize(
    ("options", "relations"),
    [
        ({"max_hops": 3}, {"home", "friend", "teacher", "trade", "country", "river"}),
        (
            {"about": "papers", "max_hops": 3, "papers": 80},
            {"year", "citations", "author", "method", "basis", "rival", "home", "trade"},
        ),
        ({"people": 40, "places": 40, "wording": "terse"}, {"home", "friend", "river"}),
    ],
)
def test_answers_follow_from_the_documents_and_nothing_held_out_is_trained_on(
    options: dict[str, Any], relations: set[str]
) -> None:
    task, world = build_task("qa", options), World(FactsOptions(**options))
    assert isinstance(task, QaTask) and task.documents == world.documents and len(task.papers) == len(world.papers)
    source, seen = task.problems(0), set[str]()
    train, held_out = [source.next_problem() for _ in range(300)], task.held_out(60, 0)
    for problem in (*train, *held_out):
        steps = world.steps(problem)
        assert follow(world, problem.question) == problem.answer == steps[-1][2]
        assert [value for *_, value in steps[:-1]] == [entity for entity, *_ in steps[1:]]
        seen |= {relation for _, relation, _ in steps}
    assert seen >= relations and not {p.question for p in train} & {p.question for p in held_out}


def test_the_world_is_its_seed_s_and_questions_those_of_run_seed_and_position(world: World) -> None:
    again, other = World(FactsOptions(max_hops=3)), World(FactsOptions(max_hops=3, world_seed=1))
    assert again.documents == world.documents != other.documents
    source = world.questions(5)
    first = [source.next_problem() for _ in range(5)]
    state = source.state()
    rest = [source.next_problem() for _ in range(5)]
    resumed = again.questions(5)
    resumed.load(state)
    assert [resumed.next_problem() for _ in range(5)] == rest != first


def test_files_of_facts_are_read_as_they_were_made(tmp_path: Path) -> None:
    write_linked_facts(tmp_path / "facts", FactsOptions(people=20), num_train=50, num_held_out=10, seed=3)
    world = World(FactsOptions(people=20))
    assert tuple(read_corpus(tmp_path / "facts" / "corpus.jsonl")) == world.documents
    assert tuple(read_papers(tmp_path / "facts" / "papers.jsonl")) == tuple(paper.document for paper in world.papers)
    train = read_problems(tmp_path / "facts" / "train.jsonl", "qa").problems
    held_out = read_problems(tmp_path / "facts" / "held_out.jsonl", "qa").problems
    assert len(train) == 50 and len(held_out) == 10
    assert not {p.question for p in train} & {p.question for p in held_out}
    assert all(follow(world, p.question) == p.answer for p in (*train, *held_out))
    with pytest.raises(FileExistsError):
        write_linked_facts(tmp_path / "facts", FactsOptions(people=20), 1, 1, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reward": "rouge"}, "task_options.reward: Input should be 'exact' or 'f1'"),
        ({"min_hops": 3}, "task_options.min_hops is 3, above task_options.max_hops = 2"),
        ({"people": 41, "wording": "terse"}, "with task_options.wording=terse there are 40 names; set 40 or fewer"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str | int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_task("qa", options)
