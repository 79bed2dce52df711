"""Problems from files and from a user's class: how they are read and sampled, and which are refused."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marsrl.rollout.tasks.config import TrainFile, read_eval_files, read_train_files
from marsrl.rollout.tasks.data import ANSWER_KEYS, QUESTION_KEYS, in_epochs, read_problems, reference
from marsrl.rollout.tasks.find_task import own_problems
from marsrl.rollout.tasks.problem_files import Mixture, draw_endlessly, read_eval, read_train
from marsrl.rollout.tasks.registry import build_task
from marsrl.rollout.types import Problem

read = functools.partial(read_problems, task="math")


def write(path: Path, *rows: object) -> Path:
    lines = [row.encode() if isinstance(row, str) else row for row in rows]
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in lines))
    return path


ASKED, SYSTEM = {"role": "user", "content": "q"}, {"role": "system", "content": "s"}
SAID = {"role": "assistant", "content": "a"}
ROWS: list[tuple[str, dict[str, object], str]] = [
    ("math", {"question": "q", "answer": "work\n#### 1,234"}, "1234"),
    ("math", {"question": "q", "answer": "work\n#### (1,2)"}, "(1,2)"),
    ("math", {"query": "q", "ans_box": "7"}, "7"),
    ("math", {"prompt": "q", "label": 5}, "5"),
    ("math", {"problem": "q", "solution": r"so \boxed{\frac12}"}, r"\frac12"),
    ("math", {"prompt": [ASKED], "reward_model": {"ground_truth": "9"}}, "9"),
    ("math", {"question": "q", "answer": 70.0}, "70"),
    ("math", {"question": "q", "answer": ["4"]}, "4"),
    ("math", {"question": "q", "solution": ["so 2 m, not 3"], "final_answer": ["2"]}, "2"),
    ("qa", {"question": "q", "golden_answers": ["a", "b"]}, reference(["a", "b"])),
    ("qa", {"question": "q", "answer": " a "}, "a"),
    ("qa", {"question": "q", "answer": ["a", 7]}, reference(["a", "7"])),
    ("qa", {"question": "q", "answer": [1912.0, 0.5]}, reference(["1912", "0.5"])),  # integers of a column with gaps
    # Rows of Search-R1, and the rows into which Dr. MAS's script converts them.
    ("qa", {"question": "q", "prompt": [{"role": "user", "content": "long"}], "golden_answers": ["a"]}, "a"),
    ("qa", {"prompt": [ASKED], "reward_model": {"ground_truth": {"target": ["a"]}}}, "a"),
    ("qa", {"question": "q", "answer": "it is #### 7"}, "it is #### 7"),  # GSM8K's mark has no meaning here
]


@pytest.mark.parametrize(("task", "row", "answer"), ROWS)
def test_known_rows_are_read(tmp_path: Path, task: str, row: object, answer: str) -> None:
    (problem,) = read_problems(write(tmp_path / "d.jsonl", row), task).problems
    assert problem == Problem("d.jsonl:1", "q", answer, task)


def test_the_page_shows_readable_rows_and_lists_all_keys(tmp_path: Path) -> None:
    rows, _, rest = (
        (Path(__file__).parents[2] / "docs/data.md").read_text("utf-8").partition("\n\nEach row is a problem")
    )
    (tmp_path / "d.jsonl").write_text(textwrap.dedent(rows.removeprefix("# A file of problems\n\n")))
    assert [problem.answer for problem in read(tmp_path / "d.jsonl").problems] == ["4", "36", "11"]
    listed = [re.findall("`([^`]+)`", line.split("|")[1]) for line in rest.splitlines() if line.startswith("| `")][:2]
    assert listed == [[*QUESTION_KEYS, "data.question_key"], [*ANSWER_KEYS, "data.answer_key"]]


GOOD = {"question": "q", "answer": "1"}
BAD: list[tuple[str, object, str]] = [
    ("math", "{not json", "not JSON"),
    ("math", "[" * 100_000, "not readable as JSON"),
    ("math", [{"question": "q", "answer": "1"}], "expected a JSON object, found list"),
    ("math", b'{"question": "\xff"}', "not UTF-8 at byte 14"),
    ("math", {"question": "q"}, "answer.*is missing"),
    ("math", {"question": " ", "answer": "1"}, "question is empty"),
    ("math", {"question": "q", "answer": True}, "is bool"),
    ("math", {"question": "q", "answer": ["1", "2"]}, r"answer \(answer\) is a list of 2; expected one answer"),
    (
        "math",
        {"question": [{"role": "system", "content": "s"}], "answer": "1"},
        "question is a chat of system; expected",
    ),
    (
        "math",
        {"question": [SYSTEM, ASKED], "answer": "1"},
        "question is a chat of system, user; expected the question's text",
    ),
    (
        "math",
        {"question": [SYSTEM, ASKED, SAID, ASKED], "answer": "1"},
        "a chat of system, user, assistant, user; expected",
    ),
    (
        "qa",
        {"question": [ASKED, SAID, ASKED], "answer": "1"},
        r"a chat of user, assistant, user.*agents\.<name>\.prompt",
    ),
    ("math", {"question": [ASKED, "q"], "answer": "1"}, "a chat of user, str"),
    ("math", {"question": [], "answer": "1"}, "a chat of no turns"),
    ("math", {"question": [{"role": "user", "content": None}], "answer": "1"}, "the question is missing"),
    ("qa", {"question": "q", "answer": []}, "is an empty list"),
    ("qa", {"question": "q", "answer": ["a", ""]}, "is empty"),
    ("qa", {"question": "q", "answer": [["a"]]}, "is list"),
    ("qa", {"question": "q", "answer": "\ud800"}, "lone surrogate"),
    ("qa", {"question": "q", "answer": True}, "is bool"),
    ("math", {"question": "q", "answer": float("inf")}, "is inf; expected a finite number"),
    ("qa", {"question": "q", "answer": ["a", float("nan")]}, "is nan; expected a finite number"),
    ("math", '{"question": "q", "answer": "1", "answer": "2"}', "an object has the key 'answer' twice; remove one"),
    ("math", '{"question": "q", "answer": "1", "more": {"a": 1, "a": 1}}', "the key 'a' twice"),
]


@pytest.mark.parametrize(("task", "line", "reason"), BAD)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, task: str, line: object, reason: str) -> None:
    path = write(tmp_path / "d.jsonl", GOOD, line, GOOD)
    with pytest.raises(ValueError, match=rf"d\.jsonl:2: .*{reason}"):
        read_problems(path, task)
    result = read_problems(path, task, on_bad_line="skip")
    assert [p.id for p in result.problems] == ["d.jsonl:1", "d.jsonl:3"]
    assert result.num_bad == 1


@pytest.mark.parametrize("name", ["d.json", "d.jsonl"])
@pytest.mark.parametrize(
    "text",
    [
        '[{"question": "q1", "answer": "1"}, {"question": "q2", "answer": "2"}]',
        '\ufeff \n[{"question": "q1", "answer": "1"},\n{"question": "q2", "answer": "2"}]\n',
        json.dumps([{"question": f"q{i}", "answer": str(i)} for i in (1, 2)], indent=2),
    ],
    ids=["a line", "lines", "indented"],
)
def test_an_array_of_objects_is_read_whatever_its_lines(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    assert read(tmp_path / name).problems == tuple(Problem(f"{name}:{i}", f"q{i}", str(i), "math") for i in (1, 2))


def test_json_with_an_object_a_line_or_one_object_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "d.json", GOOD, "", GOOD)
    assert [problem.id for problem in read(path).problems] == ["d.json:1", "d.json:3"]
    path.write_text(json.dumps(GOOD, indent=2))
    assert [problem.id for problem in read(path).problems] == ["d.json:1"]


def test_a_bad_object_of_an_array_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps([GOOD, 7, {"question": "q"}, [GOOD], GOOD], indent=1))
    with pytest.raises(ValueError, match=r"d\.json:2: expected a JSON object, found int"):
        read(path)
    found = read(path, on_bad_line="skip")
    assert ([problem.id for problem in found.problems], found.num_bad) == (["d.json:1", "d.json:5"], 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"question": "q", "answer": "1"},\n {"question": "q"', "the file is cut off at line 2, column 18"),
        ('[{"question": "q", "answer": "1"}\n {"question": "q"}]', "Expecting ',' delimiter at line 2, column 2"),
        ("[" * 100_000, "the array is not readable as JSON"),
        ('[\n{"question": "q", "answer": "1"}\n]\nx', "Extra data at line 4, column 1"),
        ("[]", "has no problems: the file is empty"),
        (json.dumps({"version": 1, "data": [GOOD]}), r"d\.json:1: data is a list of problems \(found version, data\)"),
        (json.dumps({"version": 1, "data": [GOOD]}, indent=1), r"d\.json:1: data is a list of problems"),
        (
            json.dumps({"x": [{"y": 1}]}),
            r"d\.json:1: found the keys x; expected one of question, .*data\.question_key;",
        ),
        (
            '{\n"question": "q",\n',
            "d.json:1: not JSON: cut off at column 2, .* expected a complete object on each line",
        ),
    ],
)
def test_an_array_that_cannot_be_read_says_where(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read(tmp_path / "d.json")


def test_a_compressed_file_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl.gz").touch()
    with pytest.raises(
        ValueError,
        match=r"d\.jsonl\.gz has an unknown format; expected an uncompressed \.jsonl, \.json, \.parquet or \.arrow file",
    ):
        read(tmp_path / "d.jsonl.gz")


def test_keys_can_be_given_and_unknown_rows_say_which_were_found(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"frage": "q", "extra": {"antwort": 2}})
    with pytest.raises(
        ValueError, match=r"found the keys frage, extra; expected one of question, .* data\.question_key;"
    ):
        read_problems(path, "math")
    assert read_problems(path, "math", "frage", "extra.antwort").problems[0].answer == "2"


def test_a_file_without_problems_fails_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 bad lines; first: .*d.jsonl:1"):
        read_problems(write(tmp_path / "d.jsonl", "nope"), "math", on_bad_line="skip")
    (tmp_path / "empty" / "main").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"empty has no arrow, parquet or jsonl files$"):
        read_problems(tmp_path / "empty", "math")
    # Many datasets of the Hugging Face hub have such folders.
    (tmp_path / "empty" / "main" / "train-00000-of-00001.parquet").touch()
    with pytest.raises(ValueError, match=r"jsonl files; set one of the folders below it that have some: .*empty/main$"):
        read_problems(tmp_path / "empty", "math")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"d\.parquet cannot be read"):
        read_problems(tmp_path / "d.parquet", "math")


VERL = [
    {"prompt": [{"role": "user", "content": f"q{i}"}], "reward_model": {"ground_truth": str(i), "style": "rule"}}
    for i in range(3)
]


def test_parquet_with_nested_columns_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(VERL), tmp_path / "d.parquet")
    expected = [Problem(f"d.parquet:{i + 1}", f"q{i}", str(i), "math") for i in range(3)]
    assert list(read_problems(tmp_path / "d.parquet", "math").problems) == expected


def test_an_array_with_a_repeated_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"d\.json: .*an object has the key 'answer' twice; remove one"):
        read(write(tmp_path / "d.json", '[{"question": "q", "answer": "1", "answer": "2"}]'))


@pytest.mark.parametrize("layout", ["saved", "dict", "bare", "files"])
def test_dataset_directories_are_read_in_shard_order(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "train" if layout == "dict" else tmp_path
    folder.mkdir(exist_ok=True)
    shards = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for shard, rows in zip(shards, (VERL[:2], VERL[2:]), strict=True):
        table = pa.Table.from_pylist(rows)
        new = pa.ipc.new_file if layout == "files" else pa.ipc.new_stream  # the formats that polars and datasets write
        with pa.OSFile(str(folder / shard), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    if layout in ("saved", "dict"):
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": s} for s in shards]}))
    if layout == "dict":
        (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    assert [p.answer for p in read_problems(tmp_path, "math").problems] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("files", "read"),
    [
        ("test.jsonl train.jsonl", "train.jsonl"),
        ("test-0-of-1.jsonl train-0-of-2.jsonl train-1-of-2.jsonl", "train-0-of-2.jsonl train-1-of-2.jsonl"),
        ("a.jsonl test.jsonl", "a.jsonl test.jsonl"),
        ("eval.jsonl train.jsonl", "train.jsonl"),
        ("gsm8k-test.jsonl gsm8k-train.jsonl", "gsm8k-train.jsonl"),
        ("Testing_v2.jsonl Training_v2.jsonl", "Training_v2.jsonl"),
        ("my_trainset.jsonl my_testset.jsonl", "my_trainset.jsonl"),
        ("test-0-of-1-ab12.jsonl train-0-of-1-cd34.jsonl", "train-0-of-1-cd34.jsonl"),
        ("contest.jsonl trainer.jsonl", "contest.jsonl trainer.jsonl"),
        ("test.parquet train.jsonl", "train.jsonl"),
        ("test.jsonl validation.jsonl", "data: . has the splits test, validation but no train"),
    ],
)
def test_of_a_folder_with_several_splits_train_is_read(tmp_path: Path, files: str, read: str) -> None:
    for file in files.split():
        write(tmp_path / file, GOOD)
    try:
        found = " ".join(problem.id.partition(":")[0] for problem in read_problems(tmp_path, "math").problems)
    except ValueError as error:
        found = str(error).replace(str(tmp_path), ".").partition(";")[0]
    assert found == read


def test_short_floats_of_a_table_keep_their_decimals(tmp_path: Path) -> None:
    """In double precision, 0.1 of a float32 column would be 0.10000000149, with which 0.1 is not the same answer."""
    kinds = {"a": pa.float32(), "b": pa.float16(), "c": pa.list_(pa.float32()), "d": pa.struct({"x": pa.float32()})}
    rows = [{"question": "q", "a": x, "b": x, "c": [x], "d": {"x": x}} for x in (0.1, 3.0, 1e-7)]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema({"question": pa.string(), **kinds})), tmp_path / "d.parquet")
    for key in ("a", "b", "c", "d.x"):
        found = [problem.answer for problem in read(tmp_path / "d.parquet", answer_key=key).problems]
        assert found == ["0.1", "3", "1e-07"]


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    table = pa.table([["q"], ["1"], ["2"]], names=["question", "answer", "answer"])
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(ValueError, match="several columns called answer"):
        read(tmp_path / "d.parquet")


def some(count: int) -> list[Problem]:
    return [Problem(str(i), "q", "a", "math") for i in range(count)]


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 30))
def test_problems_come_once_an_epoch_and_resume_in_order(count: int, seed: int, taken: int) -> None:
    for problems in (some(count), Mixture([some(count)], [1]), Mixture([some(3), some(2)], [1, 2])):
        drawn = list(map(draw_endlessly(problems, seed), range(taken + 3 * count)))
        assert list(map(draw_endlessly(problems, seed), range(taken, taken + 3 * count))) == drawn[taken:]
    drawn = list(map(in_epochs(some(count), seed), range(taken + 3 * count)))
    for start in range(0, len(drawn) - count + 1, count):
        assert len({problem.id for problem in drawn[start : start + count]}) == count


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, other = (list(map(in_epochs(some(20), seed), range(40))) for seed in (0, 1))
    assert first[:20] != first[20:] and first != other


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files with the same name, of 30 and of 10 problems."""
    for folder, count in (("a", 30), ("b", 10)):
        (tmp_path / folder).mkdir()
        rows = ({"question": f"{folder}{i}", "answer": str(i)} for i in range(count))
        write(tmp_path / folder / "train.jsonl", *rows)
    return [tmp_path / folder / "train.jsonl" for folder in "ab"]


