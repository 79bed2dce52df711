"""What the index says is what the samples files say."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from made_up_run import make_group, make_run, make_sample

from marsrl.rollout.types import Finish, Reward
from marsrl.trainer.config.read import read_config
from marsrl.trainer.plan.command import as_json
from marsrl.trainer.plan.plan import make_plan
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import SampleRecord, read_samples, sample_files, write_samples
from marsrl.trainer.report.trace import TraceLog
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.view import measured, queries
from marsrl.trainer.view.index_file import connect, index_path
from marsrl.trainer.view.indexer import index_once
from marsrl.trainer.view.queries import Filter, Row


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARSRL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def all_found(run: Path, wanted: Filter) -> tuple[list[Row], int | None]:
    """Every page of a filter, and the count that the first one gave."""
    with closing(connect(index_path(run))) as index:
        page = queries.find(index, wanted)
        num, rows = page.num, list(page.rows)
        while page.next_id is not None:
            page = queries.find(index, wanted, page.next_id)
            rows += page.rows
    return rows, num


def is_wrong(sample: SampleRecord) -> bool:
    return sample.verdict is not None and sample.parts.get("verdict") == 0


FILTERS: list[tuple[Filter, Callable[[int, SampleRecord], bool]]] = [
    (Filter(), lambda step, s: True),
    (Filter(agent="verifier1"), lambda step, s: s.agent == "verifier1"),
    (Filter(agent="nobody"), lambda step, s: False),
    (Filter(first_step=2, last_step=3), lambda step, s: 2 <= step <= 3),
    (Filter(low=0.5), lambda step, s: s.reward is not None and s.reward >= 0.5),
    (Filter(low=0.34, high=0.36), lambda step, s: s.reward == 0.35),
    (Filter(high=0.0, agent="solver"), lambda step, s: s.reward is not None and s.reward <= 0 and s.agent == "solver"),
    (Filter(flags=("missing reward",)), lambda step, s: s.reward is None),
    (Filter(flags=("truncated", "wrong verdict")), lambda step, s: s.finish is Finish.LENGTH and is_wrong(s)),
    (Filter(flags=("verdict",), last_step=4), lambda step, s: s.verdict is not None and step <= 4),
    (Filter(problem="p1.2"), lambda step, s: s.problem_id == "p1.2"),
    (Filter(words="ANSWER 9"), lambda step, s: "Answer: 9" in s.text),
    (Filter(words="answer", agent="corrector1"), lambda step, s: "Answer" in s.text and s.agent == "corrector1"),
    (Filter(words="nowhere"), lambda step, s: False),
    (Filter(words="needle", high=0.4), lambda step, s: "needle" in s.text and s.reward is not None and s.reward <= 0.4),
]


def test_a_filter_finds_the_samples_that_pass_it_newest_first_and_no_other(cached: Path) -> None:
    run = make_run(cached, num_steps=6)
    odd = [make_sample(f"o{i}", text=f"needle {i}", reward=Reward(i / 20, i / 20)) for i in range(20)]
    wrong = make_sample("w", "judge", verdict=False, finish=Finish.LENGTH, reward=Reward(0.0, 0.0, {"verdict": 0.0}))
    write_samples(run, 9, [make_group(*odd), make_group(wrong)])
    index_once(run.path)
    for wanted, passes in FILTERS:
        expected = [
            (step, line)
            for step, path in sorted(sample_files(run).items(), reverse=True)
            for line, sample in reversed([*enumerate(read_samples(path), start=1)])
            if passes(step, sample)
        ]
        rows, num = all_found(run.path, wanted)
        assert [(row.step, row.line) for row in rows] == expected, wanted
        assert num in (None, len(expected)), wanted
    assert all_found(run.path, Filter(agent="solver", low=0.5))[1] is not None  # zones can tell how many


def test_a_filter_that_makes_no_sense_is_refused(cached: Path) -> None:
    run = make_run(cached, num_steps=1)
    index_once(run.path)
    for wanted, reason in (
        (Filter(flags=("bad",)), "nothing to filter by"),
        (Filter(words="+-"), "no letter or digit"),
    ):
        with pytest.raises(ValueError, match=reason):
            all_found(run.path, wanted)


def test_a_run_that_goes_on_is_indexed_as_it_goes_and_a_step_played_again_replaces_its_samples(cached: Path) -> None:
    run = make_run(cached, num_steps=2)
    index_once(run.path)
    before = all_found(run.path, Filter())[0]
    write_samples(run, 2, [make_group(make_sample("new", text="a new word: zebra"))])
    with open(run.metrics, "ab") as file:
        file.write(b'{"step": 2, "actor/entropy": 0.5}\n{"step": 3, "actor/ent')
    index_once(run.path)
    rows, _ = all_found(run.path, Filter())
    assert rows[0].uid == "new" and rows[1:] == before
    with closing(connect(index_path(run.path))) as index:
        assert queries.curve(index, "actor/entropy")[-1] == (2, 0.5)
        assert queries.counts(index) == {
            "samples": len(rows),
            "files": 3,
            "first_step": 0,
            "last_step": 2,
            "last_metrics": 2,
        }
    write_samples(run, 2, [make_group(make_sample("again", text="another: quagga"))])
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.unlink()  # a run that goes on writes what is left as a new file
    run.metrics.write_bytes(lines[0])
    sample_files(run)[0].unlink()
    index_once(run.path)
    assert {row.uid for row in all_found(run.path, Filter())[0] if row.step == 2} == {"again"}
    assert not [row for row in all_found(run.path, Filter())[0] if row.step == 0]
    assert not all_found(run.path, Filter(words="zebra"))[0] and all_found(run.path, Filter(words="quagga"))[0]
    with closing(connect(index_path(run.path))) as index:
        assert [step for step, _ in queries.curve(index, "actor/entropy")] == [0]
    run.forget_after(1)
    index_once(run.path)
    with closing(connect(index_path(run.path))) as index:
        assert (queries.counts(index)["files"], queries.counts(index)["last_step"]) == (1, 1)
    write_samples(run, 2, [make_group(make_sample("third", text="neither"))])
    index_once(run.path)
    assert not all_found(run.path, Filter(words="quagga"))[0]
    assert [row.uid for row in all_found(run.path, Filter(words="neither"))[0]] == ["third"]


def test_what_a_run_warned_of_is_listed_beside_what_its_metrics_say(cached: Path) -> None:
    run = make_run(cached, num_steps=4)
    for number, step in ((0, 3), (1, 3)):
        console = RunConsole(rank=number, stream=io.StringIO())
        console.keep_warnings(run.warnings)
        console.step = step
        console.warning(f"rank {number} is \ud800 slow\n\x1b[2J")
    sample_files(run)[1].write_bytes(b"garbage")
    index_once(run.path)
    with closing(connect(index_path(run.path))) as index:
        listed = [(each.get("first_step"), each["step"], each["kind"]) for each in measured.warnings(index)]
        said = [each["text"] for each in measured.warnings(index) if each["kind"] == "said"]
    assert said == ["rank 0 is \ud800 slow\n\x1b[2J"]  # once: rank 0 speaks for all
    assert sorted(listed, key=str) == [
        (0, 3, "reward/solver/missing"),
        (2, 2, "metrics/non_finite"),
        (None, 1, "samples"),
        (None, 3, "said"),
    ]


def test_the_speed_of_a_step_stands_beside_what_the_plan_in_the_folder_says(cached: Path) -> None:
    run = make_run(cached, num_steps=3)
    index_once(run.path)
    with closing(connect(index_path(run.path))) as index:
        assert "no plan.json" in measured.speed(index, run)["planned"]["why_not"]
        plan = make_plan(read_config("qwen3_30b_a3b", [])[0], 64, "h100-80g")
        (run.path / "plan.json").write_text(as_json(plan))
        speed = measured.speed(index, run)
        rows = [row.values["timing_s/rollout"] for row in read_metrics(run.metrics)]
        (run.path / "plan.json").write_text("{}")
        assert "is not what marsrl plan --json writes" in measured.speed(index, run)["planned"]["why_not"]
    chosen = plan.policies[0].chosen
    assert chosen is not None and speed["planned"]["gpus"] == "64 x h100-80g"
    assert speed["planned"]["parts"] == pytest.approx(
        {
            "rollout": plan.policies[0].rollout.seconds,
            "step": chosen.time.total,
            "publish": plan.policies[0].sync.total,
            "total": plan.step_s,
        }
    )
    assert speed["measured"]["rollout"] == sorted(rows)[1] and speed["measured"]["total"] is None


def test_a_problems_life_lies_between_the_publish_of_its_oldest_version_and_the_end_of_its_step(cached: Path) -> None:
    run = RunDirectory.create(cached, "a", "p")
    write_samples(run, 2, [make_group(make_sample("s", version=1)), make_group(make_sample("t", "judge", version=0))])
    trace = TraceLog(run.trace)
    zero = trace._zero
    for lane, name, start, end, arguments in (
        ("sync/main", "publish", 1.0, 2.0, {"version": 0}),
        ("sync/main", "publish", 5.0, 6.0, {"version": 1}),
        ("mark/step", "step 1", 3.0, 3.0, {}),
        ("mark/step", "step 2", 7.0, 7.0, {}),
        ("mark/step", "step 3", 9.0, 9.0, {}),
    ):
        trace.add(lane, name, zero + start, zero + end, arguments)
    trace.save()
    index_once(run.path)
    with closing(connect(index_path(run.path))) as index:
        lives = measured.life(index, "p0#0", ("judge", "solver"))["lives"]
        seen = queries.spans(index, 4.0, 8.0)
    assert [(each["agent"], each["version"], each["start"], each["end"]) for each in lives] == [
        ("solver", 1, 6.0, 9.0),
        ("judge", 0, 2.0, 9.0),
    ]
    assert [each["color"] for each in lives] == ["c1", "c0"]  # of the place in the team
    assert sorted(span[1:4] for span in seen.spans) == [("publish", 5.0, 6.0), ("step 2", 7.0, 7.0)]


def test_looking_writes_nothing_into_the_run(cached: Path) -> None:
    run = make_run(cached / "runs", num_steps=1)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    index_once(run.path)
    all_found(run.path, Filter(words="answer"))
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_an_index_of_another_version_or_that_is_none_is_made_anew(cached: Path) -> None:
    run = make_run(cached, num_steps=1)
    path = index_path(run.path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database at all" * 100)
    index_once(run.path)
    rows, _ = all_found(run.path, Filter())
    with closing(connect(path, writes=True)) as index:
        index.execute("PRAGMA user_version = 999")
    index_once(run.path)
    assert rows and all_found(run.path, Filter())[0] == rows


def test_two_runs_of_one_name_have_two_indexes(tmp_path: Path) -> None:
    assert index_path(tmp_path / "a" / "run") != index_path(tmp_path / "b" / "run")
    assert index_path(RunDirectory(tmp_path / "a").path) == index_path(tmp_path / "b" / ".." / "a")


def test_the_benchmark_measures(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    words = ["--samples", "2000", "--no-browser", "--folder", str(tmp_path), "--json", str(tmp_path / "out.json")]
    done = subprocess.run([sys.executable, "benchmarks/view.py", *words], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["samples"] == 2000 and all(seconds > 0 for seconds in found["filters_s"].values())
    assert done.stdout.splitlines()[-1].startswith("ratio: ")
