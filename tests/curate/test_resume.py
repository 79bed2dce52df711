"""A stage that is stopped goes on where it was, and ends as if it had not been."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from curation import CutShort, Killed, rows_of, run

from marsrl.trainer.config.curate import LevelConfig, NearDuplicatesConfig
from marsrl.trainer.curate.ledger import Ledger
from marsrl.trainer.curate.near_duplicates import NearDuplicates
from marsrl.trainer.curate.rows import Decision, Row
from marsrl.trainer.curate.rules import Level, Readable

FILES = ("stages/{}/kept.jsonl", "stages/{}/dropped.jsonl", "stages/{}/stage.json")


class Thirds:
    """Drops a third of the rows. seen: rows that it judged, recalled: those that it had judged before."""

    name = "thirds"

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.recalled: list[int] = []

    def settings(self) -> Mapping[str, Any]:
        return {}

    def recall(self, row: Row, decision: Decision) -> None:
        assert decision.is_kept == (row.number % 3 > 0)
        self.recalled.append(row.number)

    def decisions(self, rows: Iterator[Row]) -> Iterator[tuple[Row, Decision]]:
        for row in rows:
            self.seen.append(row.number)
            yield row, Decision(row.number % 3 > 0, f"rest {row.number % 3}", f"{row.number}")

    def close(self) -> None:
        pass


def stages() -> list[Any]:
    return [Readable(1000, {}), Thirds(), NearDuplicates(NearDuplicatesConfig())]


def rows() -> list[Row]:
    drawn = random.Random(5)
    texts = ["".join(drawn.choices("abcdefgh ", k=60)) for _ in range(40)]
    return rows_of(drawn.choice(texts) + drawn.choice(["", "!", " x"]) for _ in range(120))


def everything(out: Path) -> dict[str, bytes]:
    names = [name.format(stage) for stage in ("read", "thirds", "near_duplicates") for name in FILES]
    return {name: (out / name).read_bytes() for name in [*names, "curated.jsonl"]}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("unbroken")
    run(out, stages(), rows())
    return everything(out)


@pytest.mark.parametrize("seed", range(5))
def test_killed_at_any_row_of_any_stage_it_ends_as_if_it_had_not_been(
    seed: int, tmp_path: Path, unbroken: dict[str, bytes]
) -> None:
    drawn = random.Random(seed)
    for _ in range(3):
        cut = stages()
        which = drawn.randrange(3)
        cut[which] = CutShort(cut[which], drawn.randrange(120))
        try:
            run(tmp_path, cut, rows())
        except Killed:
            tear(tmp_path, cut[which].name, drawn)
    run(tmp_path, stages(), rows())
    assert everything(tmp_path) == unbroken


def tear(out: Path, stage: str, drawn: random.Random) -> None:
    """What was not on the disk yet is lost, of either file more or less."""
    for name in FILES[:2]:
        path = out / name.format(stage)
        with path.open("r+b") as file:
            file.truncate(max(0, path.stat().st_size - drawn.choice([0, 1, drawn.randrange(2000)])))


def test_what_is_decided_is_not_judged_again(tmp_path: Path) -> None:
    first, second = Thirds(), Thirds()
    with pytest.raises(Killed):
        run(tmp_path, [Readable(1000, {}), CutShort(first, 50)], rows())
    _, said = run(tmp_path, [Readable(1000, {}), second], rows())
    assert second.recalled == list(range(50)) and second.seen == list(range(50, 120))
    assert "thirds: goes on behind 50 rows" in said and "read: done before, 120 kept" in said


def test_a_line_of_garbage_ends_what_is_decided(tmp_path: Path) -> None:
    run(tmp_path, [Readable(1000, {}), Thirds()], rows())
    before = everything_of_thirds(tmp_path)
    kept = tmp_path / "stages/thirds/kept.jsonl"
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join([*lines[:10], b'{"row": "x"}\n', *lines[11:]]))
    unfinish(tmp_path / "stages/thirds/stage.json")
    again = Thirds()
    run(tmp_path, [Readable(1000, {}), again], rows())
    assert again.seen[0] == json.loads(lines[10])["row"]
    assert everything_of_thirds(tmp_path) == before


def everything_of_thirds(out: Path) -> list[bytes]:
    return [(out / name.format("thirds")).read_bytes() for name in FILES]


def unfinish(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "tally": None}))


def test_a_decision_that_is_not_final_is_judged_again(tmp_path: Path) -> None:
    held = rows()[:4]
    with Ledger(tmp_path) as ledger:
        assert list(ledger.undecided(iter(held), lambda *_: None)) == held
        for row, is_final in zip(held, (True, False, True, True), strict=True):
            ledger.add(row, Decision(True, "kept", is_final=is_final))
        ledger.finish()
    with Ledger(tmp_path) as ledger:
        assert list(ledger.undecided(iter(held), lambda *_: None)) == held[1:]
        ledger.finish()
    assert (tmp_path / "kept.jsonl").read_bytes().count(b"\n") == 1


def test_a_changed_setting_redoes_its_stage_and_those_behind_it_by_name(tmp_path: Path) -> None:
    def levels(*keep: str) -> list[Any]:
        wanted = Level(LevelConfig(field="answer", keep=list(keep)))
        return [Readable(1000, {}), wanted, Thirds(), NearDuplicates(NearDuplicatesConfig())]

    run(tmp_path, levels("3", "4", "5"), rows())
    before = (tmp_path / "stages/read/kept.jsonl").stat().st_mtime_ns
    records, said = run(tmp_path, levels("4", "5"), rows())
    assert "curate.level: keep is ['4', '5'], was ['3', '4', '5']. Done again: level, thirds, near_duplicates" in said
    assert [record.tally.num_kept for record in records if record.tally] == [120, 2, 2, 2]
    assert (tmp_path / "stages/read/kept.jsonl").stat().st_mtime_ns == before
    _, said = run(tmp_path, levels("4", "5"), rows())
    assert said.count("done before") == 4 and "Done again" not in said


def test_rows_without_a_record_count_for_nothing(tmp_path: Path) -> None:
    """Killed while decisions of other settings were being removed."""
    run(tmp_path, [Readable(1000, {}), Thirds()], rows())
    (tmp_path / "stages/thirds/stage.json").unlink()
    again = Thirds()
    run(tmp_path, [Readable(1000, {}), again], rows())
    assert again.recalled == [] and again.seen == list(range(120))


def test_a_stage_that_is_left_out_or_put_in_redoes_those_behind_it(tmp_path: Path) -> None:
    read, level = Readable(1000, {}), Level(LevelConfig(field="answer", keep=["4"]))
    run(tmp_path, [read, level, Thirds()], rows())
    _, said = run(tmp_path, [read, Thirds()], rows())
    assert "thirds: the stages before it are others. Done again: thirds" in said
    assert len((tmp_path / "curated.jsonl").read_text().splitlines()) == 80
    records, said = run(tmp_path, [read, level, Thirds()], rows())
    assert "level: it was not there. Done again: level, thirds" in said
    assert [record.tally.num_kept for record in records if record.tally] == [120, 1, 1]