def listed(files: list[Path], **shares: tuple[float, ...]) -> list[TrainFile]:
    [(key, values)] = shares.items()
    return [TrainFile.model_validate({"path": str(f), key: v}) for f, v in zip(files, values, strict=True)]


def test_files_with_counts_are_drawn_without_replacement(files: list[Path]) -> None:
    train = listed(files, count=(12, 10))
    problems = read_train(train, read, 0).problems
    assert [p.question[0] for p in problems] == ["a"] * 12 + ["b"] * 10
    assert len({p.question for p in problems}) == len({p.id for p in problems}) == 22
    assert {p.id for p in problems} >= {f"1/train.jsonl:{line}" for line in range(1, 11)}
    again, other = (read_train(train, read, seed).problems for seed in (0, 1))
    assert again == problems and {p.id for p in other} != {p.id for p in problems}
    assert read_train(str(files[1]), read, 0).problems[0].id == "train.jsonl:1"


def test_a_list_gives_the_index_of_a_short_or_unreadable_file(files: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"data.train\[1\]: .*b/train.jsonl has 10 problems, fewer than count = 11"):
        read_train(listed(files, count=(12, 11)), read, 0)
    write(files[0], {"question": "q", "answer": None})
    with pytest.raises(ValueError, match=r"data.train\[0\]: .*train.jsonl:1: .*expected one of golden_answers"):
        read_train(listed(files, weight=(1, 1)), read, 0)


