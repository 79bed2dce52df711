"""Problems from jsonl, json, parquet and Hugging Face dataset directories (docs/data.md), and the order of their draws."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from marsrl.rollout.agents.parsers import boxed_answer
from marsrl.rollout.jsonl import BadLine, read_rows, well_formed
from marsrl.rollout.tasks.harbor import harbor_problems
from marsrl.rollout.tasks.placeholders import is_placeholder, shared
from marsrl.rollout.tasks.protocol import ProblemSource
from marsrl.rollout.types import Problem

if TYPE_CHECKING:
    import pyarrow as pa

# docs/data.md lists these keys.
QUESTION_KEYS = ("question", "query", "problem", "prompt")
ANSWER_KEYS = (
    *("golden_answers", "answer", "final_answer", "ans_box", "label", "reward_model.ground_truth.target"),
    *("reward_model.ground_truth", "ground_truth", "solution"),
)
# A word of the file's name: train-00000-of-00002.parquet, gsm8k-test.arrow, my_trainset.jsonl.
_SPLIT = re.compile(
    r"(?<![^\W_])(train|test|validation|valid|val|dev|eval|evaluation)(?:ing|set)?(?![^\W\d_])", re.IGNORECASE
)
_SHORT_FLOAT = re.compile(r"\b(?:half)?float\b")  # pyarrow's names of 16-bit and 32-bit floats; double has 64
_MOST_SHOWN = 5  # answers listed in a warning
_THOUSANDS = re.compile(r"\s*[-+$]*\d{1,3}(,\d{3})+(\.\d+)?\s*")


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Problems in file order. num_bad: number of skipped rows. warnings: texts about problems skipped for their answers."""

    problems: tuple[Problem, ...]
    num_bad: int
    warnings: tuple[str, ...] = ()


def read_problems(
    path: str | Path,
    task: str,
    question_key: str | None = None,
    answer_key: str | None = None,
    on_bad_line: Literal["error", "skip"] = "error",
    on_placeholder: Literal["skip", "keep"] = "skip",
) -> ReadResult:
    """Read all problems of a file or dataset directory. Keys not given are inferred from the first readable row.

    Ids consist of file name and line number, so they are stable while the file is unchanged. Problems whose answer is a
    placeholder are skipped and counted, unless on_placeholder keeps them. For a folder of Harbor's tasks, ids are the
    tasks' names.
    """
    if tasks := harbor_problems(Path(path), task):
        return ReadResult(tuple(tasks), 0)
    problems: list[Problem] = []
    placeholders: Counter[str] = Counter()
    num_bad, first = 0, "the file is empty"
    for row in read_problem_rows(path, task, question_key, answer_key):
        if isinstance(row.problem, Problem):
            if on_placeholder == "skip" and has_placeholder(row.problem):
                placeholders[str(row.problem.answer)] += 1
            else:
                problems.append(row.problem)
            continue
        message = f"{row.file}:{row.line}: {row.problem}"
        if on_bad_line == "error":
            raise ValueError(f"{message}; correct the line, or set data.on_bad_line=skip") from row.problem
        num_bad += 1
        first = message if num_bad == 1 else first
    warnings: tuple[str, ...] = ()
    if num_left_out := placeholders.total():
        most = ", ".join(f"{answer!r} {count:,}" for answer, count in placeholders.most_common(_MOST_SHOWN))
        warnings = (
            f"{path}: {num_left_out:,} of {num_left_out + len(problems):,} problems are skipped, because their answer is a "
            f"placeholder that any completion can repeat ({most}); set data.on_placeholder=keep to keep them",
        )
    if not problems:
        why = f"{f'{num_bad} bad lines; first: ' if num_bad else ''}{first}" if num_bad or not warnings else warnings[0]
        raise ValueError(f"{path} has no problems: {why}")
    return ReadResult(tuple(problems), num_bad, warnings)


def has_placeholder(problem: Problem) -> bool:
    """Return True if all right answers in the problem's reference are placeholders (proof, not found)."""
    return problem.answer is not None and all(map(is_placeholder, _right_answers_of(problem)))


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """A row of a file with its problem, or the reason why it has none.

    fields: {} if the line is not a valid row. keys: keys of question and answer; "" if not found.
    """

    file: Path
    line: int
    fields: Mapping[str, object]
    keys: tuple[str, str]
    problem: Problem | BadLine


