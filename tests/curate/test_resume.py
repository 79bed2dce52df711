"""A stage that is stopped is run again and ends as if it had not been; one that has finished is not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from curation import CutShort, Killed, rows_of, run

from marsrl.trainer.config.curate import LevelConfig, NearDuplicatesConfig
from marsrl.trainer.curate.near_duplicates import NearDuplicates
from marsrl.trainer.curate.rows import Decision, Row
from marsrl.trainer.curate.rules import Level, Readable


class Thirds:
    """Drops a third of the rows. seen: rows that it judged."""

    name = "thirds"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def settings(self) -> Mapping[str, Any]:
        return {}

    def decisions(self, rows: Iterator[Row]) -> Iterator[tuple[Row, Decision]]:
        for row in rows:
            self.seen.append(row.number)
            yield row, Decision(row.number % 3 > 0, f"rest {row.number % 3}", f"{row.number}")

    def close(self) -> None:
        pass


def stages(*levels: str) -> list[Any]:
    wanted = [Level(LevelConfig(field="answer", keep=list(levels)))] if levels else []
    return [Readable(1000, {}), *wanted, Thirds(), NearDuplicates(NearDuplicatesConfig())]


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
        cut[which] = CutShort(cut[which], drawn.randrange(120))
        try:
            run(out, cut, rows())
        except Killed:
            for path in (out / "stages" / cut[which].name).glob("*.jsonl"):
                with path.open("r+b") as file:  # what was not on the disk yet is lost
                    file.truncate(max(0, path.stat().st_size - drawn.randrange(2000)))
    run(out, stages(), rows())
    assert everything(out) == everything(tmp_path / "unbroken")


def test_a_stage_that_has_finished_is_not_run_again(tmp_path: Path) -> None:
    first, second = Thirds(), Thirds()
    with pytest.raises(Killed):
        run(tmp_path, [Readable(1000, {}), CutShort(first, 50)], rows())
    _, said = run(tmp_path, [Readable(1000, {}), second], rows())
    assert "read: done before, 120 kept" in said and second.seen == list(range(120))
    third = Thirds()
    _, said = run(tmp_path, [Readable(1000, {}), third], rows())
    assert not third.seen and "thirds: done before" in said and "Done again" not in said


def test_a_changed_setting_redoes_its_stage_and_those_behind_it_by_name(tmp_path: Path) -> None:
    run(tmp_path, stages("3", "4", "5"), rows())
    before = (tmp_path / "stages/read/kept.jsonl").stat().st_mtime_ns
    records, said = run(tmp_path, stages("4", "5"), rows())
    assert "curate.level: keep is ['4', '5'], was ['3', '4', '5']. Done again: level, thirds, near_duplicates" in said
    assert [record.tally.num_kept for record in records] == [120, 2, 2, 2]
    assert (tmp_path / "stages/read/kept.jsonl").stat().st_mtime_ns == before


def test_rows_of_a_stage_that_was_killed_count_for_nothing_whichever_settings_come_next(tmp_path: Path) -> None:
    run(tmp_path, stages("3", "4", "5"), rows())
    whole = everything(tmp_path)
    changed = stages("4")
    changed[1] = CutShort(changed[1], 50)
    with pytest.raises(Killed):
        run(tmp_path, changed, rows())
    run(tmp_path, stages("3", "4", "5"), rows())
    assert everything(tmp_path) == whole


def test_a_stage_that_is_left_out_or_put_in_redoes_those_behind_it(tmp_path: Path) -> None:
    _, said = run(tmp_path, stages("4"), rows())
    assert "Done again" not in said
    _, said = run(tmp_path, stages(), rows())
    assert "curate.thirds: the stages before it are others. Done again: thirds, near_duplicates" in said
    records, said = run(tmp_path, stages("5"), rows())
    assert "curate.level: keep is ['5'], was ['4']. Done again: level, thirds, near_duplicates" in said
    assert [record.tally.num_kept for record in records] == [120, 1, 1, 1]