def test_a_file_is_listed_once_however_its_path_is_written(files: list[Path]) -> None:
    link = files[0].with_name("same.jsonl")
    link.symlink_to(files[0])
    for second in (files[0], files[0].parent / ".." / "a" / "train.jsonl", link):
        train = [{"path": str(path), "count": 3} for path in (files[1], files[0], second)]
        with pytest.raises(
            ValueError, match=r"data.train\[2\] is the same file as data.train\[1\].*would be used twice"
        ):
            read_train_files(train)


def test_files_are_drawn_by_weight_without_early_repetition(files: list[Path]) -> None:
    mixture = read_train(listed(files, weight=(1.0, 3.0)), read, 0).problems
    drawn = [problem.id for problem in map(draw_endlessly(mixture, 5), range(2000))]
    assert 1400 < sum(id.startswith("1/") for id in drawn) < 1600  # mean 1500, standard deviation 19
    for place, size in (("0/", 30), ("1/", 10)):
        own = [id for id in drawn if id.startswith(place)]
        assert all(len(set(own[start : start + size])) == size for start in range(0, len(own) - size, size))


def test_a_mixtures_file_that_is_all_held_out_is_named() -> None:
    mixture = Mixture([[Problem("0", "q", "a", "math")], [Problem("1", "r", "a", "math")]], [1.0, 2.0])
    kept = Mixture([*mixture.files[:1], [*some(2), Problem("2", "r", "a", "math")]], [1.0, 2.0]).without({"r"})
    assert [len(file) for file in kept.files] == [1, 2] and kept.weights == (1.0, 2.0) and len(kept) == 3
    with pytest.raises(ValueError, match=r"data.train\[1\]: all of its 1 questions are held out"):
        mixture.without({"r"})


