"""A stopped stage runs again and gives the same result; a finished stage does not run again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from curation import Killed, ScriptedJudge, by_length, cut_short, rows_of, run

from marsrl.commands.curate.near_duplicates import near_duplicates
from marsrl.commands.curate.rows import Decision, Decisions, Row, Stage, level, readable
from marsrl.trainer.config.curate import LevelConfig, NearDuplicatesConfig


def thirds() -> Stage:
    """Stage that drops a third of the rows."""

    def decide(rows: Iterator[Row]) -> Decisions:
        for row in rows:
            yield row, Decision(row.number % 3 > 0, f"rest {row.number % 3}", f"{row.number}")

    return Stage("thirds", {}, decide)


def stages(*others: Stage) -> list[Stage]:
    return [readable(1000, {}), *others, thirds(), near_duplicates(NearDuplicatesConfig())]


def levels(*kept: str) -> Stage:
    return level(LevelConfig(field="answer", keep=list(kept)))


def rows() -> list[Row]:
    drawn = random.Random(5)
    texts = ["".join(drawn.choices("abcdefgh ", k=60)) for _ in range(40)]
    return rows_of(drawn.choice(texts) + drawn.choice(["", "!", " x"]) for _ in range(120))


def everything(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.json*"))}


@pytest.mark.parametrize("seed", range(5))
def test_a_curation_killed_at_any_row_resumes_to_the_same_result(seed: int, tmp_path: Path) -> None:
    whole, judge = (ScriptedJudge(by_length) for _ in range(2))
    run(tmp_path / "unbroken", stages(whole.stage(tmp_path / "unbroken")), rows())
    drawn, out = random.Random(seed), tmp_path / "killed"
    num_torn = 0
    for _ in range(4):
        cut = stages(judge.stage(out))
        which = drawn.randrange(4)
        cut[which] = cut_short(cut[which], drawn.randrange(120))
        try:
            run(out, cut, rows())
        except Killed:
            for path in (out / "stages" / cut[which].name).glob("*.jsonl"):
                size, is_answers = path.stat().st_size, path.name == "answers.jsonl"
                num_torn += is_answers and size > 0
                with path.open("r+b") as file:  # a crash loses data not yet on disk, and tears only the last answer
                    file.truncate(max(0, size - (3 if is_answers else drawn.randrange(2000))))
    run(out, stages(judge.stage(out)), rows())
    assert everything(out) == everything(tmp_path / "unbroken")
    assert set(judge.asked) == set(whole.asked) and len(judge.asked) == len(whole.asked) + num_torn


def test_a_changed_setting_redoes_its_stage_and_later_ones(tmp_path: Path) -> None:
    run(tmp_path, stages(levels("3", "4", "5")), rows())
    before = (tmp_path / "stages/read/kept.jsonl").stat().st_mtime_ns
    records, said = run(tmp_path, stages(levels("4", "5")), rows())
    assert (
        "curate.level: keep is ['4', '5'], was ['3', '4', '5']; these stages run again: level, thirds, near_duplicates"
        in said
    )
    assert [record.num_kept for record in records] == [120, 2, 2, 2]
    assert (tmp_path / "stages/read/kept.jsonl").stat().st_mtime_ns == before
