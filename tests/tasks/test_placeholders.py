"""Placeholder answers: which problems are skipped, which stay, and which answers cause a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marsrl.rollout.tasks.config import read_eval_files, read_train_files
from marsrl.rollout.tasks.data import read_problems, reference, shared_answers
from marsrl.rollout.tasks.placeholders import is_placeholder
from marsrl.rollout.tasks.problem_files import read_eval, read_train
from marsrl.rollout.types import Problem

PLACEHOLDERS = (
    *("proof", "Proof.", "$proof$", r"\text{proof}", r"\boxed{\textbf{Proof}}", "**proof**", "(proof)", " `proof` "),
    *("notfound", "Not Found", "not_found", "[not-found]", "no answer", "N/A", r"\mathrm{n/a}", "n.a.", "unknown"),
    *("None", "nan", "NaN", "<NA>", "null", "NULL", "answer", "Error", "See solution.", r"\text{see the solution}"),
    *("-", "—", "?", "...", "$$", r"\text{}", r"\boxed{ }", "\u200b", r"\,"),
)
ANSWERS = (
    *(
        "0",
        "-1",
        "7",
        "x",
        "C",
        "(C)",
        "True",
        "no",
        "even",
        r"\text{none}",
        r"\text{no solution}",
        r"\emptyset",
        r"\{\}",
    ),
    *(
        "()",
        "[]",
        "<",
        ">",
        "=",
        "+",
        r"\infty",
        r"\pi",
        "i",
        "Na",
        "80 proof",
        "waterproof",
        "error bars",
        "H_2O",
        "[1, 2]",
    ),
)


@pytest.mark.parametrize("answer", PLACEHOLDERS)
def test_a_placeholder_is_known_in_any_form(answer: str) -> None:
    assert is_placeholder(answer)


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_no_placeholder(answer: str) -> None:
    assert not is_placeholder(answer)


def write(path: Path, *answers: object) -> str:
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": each}) + "\n" for i, each in enumerate(answers)))
    return str(path)


def test_problems_with_a_placeholder_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "numina.jsonl", "7", "proof", r"\text{proof}", "proof", "notfound", "8")
    read = read_problems(path, "math")
    assert [problem.id for problem in read.problems] == ["numina.jsonl:1", "numina.jsonl:6"] and read.num_bad == 0
    (warning,) = read.warnings
    assert warning.startswith(f"{path}: 4 of 6 problems are skipped") and "data.on_placeholder=keep" in warning
    assert r"('proof' 2, '\\text{proof}' 1, 'notfound' 1)" in warning
    kept = read_problems(path, "math", on_placeholder="keep")
    assert len(kept.problems) == 6 and not kept.warnings
    with pytest.raises(ValueError, match=r"none.jsonl has no problems: .*1 of 1 problems are skipped"):
        read_problems(write(tmp_path / "none.jsonl", "proof"), "math")


def test_a_question_with_a_real_answer_too_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "qa.jsonl", ["Lima", "unknown"], ["N/A", "unknown"])
    assert [problem.answer for problem in read_problems(path, "qa").problems] == [reference(["Lima", "unknown"])]


def test_each_file_of_a_list_says_what_it_leaves_out(tmp_path: Path) -> None:
    one, two, three = (
        write(tmp_path / f"{n}.jsonl", *answers) for n, answers in enumerate((["7"], ["7", "proof"], ["8", "?"]))
    )
    files = read_train_files([{"path": path, "weight": 1} for path in (one, two)])
    train = read_train(files, lambda path: read_problems(path, "math"), 0)
    sets, num_bad, warnings = read_eval(
        read_eval_files([one, three]), lambda path: read_problems(path, "math"), "math", 0, 9, 1
    )
    assert len(train.problems) == 2 and [len(each.problems) for each in sets] == [1, 1] and num_bad == 0
    assert [each.partition(":")[0] for each in (*train.warnings, *warnings)] == [two, three]


def problems(*answers: str, file: str = "f.jsonl") -> list[Problem]:
    return [Problem(f"{file}:{i}", "?", answer, "math") for i, answer in enumerate(answers, 1)]


def test_an_answer_that_many_problems_share_is_warned_about() -> None:
    others = [str(n) for n in range(380)]
    strange = ["cannot be shown"] * 15 + [r"\text{Cannot be shown}"] * 5
    (warning,) = shared_answers(problems(*others, *strange), "data.train")
    assert warning.startswith(
        "data.train: one answer is right for many of the 400 problems of f.jsonl: 'cannot be shown' of 20."
    )
    assert not shared_answers(problems(*others, "x", *strange), "data.train")  # 20 of 401: below 5%
    assert not shared_answers(problems(*others[:200], *strange[1:]), "data.train")  # 19: too few to tell
    # An answer's share is counted within its file, however large other files are.
    (warning,) = shared_answers([*problems(*strange), *problems(*others * 2, file="1/g.jsonl")], "data.train")
    assert "of the 20 problems of f.jsonl" in warning


@pytest.mark.parametrize("answer", ["2", "1/2", r"\frac{1}{2}", "0.5", "C", "(b)", "True", r"\text{no}", "x"])
def test_numbers_choices_and_labels_may_be_shared(answer: str) -> None:
    assert not shared_answers(problems(*[answer] * 50), "data.train")
