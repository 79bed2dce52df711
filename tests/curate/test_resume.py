"""A stage that is stopped is run again and ends as if it had not been; one that has finished is not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from curation import Killed, cut_short, rows_of, run

from marsrl.trainer.commands.curate.near_duplicates import near_duplicates
from marsrl.trainer.commands.curate.rows import Decision, Decisions, Row, Stage, level, readable
from marsrl.trainer.config.curate import LevelConfig, NearDuplicatesConfig


def thirds() -> Stage:
    """Drops a third of the rows."""

    def decide(rows: Iterator[Row]) -> Decisions:
        for row in rows:
            yield row, Decision(row.number % 3 > 0, f"rest {row.number % 3}", f"{row.number}")

    return Stage("thirds", {}, decide)


def stages(*levels: str) -> list[Stage]:
    wanted = [level(LevelConfig(field="answer", keep=list(levels)))] if levels else []
    return [readable(1000, {}), *wanted, thirds(), near_duplicates(NearDuplicatesConfig())]


def rows() -> list[Row]:
    drawn = random.Random(5)
    texts = ["".join(drawn.choices("abcdefgh ", k=60)) for _ in range(40)]
    return rows_of(drawn.choice(texts) + drawn.choice(["", "!", " x"]) for _ in range(120))


def everything(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.json*"))}


@pytest.mark.parametrize("seed", range(5))
def test_killed_at_any_row_of_any_stage_it_ends_as_if_it_had_not_been(seed: int, tmp_path: Path) -> None:
    run(tmp_path / "unbroken", stages(), rows())
    drawn, out = random.Random(seed), tmp_path / "killed"
    for _ in range(3):
        cut = stages()
        which = drawn.randrange(3)
        cut[which] = cut_short(cut[which], drawn.randrange(120))
        try:
            run(out, cut, rows())
        except Killed:
            for path in (out / "stages" / cut[which].name).glob("*.jsonl"):
                with path.open("r+b") as file:  # what was not on the disk yet is lost
                    file.truncate(max(0, path.stat().st_size - drawn.randrange(2000)))
    run(out, stages(), rows())
    assert everything(out) == everything(tmp_path / "unbroken")


def test_a_changed_setting_redoes_its_stage_and_those_behind_it_by_name(tmp_path: Path) -> None:
    run(tmp_path, stages("3", "4", "5"), rows())
    before = (tmp_path / "stages/read/kept.jsonl").stat().st_mtime_ns
    records, said = run(tmp_path, stages("4", "5"), rows())
    assert "curate.level: keep is ['4', '5'], was ['3', '4', '5']. Done again: level, thirds, near_duplicates" in said
    assert [record.tally.num_kept for record in records] == [120, 2, 2, 2]
    assert (tmp_path / "stages/read/kept.jsonl").stat().st_mtime_ns == before
