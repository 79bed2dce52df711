"""`marsrl curate` on files: hostile rows, escaped text in the report, and real engines."""

from __future__ import annotations

import datetime
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from completions_server import Handler, completions_server
from desk import boxing_model

from marsrl.commands import cli

ATTACK = "</pre></title><script>document.title=1</script><img src=x onerror=alert(1)>{{ 7*191 }}\x00\x1b\u2028\u202e"
WORDS = ("alpha beta gamma delta", "one two three four", "red green blue black", "north south east west")


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> Path:
    os.chdir(tmp_path)
    return tmp_path


def write(name: str, *rows: object) -> None:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    Path(name).write_bytes(b"".join(line + b"\n" for line in lines))


def row(question: object, answer: object = "1", **more: object) -> dict[str, object]:
    return {"question": question, "answer": answer, **more}


def curated(out: str = "out") -> list[Any]:
    return [json.loads(line) for line in Path(out, "curated.jsonl").read_text("utf-8").splitlines()]


def dropped(stage: str, out: str = "out") -> list[tuple[str, str]]:
    lines = Path(out, "stages", stage, "dropped.jsonl").read_text("utf-8").splitlines()
    return [(held["id"], f"{held['kind']}: {held['detail']}") for held in map(json.loads, lines)]


def test_the_directory_of_a_run_is_not_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    write("raw.jsonl", row(WORDS[0]))
    Path("run", "samples").mkdir(parents=True)
    assert cli.main(["curate", "raw.jsonl", "--out", "run"]) == 2
    assert "--out run is the directory of a training run; name another folder" in capsys.readouterr().err
    assert [path.name for path in Path("run").iterdir()] == ["samples"]


DEEP = row(WORDS[2], deep=json.loads("[" * 200 + "]" * 200))


def test_hostile_rows_are_dropped_and_good_rows_are_kept_whole(capsys: Any) -> None:
    good = [
        row(WORDS[0], more={"a": [1, None, "é\u202e"]}, subject="x\x00y"),
        row(WORDS[1], nan=float("nan"), lone="\ud800"),
        row("z " * 4000, "2"),
    ]
    write(
        "raw.jsonl",
        good[0], b'{"question": "' + b"x" * 1_000_000 + b'", "answer": "1"}', b'{"question": "\xff"}', b"\x00\x00", row(None),
        row(WORDS[0]), good[1], row("half \ud800"), row(" "), b"[1]", b'{"question": "' + b"q" * 5, b"9" * 5000, good[2],
        b"[" * 100_000, DEEP, row(WORDS[3], [1, 2]), b"",
    )  # fmt: skip
    assert cli.main(["curate", "raw.jsonl", "--out", "out"]) == 0, capsys.readouterr().err
    assert curated() == [good[0], {**good[1], "nan": None}, good[2], DEEP]
    found = dict(dropped("read"))
    assert found["raw.jsonl:2"] == "long question: 1,000,000 characters, but at most 32,768 allowed"
    assert found["raw.jsonl:3"] == "unreadable row: not UTF-8 at byte 14"
    assert found["raw.jsonl:8"].startswith("unreadable row: the question has a lone surrogate")
    assert found["raw.jsonl:16"] == "unreadable row: the answer (answer) is a list of 2; expected one answer"
    assert sorted(int(uid.partition(":")[2]) for uid in found) == [2, 3, 4, 5, 8, 9, 10, 11, 12, 14, 16]
    assert dropped("near_duplicates") == [("raw.jsonl:6", "near duplicate: similarity 1.00 to raw.jsonl:1")]


def test_placeholders_are_dropped_and_shared_answers_named(capsys: Any) -> None:
    rows = [row(f"{i}?", answer) for i, answer in enumerate(["7", r"\text{Proof}", "N/A", *["to be shown"] * 20])]
    write("raw.jsonl", *rows)
    words = ["curate", "raw.jsonl", "curate.near_duplicates=null", "--out"]
    assert cli.main([*words, "out"]) == 0
    assert dropped("read") == [
        ("raw.jsonl:2", r"placeholder: the answer is '\\text{Proof}' (data.on_placeholder)"),
        ("raw.jsonl:3", "placeholder: the answer is 'N/A' (data.on_placeholder)"),
    ]
    shown = " ".join(capsys.readouterr().err.split())
    assert "curated.jsonl: one answer is right for many of the 21 problems of raw.jsonl: 'to be shown' of 20." in shown
    assert cli.main([*words, "all", "data.on_placeholder=keep"]) == 0 and curated("all") == rows


def test_tables_and_several_inputs_keep_every_field(capsys: Any) -> None:
    day = datetime.date(2026, 1, 2)
    table = {"problem": [WORDS[0], WORDS[1]], "answer": [3, 4], "day": [day, None], "blob": [None, b"x"]}
    pq.write_table(pa.table(table), "a.parquet")
    write("b.jsonl", {"query": WORDS[2], "ans_box": "7"})
    assert cli.main(["curate", "a.parquet", "b.jsonl", "--out", "out"]) == 0, capsys.readouterr().err
    first = {"problem": WORDS[0], "answer": 3, "day": "2026-01-02", "blob": None}
    assert curated() == [first, {"query": WORDS[2], "ans_box": "7"}]
    assert "the keys problem and answer and rows with query and ans_box, but" in capsys.readouterr().err
    assert dropped("read") == [
        ("0/a.parquet:2", "unreadable row: a field of the row cannot be written as JSON: it is bytes")
    ]