def read_problem_rows(
    path: str | Path, task: str, question_key: str | None = None, answer_key: str | None = None
) -> Iterator[ProblemRow]:
    """Yield every row of a file or dataset directory, in order. Keys not given are inferred from the first readable row."""
    for file in data_files(Path(path)):
        for line, row in _rows(file):
            problem: Problem | BadLine
            try:
                if isinstance(row, BadLine):
                    raise row
                question_key = question_key or _find_key(row, QUESTION_KEYS, "data.question_key")
                answer_key = answer_key or _find_key(row, ANSWER_KEYS, "data.answer_key")
                problem = problem_of(f"{file.name}:{line}", row, task, (question_key, answer_key))
            except BadLine as reason:
                problem = reason
            fields = {} if isinstance(row, BadLine) else row
            yield ProblemRow(file, line, fields, (question_key or "", answer_key or ""), problem)


def problem_of(uid: str, row: Mapping[str, object], task: str, keys: tuple[str, str]) -> Problem:
    """Read the problem of a row. keys: keys of its question and answer. Raises BadLine if either is missing or invalid."""
    question = _question(lookup(row, keys[0]), keys[0])
    found = lookup(row, keys[1])
    return Problem(uid, question, _answers(found, keys[1]) if task == "qa" else _answer(found, keys[1]), task)


def fingerprint(problems: Sequence[Problem]) -> dict[str, int | str]:
    """Return {"problems": number, "sum": checksum of questions and answers in order}, which identifies a set of problems."""
    digest = hashlib.blake2b(digest_size=8)
    for problem in problems:
        digest.update(json.dumps([problem.question, problem.answer]).encode())
    return {"problems": len(problems), "sum": digest.hexdigest()}


def one_spaced(text: str) -> str:
    """Collapse runs of white space to single spaces and strip: equal for texts that differ only in white space."""
    return " ".join(text.split())


def repeats(problems: Sequence[Problem], key: str) -> list[str]:
    """Return warnings about questions that occur several times in one file or dataset, ignoring white space.

    key: setting that names the file.
    """
    seen: dict[str, dict[str, Problem]] = {}
    num_same, first = 0, None
    for problem in problems:
        answers = seen.setdefault(one_spaced(problem.question), {})
        answer = one_spaced(problem.answer or "")
        if answer in answers:
            num_same += 1
        elif answers and first is None:
            first = (next(iter(answers.values())), problem)
        answers.setdefault(answer, problem)
    warnings = []
    if first is not None:
        one, other = ((problem.id, (problem.answer or "")[:40]) for problem in first)
        warnings.append(
            f"{key}: {sum(len(answers) > 1 for answers in seen.values())} question(s) occur with different answers, first "
            f"{one[0]} (answer {one[1]!r}) and {other[0]} ({other[1]!r}); if the answers differ in meaning, remove the wrong "
            "one, which would be rewarded"
        )
    if num_same:
        warnings.append(f"{key}: {num_same} problem(s) repeat an earlier question and answer")
    return warnings


def shared_answers(problems: Sequence[Problem], key: str) -> list[str]:
    """Return a warning for each file in which suspiciously many problems share an answer (placeholders.shared).

    key: setting that names the file.
    """
    by_file: dict[str, list[Problem]] = {}
    for problem in problems:
        by_file.setdefault(problem.id.rpartition(":")[0], []).append(problem)
    warnings = []
    for file, file_problems in by_file.items():
        if repeated := shared(_right_answers_of(problem) for problem in file_problems if problem.answer is not None):
            most = ", ".join(f"{answer[:40]!r} of {count:,}" for answer, count in repeated[:_MOST_SHOWN])
            warnings.append(
                f"{key}: one answer is right for many of the {len(file_problems):,} problems"
                f"{f' of {file}' if file else ''}: {most}. A policy can learn to repeat it; remove these problems if it is not a "
                "real answer"
            )
    return warnings