def test_evaluation_sets_are_named_and_drawn_independently(
    tmp_path: Path,
) -> None:
    for name, count in (("aime 25", 5), ("more", 9)):
        rows = [{"question": f"{name} {i}?", "answer": str(i)} for i in range(count)]
        write(tmp_path / f"{name}.jsonl", *rows)
    other = {"path": str(tmp_path / "more.jsonl"), "name": "other", "count": 4, "repeat": 7}
    files = read_eval_files([str(tmp_path / "aime 25.jsonl"), other])
    sets, num_bad, _ = read_eval(files, read, "math", 0, 300, 2)
    assert [(each.name, len(each.problems), each.repeat) for each in sets] == [("aime_25", 5, 2), ("other", 4, 7)]
    assert sets[0].problems[0].id == "aime_25/aime 25.jsonl:1" and num_bad == 0
    (alone,), *_ = read_eval(files[1:], read, "math", 0, 300, 2)
    assert alone == sets[1]
    (few,), *_ = read_eval(files[:1], read, "math", 0, 3, 2)
    assert len(few.problems) == 3
    whole, *_ = read_eval(files, read, "math", 0, None, 2)
    assert [len(each.problems) for each in whole] == [5, 4]
    with pytest.raises(ValueError, match=r"data.eval\[0\]: .*more.jsonl has 9 problems, fewer than count = 10"):
        read_eval(read_eval_files([{"path": str(tmp_path / "more.jsonl"), "count": 10}]), read, "math", 0, 300, 1)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([], "data.eval is []; expected a path, or a list"),
        (["a.jsonl", "b/a.parquet"], "data.eval[1]: two sets are called a; give one of them another name"),
        ([{"path": "a", "name": "system"}], "would be called 'system'; give it a name"),
        ([{"path": "a", "name": "../x"}], "would be called '../x'; give it a name"),
        ([{"path": "a", "weight": 1}], "data.eval[0].weight: unknown key; expected one of path, name, count, repeat"),
    ],
)
def test_a_list_of_sets_that_cannot_be_used_is_named(listed: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        read_eval_files(listed)


OWN = """
from marsrl.rollout.tasks.own_task import OwnTask
from marsrl.rollout.types import Problem

class Doubles(OwnTask):
    class Options(OwnTask.Options):
        near: float = 0.5

    def problems(self):
        return [(f"double of {n}?", str(2 * n)) for n in range(20)]

    def reward(self, problem, answer):
        return float(int(answer) == int(problem.answer))

class FromData(OwnTask):
    prompts = "chain"
    def reward(self, problem, answer):
        return float(len(answer) == len(problem.question))

class Mine(OwnTask):
    pass
"""


@pytest.fixture
def named(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "my_task.py").write_text(OWN)
    return lambda kind: f"{tmp_path}/my_task.py:{kind}"


def test_problems_are_those_of_the_data_by_default(named: Callable[[str], str]) -> None:
    given = [Problem("f:1", "abc", "1", "t")]
    assert own_problems(named("FromData"), {}, given, ()) == (given, [])
    assert build_task(named("FromData"), {}, given, ()).prompts == "chain"


WRONG: list[tuple[str, str, str]] = [
    ("Missing", "pass", "task is .*: .*my_task.py has no class Missing that extends OwnTask"),
    ("Problem", "pass", "task is .*: .*my_task.py has no class Problem that extends OwnTask"),
    ("Mine", "import nothing", "task: .*my_task.py cannot be imported: ModuleNotFoundError: .*nothing"),
    ("Mine", "prompts = 'poetry'", "task is .*: Mine.prompts is 'poetry'; expected one of "),
    ("Mine", "def problems(self): return 'q', 'a'", r"problems\[0\] is 'q'; expected \(question, answer\) or a"),
    ("Mine", "def problems(self): return [Problem('a', 'q', None, 't')] * 2", "two problems with the same id"),
    ("Mine", "def problems(self): return [Problem(1, 'q', None, 't')]", "expected .* an answer and an id as text"),
    ("Mine", "class Options: workers = 2", "task is .*: Mine.Options does not extend OwnTask.Options"),
    ("Mine", "def problems(self): return [][0]", "task is .*: problems raises IndexError: list index out of range"),
    ("Mine", "pass", "task is .*: problems is empty; return problems, or set data.train"),
]


@pytest.mark.parametrize(("kind", "body", "expected"), WRONG)
def test_what_is_wrong_with_a_class_is_said_in_one_line(kind: str, body: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(OWN.replace("    pass", f"    {body}"))
    with pytest.raises(ValueError, match=expected) as caught:
        own_problems(f"{tmp_path}/my_task.py:{kind}", {}, (), ())
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="task is .*: no file .*missing.py"):
        own_problems(f"{tmp_path}/missing.py:{kind}", {}, (), ())


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("arithmetic", {"min_operation": 3}, "task_options.min_operation:"),
    ("qa", {"reward": "rouge"}, "task_options.reward: Input should be 'exact' or 'f1'"),
    ("qa", {"min_hops": 3}, "task_options.min_hops is 3; expected at most task_options.max_hops = 2"),
    ("qa", {"people": 41, "wording": "terse"}, "but task_options.wording=terse has 40 names; set 40 or fewer"),
    ("Doubles", {"far": 1.0}, r"task Doubles: task_options.far: unknown key; "),
    ("Doubles", {"workers": 0}, r"task Doubles: task_options.workers: .*greater than 0"),
]


@pytest.mark.parametrize(("task", "options", "expected"), REFUSED)
def test_unknown_task_options_and_invalid_values_are_named(
    task: str, options: dict[str, object], expected: str, named: Callable[[str], str]
) -> None:
    with pytest.raises(ValueError, match=expected):
        build_task(named(task) if task == "Doubles" else task, options)