def test_a_field_names_the_level(capsys: Any) -> None:
    levels: list[object] = ["Graduate", "school", ["phd", "x"], None, 3, "3 ", 3.0]
    write("raw.jsonl", *(row(f"{WORDS[i % 4]} {i * 7919}", meta={"level": level}) for i, level in enumerate(levels)))
    words = ["curate", "raw.jsonl", "--out", "out", "curate.near_duplicates=null"]
    words += ["curate.level.field=meta.level", "curate.level.keep=[graduate,PhD,3]"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert [each["meta"]["level"] for each in curated()] == ["Graduate", ["phd", "x"], 3, "3 ", 3.0]
    assert dropped("level") == [
        ("raw.jsonl:2", "other level: meta.level: school"), ("raw.jsonl:4", "no level: meta.level is missing"),
    ]  # fmt: skip
    assert cli.main([*words, "curate.level.missing=keep"]) == 0
    assert len(curated()) == 6 and "curate.level: missing is keep, was drop" in capsys.readouterr().err


def test_the_report_gives_drop_reasons_and_escapes_hostile_text(capsys: Any) -> None:
    rows = [row(f"{ATTACK} {word}", level=ATTACK if i else "ok") for i, word in enumerate(WORDS)]
    write("raw.jsonl", *rows, row(rows[0]["question"]), b"<script>")
    words = ["curate.level.field=level", "curate.level.keep=[ok]", "curate.level.missing=keep"]
    assert cli.main(["curate", "raw.jsonl", "--out", "out", *words]) == 0, capsys.readouterr().err
    text = Path("out/report.html").read_text("utf-8")
    assert not re.findall(r"<(?:script|img|iframe|object|form|base)\b|<[^>]*\son\w+=", text)
    assert "Content-Security-Policy" in text and "<title>out – marsrl curate</title>" in text
    assert "{{ 7*191 }}" in text and "1337" not in text
    assert not set(text) & set("\x00\x1b\u2028\u202e") and "⟨U+202E⟩" in text
    counts = ("6 rows read, 1 kept", "unreadable row 1", "other level 3", "near duplicate 1", "similarity 1.00 to raw")
    for said in counts:
        assert said in " ".join(text.split()), said


NO_MODEL = "policies.main.model is not set"
REFUSED: list[tuple[str, str]] = [
    ("curate.max_question_chars=5", "found no inputs"),
    ("gone.jsonl", "gone.jsonl does not exist"),
    (
        "raw.jsonl curate.clarity.policy=judge",
        "curate.clarity.policy is 'judge'; expected a name under `policies` (main)",
    ),
    ("raw.jsonl curate.graduate.policy=main", NO_MODEL),
    ("raw.jsonl curate.best_of_n.n=4 curate.best_of_n.keep=[1,3]", NO_MODEL),
    ("raw.jsonl curate.best_of_n.keep=[1,17]", "curate.best_of_n.keep is [1, 17]; expected"),
    ("raw.jsonl curate.near_duplicates.treshold=1", "did you mean curate.near_duplicates.threshold?"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_impossible_settings_are_rejected_before_any_stage_runs(words: str, says: str, capsys: Any) -> None:
    write("raw.jsonl", row(WORDS[0]))
    assert cli.main(["curate", *words.split(), "--out", "out"]) == 2
    assert says in capsys.readouterr().err and not Path("out/curated.jsonl").exists()


@pytest.mark.slow
def test_a_server_judges_and_a_real_team_plays(tmp_path: Path, capsys: Any) -> None:
    """The model answers 7 or 8 at random, so rows with the answer 7 get some right answers of 16, other rows get none."""
    model = boxing_model(tmp_path / "model")
    write("raw.jsonl", *(row(f"{WORDS[i % 4]} {i * 7919}", "7" if i % 3 else "9") for i in range(9)))

    def reply(handler: Handler, body: dict[str, Any], before: int) -> None:
        assert "Is it clear?" in body["prompt"]
        handler.complete(f"<verdict>{'no' if WORDS[0] in body['prompt'] else 'yes'}</verdict>")

    with completions_server(reply) as server:
        words = [
            *("curate", "raw.jsonl", "--out", "out"),
            *("task=math", "orchestration=solver", f"policies.main.model={model}"),
            f"policies.judge={{frozen: true, engine: openai, model: {model}}}",
            f"policies.judge.openai={{base_url: '{server.base_url}', model: j}}",
            *("curate.clarity.policy=judge", "curate.best_of_n.n=16", "curate.best_of_n.keep=[1,15]"),
            *("rollout.engine=local", "rollout.placement=local", "rollout.max_response_tokens=40"),
        ]
        assert cli.main(words) == 0, capsys.readouterr().err
        num_asked = len(server.bodies)
        assert cli.main([*words, "curate.best_of_n.keep=[0,0]"]) == 0, capsys.readouterr().err
        assert len(server.bodies) == num_asked == 9
    said = capsys.readouterr().err
    assert "clarity: 6 kept, 3 dropped (3 unclear)" in said
    assert "best_of_n: 4 kept, 2 dropped (2 too hard)" in said
    assert "best_of_n: 2 kept, 4 dropped (4 too easy)" in said and said.count("clarity: already done") == 1
    assert [each["answer"] for each in curated()] == ["9", "9"]