def in_epochs(problems: Sequence[Problem], seed: int) -> ProblemSource:
    """Return endless draws from a fixed list: each epoch yields every problem once, in a seeded order of that epoch."""

    @lru_cache(maxsize=1)
    def order(epoch: int) -> list[int]:
        order = list(range(len(problems)))
        random.Random(f"data/{seed}/{epoch}").shuffle(order)
        return order

    return lambda number: problems[order(number // len(problems))[number % len(problems)]]


def draw_held_out(problems: Sequence[Problem], num_problems: int | None, task: str, seed: int) -> list[Problem]:
    """Draw problems without replacement (seeded), in the order of the list; all problems for None or a larger number."""
    order = random.Random(f"{task}/held-out/{seed}").sample(range(len(problems)), len(problems))
    return [problems[index] for index in sorted(order[:num_problems])]


def data_files(path: Path) -> list[Path]:
    """Return the data files behind a path, in order."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"data: {path} does not exist; expected a jsonl or parquet file or a Hugging Face dataset directory (to download "
            "one: hf download OWNER/NAME --repo-type dataset --local-dir NAME)"
        )
    if (path / "dataset_dict.json").is_file():
        path = path / _split(path, json.loads((path / "dataset_dict.json").read_text("utf-8"))["splits"])
    if (path / "state.json").is_file():  # written by save_to_disk; lists the shards in order
        state = json.loads((path / "state.json").read_text("utf-8"))
        if state.get("_indices_data_files"):
            raise ValueError(
                f"data: {path} was saved with an indices mapping, which is unsupported; call flatten_indices() and save it "
                "again"
            )
        return [path / Path(shard["filename"]).name for shard in state["_data_files"]]
    endings = ("arrow", "parquet", "jsonl")
    if files := sorted(file for ending in endings for file in path.glob(f"*.{ending}")):
        split_of = {file: match[1].lower() for file in files if (match := _SPLIT.search(file.stem))}
        split = _split(path, sorted({*split_of.values()})) if split_of else None
        files = [file for file in files if split_of.get(file, split) == split]
        ending = next(ending for ending in endings if any(file.suffix == f".{ending}" for file in files))
        return [file for file in files if file.suffix == f".{ending}"]
    # Search only two levels: searching a whole home directory or disk would take minutes.
    below = (f"{folder}/*.{ending}" for folder in ("*", "*/*") for ending in ("arrow", "parquet", "jsonl"))
    folders = sorted({file.parent for pattern in below for file in path.glob(pattern)})
    known = f"; set one of the folders below it that have some: {', '.join(map(str, folders[:8]))}" if folders else ""
    raise ValueError(f"data: {path} has no arrow, parquet or jsonl files{known}")


def _split(path: Path, splits: Sequence[str]) -> str:
    """Return the split to read among those in a folder: train if it exists."""
    if len(splits) > 1 and "train" not in splits:
        raise ValueError(
            f"data: {path} has the splits {', '.join(splits)} but no train; set the file or folder of one split"
        )
    return "train" if "train" in splits else splits[0]


def _rows(file: Path) -> Iterator[tuple[int, Mapping[str, object] | BadLine]]:
    """Yield (line number from 1, row or BadLine)."""
    if file.suffix in (".parquet", ".arrow"):
        yield from enumerate(_table_rows(file), start=1)
    elif file.suffix in (".jsonl", ".json", ".ndjson"):
        yield from read_rows(file)
    else:
        raise ValueError(
            f"data: {file} has an unknown format; expected an uncompressed .jsonl, .json, .parquet or .arrow file"
        )


def _table_rows(file: Path) -> Iterator[Mapping[str, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as parquet:
                for batch in parquet.iter_batches():
                    yield from _batch_rows(batch, file)
            return
        with pa.memory_map(str(file)) as source:
            is_file = source.read(6) == b"ARROW1"  # file format of polars; `datasets` writes streams
            source.seek(0)
            if is_file:
                reader = pa.ipc.open_file(source)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = pa.ipc.open_stream(source)
            for batch in batches:
                yield from _batch_rows(batch, file)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"data: {file} cannot be read: {error}") from error


def _batch_rows(batch: pa.RecordBatch, file: Path) -> Iterator[Mapping[str, object]]:
    if repeated := sorted(name for name, count in Counter(batch.schema.names).items() if count > 1):
        raise ValueError(f"data: {file} has several columns called {', '.join(repeated)}; rename all but one of each")
    inexact = {column.name: column.type for column in batch.schema if _SHORT_FLOAT.search(str(column.type))}
    for row in batch.to_pylist():
        yield row | {name: _shortest(row[name], kind) for name, kind in inexact.items()}


def _shortest(value: Any, kind: pa.DataType) -> Any:
    """Return the value with the shortest decimals for 16-bit and 32-bit floats: 0.1, where float() gives 0.10000000149011612."""
    if value is None:
        return None
    if _SHORT_FLOAT.fullmatch(str(kind)):
        return float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, dict):
        return {name: _shortest(inner, kind.field(name).type) for name, inner in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):  # a map's items are lists too
        return [_shortest(inner, kind.value_type) for inner in value]
    return value


def lookup(row: Mapping[str, object], key: str) -> object:
    """Return row[key], or None if the key is missing. A dotted key descends into nested objects."""
    if key in row:
        return row[key]
    value: object = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _find_key(row: Mapping[str, object], candidates: Sequence[str], option: str) -> str:
    for key in candidates:
        if lookup(row, key) is not None:
            return key
    keys = ", ".join(map(str, row))
    for name, value in row.items():  # {"data": [...]}, as read by load_dataset(field="data")
        inner = value[0] if isinstance(value, list) and value else None
        if isinstance(inner, Mapping) and any(lookup(inner, key) is not None for key in candidates):
            raise BadLine(
                f"{name} is a list of problems (found {keys}); expected only that list in the file: [{{...}}, {{...}}]"
            )
    raise BadLine(f"found the keys {keys}; expected one of {', '.join(candidates)}, or the key's name in {option}")


def _question(value: object, key: str) -> str:
    if isinstance(value, list):
        roles = [str(turn.get("role")) if isinstance(turn, Mapping) else type(turn).__name__ for turn in value]
        if roles != ["user"]:
            raise BadLine(
                f"{key} is a chat of {', '.join(roles)[:200] or 'no turns'}; expected the question's text, or a list of one "
                "user message. Put a system message into the agents' prompts "
                "(agents.<name>.prompt); join the turns of a longer chat into one text"
            )
        value = value[0].get("content")
    if not isinstance(value, str) or not value.strip():
        raise BadLine(f"the question is {_kind(value)}; expected text")
    return well_formed(value, "the question")


def _answer(value: object, key: str) -> str:
    if isinstance(value, list):
        if len(value) != 1:
            raise BadLine(f"the answer ({key}) is a list of {len(value)}; expected one answer")
        value = value[0]
    if isinstance(value, bool) or value is None or not isinstance(value, str | int | float):
        raise BadLine(f"the answer ({key}) is {_kind(value)}; expected text or a number")
    text = _text(value, key)
    if "####" in text:  # GSM8K: a worked solution, then the final answer
        text = text.rpartition("####")[2]
        text = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    elif key.rpartition(".")[2] == "solution":
        boxed = boxed_answer(text)
        if boxed is None:
            raise BadLine("the solution has no final answer in \\boxed{}; expected one")
        text = boxed
    if not text.strip():
        raise BadLine(f"the answer ({key}) is empty; expected text")
    return well_formed(text.strip(), f"the answer ({key})")


def _text(value: object, key: str) -> str:
    """Return an answer as text; 70 for 70.0. Raises BadLine for NaN and infinity."""
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        raise BadLine(f"the answer ({key}) is {value}; expected a finite number")
    return str(int(value)) if value.is_integer() else repr(value)


def _answers(value: object, key: str) -> str:
    """Combine a question's right answers into one reference (see `reference`)."""
    answers: list[Any] = value if isinstance(value, list) else [value]
    if not answers:
        raise BadLine(f"the answer ({key}) is an empty list; expected at least one text")
    for answer in answers:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise BadLine(f"the answer ({key}) is {_kind(answer)}; expected text or a number, or a list of them")
    return reference([well_formed(_text(answer, key).strip(), f"the answer ({key})") for answer in answers])


def reference(answers: Sequence[str]) -> str:
    """Combine right answers into Problem.answer: a single answer as it is, several as a JSON list."""
    if len(answers) == 1 and not answers[0].startswith("["):
        return answers[0]
    return json.dumps(list(dict.fromkeys(answers)), ensure_ascii=False)


def right_answers(reference: str) -> list[str]:
    """Return the right answers in a reference."""
    if reference.startswith("["):
        try:
            answers = json.loads(reference)
        except (ValueError, RecursionError):
            return [reference]
        if isinstance(answers, list) and answers and all(isinstance(each, str) for each in answers):
            return answers
    return [reference]


def _right_answers_of(problem: Problem) -> list[str]:
    answer = problem.answer or ""
    return right_answers(answer) if problem.task == "qa" else [answer]


def _kind(value: object) -> str:
    is_empty = isinstance(value, str) and not value.strip()
    return "missing" if value is None else "empty" if is_empty else type(value).__name__
