"""The viewer's catalog agrees with the files of its run."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_run import make_group, make_run, make_sample

from marsrl.commands.look import measured
from marsrl.commands.look.catalog import Catalog, Filter, Row
from marsrl.commands.look.palette import COLORS, activity_color, series_colors
from marsrl.commands.plan.command import as_json
from marsrl.commands.plan.plan import make_plan
from marsrl.rollout.types import Finish, Reward
from marsrl.trainer.config.read import read_config
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import SampleRecord, read_samples, write_samples
from marsrl.trainer.report.trace import TraceLog
from marsrl.trainer.runs.directory import RunDirectory, step_files


def all_found(catalog: Catalog, wanted: Filter, within_s: float = 60.0) -> tuple[list[Row], int | None]:
    """Return every page of a filter, and the count of the first page."""
    page = catalog.find(wanted, within_s=within_s)
    num, rows = page.num, list(page.rows)
    while page.next is not None:
        page = catalog.find(wanted, page.next, within_s=within_s)
        rows += page.rows
    return rows, num


def look_at(run: RunDirectory) -> Catalog:
    catalog = Catalog(run.path)
    catalog.refresh(None)
    return catalog


FILTERS: list[tuple[Filter, Callable[[int, SampleRecord], bool]]] = [
    (Filter(), lambda step, s: True),
    (Filter(agent="verifier1"), lambda step, s: s.agent == "verifier1"),
    (Filter(agent="nobody"), lambda step, s: False),
    (Filter(first=2, last=3), lambda step, s: 2 <= step <= 3),
    (Filter(low=0.5), lambda step, s: s.reward is not None and s.reward >= 0.5),
    (Filter(low=0.34, high=0.36), lambda step, s: s.reward == 0.35),
    (Filter(high=0.0, agent="solver"), lambda step, s: s.reward is not None and s.reward <= 0 and s.agent == "solver"),
    (Filter(flag=("missing reward",)), lambda step, s: s.reward is None),
    (Filter(flag=("truncated", "wrong verdict")), lambda step, s: s.uid == "w"),
    (Filter(flag=("no answer found",)), lambda step, s: s.answer is None and s.verdict is None),
    (Filter(flag=("verdict",), last=4), lambda step, s: s.verdict is not None and step <= 4),
    (Filter(problem="p1.2"), lambda step, s: s.problem_id == "p1.2"),
    (Filter(words="ANSWER 9"), lambda step, s: "Answer: 9" in s.text),
    (Filter(words="answer", agent="corrector1"), lambda step, s: "Answer" in s.text and s.agent == "corrector1"),
    (Filter(words="asked"), lambda step, s: s.uid in ("o0", "w")),  # only the first of a group has the prompt
    (Filter(words="nowhere"), lambda step, s: False),
    (Filter(words="needle", high=0.4), lambda step, s: "needle" in s.text and s.reward is not None and s.reward <= 0.4),
]


def test_filters_find_matching_samples_and_write_nothing(tmp_path: Path) -> None:
    # A name that DuckDB could take for a pattern or a column.
    run = make_run(tmp_path / "runs[1]*" / "step=9", num_steps=6)
    rewards = [Reward(i / 20, i / 20) for i in range(20)]
    odd = [make_sample(f"o{i}", text=f"needle {i}", prompt_text="asked", reward=r) for i, r in enumerate(rewards)]
    changes = {"verdict": False, "finish": Finish.LENGTH, "reward": Reward(0.0, 0.0, {"verdict": 0.0})}
    write_samples(run, 9, [make_group(*odd), make_group(make_sample("w", "judge", prompt_text="asked", **changes))])
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    catalog = look_at(run)
    for wanted, passes in FILTERS:
        expected = [
            (step, line)
            for step, path in sorted(step_files(run.samples).items(), reverse=True)
            for line, sample in reversed([*enumerate(read_samples(path), start=1)])
            if passes(step, sample)
        ]
        rows, num = all_found(catalog, wanted)
        assert [(row.step, row.line) for row in rows] == expected, wanted
        assert num == (None if wanted.words else len(expected)), wanted
        assert rows == all_found(catalog, wanted, within_s=0.0)[0], wanted  # one step per page
    assert [len(catalog.find(Filter(words="answer", last=1), within_s=each).rows) for each in (0.0, 60.0)] == [24, 36]
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_problems_samples_stand_together_with_their_means(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    names = {"a": ("p", 1.0), "b": ("q", 0.0), "c": ("p", 0.5), "d": ("p", math.nan)}
    rows = {uid: {"problem_id": name, "reward": Reward(value, value)} for uid, (name, value) in names.items()}
    write_samples(
        run, 0, [make_group(make_sample(uid, "judge" if uid == "d" else "solver", **row)) for uid, row in rows.items()]
    )
    catalog = look_at(run)
    page = catalog.find(Filter())
    assert [row.uid for row in page.rows] == ["d", "c", "a", "b"]
    played = [(each.block, each.agent, each.num, each.reward) for each in page.played]
    assert played == [(4, "solver", 2, 0.75), (2, "solver", 1, 0.0), (4, "judge", 1, None)]
    assert [row.uid for row in catalog.find(Filter(), (0, 3)).rows] == ["a", "b"]
    assert [row.uid for row in catalog.find(Filter(agent="solver"), (0, 3), has_top=True).rows] == ["c", "a", "b"]
    assert [(each.block, each.num) for each in catalog.find(Filter(low=0.7)).played] == [(4, 1)]


def test_only_answers_that_a_team_reads_can_be_missing(tmp_path: Path) -> None:
    for number, (config, changes, flags) in enumerate(
        (
            ({}, {}, ["no answer found"]),
            ({}, {"answer": "7"}, []),
            ({}, {"reward": Reward(1.0, math.nan, {"readable": 1.0})}, []),  # no answer, but a query that could be read
            ({}, {"finish": Finish.ERROR}, ["error"]),
            ({"external": {"function": "program.py:run"}}, {}, []),
        )
    ):
        run = RunDirectory.create(tmp_path, str(number), "p")
        run.write_config(config)
        write_samples(run, 0, [make_group(make_sample("s", **changes))])
        assert look_at(run).find(Filter()).rows[0].flags == flags, number


def test_problems_are_listed_over_ranges_of_steps(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    catalog = look_at(run)
    assert measured.problems(catalog) == {"columns": [], "rows": []}
    for step in range(10, 40):
        often = make_sample("s", problem_id="often", reward=Reward(0.5, float(step >= 20)))
        rare = make_sample("t", "judge" if step % 2 else "solver", problem_id=f"{step // 10}", reward=Reward(0.0, 0.0))
        write_samples(run, step, [make_group(often), make_group(rare)])
    catalog.refresh(None)
    found = measured.problems(catalog, "solver")
    assert found["columns"] == [(step, step + 1) for step in range(10, 40, 2)]
    rows = {row["problem"]: row["cells"] for row in found["rows"]}
    assert [*rows] == ["often", "3", "2", "1"]  # problems with equally many samples: the newest first
    assert rows["often"][:6] == [[2, 0.5, 0.0]] * 5 + [[2, 0.5, 1.0]]
    assert rows["1"] == [[1, 0.0, 0.0]] * 5 + [None] * 10
    assert [row["cells"][0][0] for row in measured.problems(catalog)["rows"] if row["problem"] == "1"] == [2]


def test_steps_have_places_in_tokens_and_hours(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    values = {"rollout/tokens": 100, "timing_s/step": 1800, "timing_s/total": 9999, "timing_s/evaluate": 60}
    rows = [{"step": i, **values} for i in range(1, 1201)] + [{"step": 1201, "reward/all/mean": None}]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    axes = measured.axes(look_at(run))
    assert axes["step"] == [*range(1, 1202, 2), 1201]  # as many points as the curves have
    assert axes["tokens"][:2] == [100, 300] and axes["hours"][-2:] == [600.0, 600.0]


def test_a_resumed_run_is_followed_and_replayed_steps_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=2)
    catalog = look_at(run)
    before = all_found(catalog, Filter())[0]
    write_samples(run, 2, [make_group(make_sample("new", text="a new word: zebra"))])
    with open(run.metrics, "ab") as file:
        file.write(b'{"step": 2, "actor/entropy": 0.5}\n{"step": 3, "actor/ent')
    catalog.refresh()
    rows, _ = all_found(catalog, Filter())
    assert rows[0].uid == "new" and rows[1:] == before
    assert catalog.curves["actor/entropy"][-1] == (2, 0.5) and catalog.steps == (0, 2)
    assert catalog.counts == {"samples": len(rows), "files": 3, "last_metrics": 2}
    write_samples(run, 2, [make_group(make_sample("again", text="another: quagga"))])
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(lines[0])  # a resumed run removes the lines of lost steps
    step_files(run.samples)[0].unlink()
    catalog.refresh()
    assert {row.uid for row in all_found(catalog, Filter())[0] if row.step == 2} == {"again"}
    with pytest.raises(ValueError, match="new is no longer in its file"):
        catalog.records(rows[:1])
    assert not [row for row in all_found(catalog, Filter())[0] if row.step == 0]
    assert not all_found(catalog, Filter(words="zebra"))[0] and all_found(catalog, Filter(words="quagga"))[0]
    assert [step for step, _ in catalog.curves["actor/entropy"]] == [0]
    for lines, last in (
        (b'{"step": 1, "actor/entropy": 0.25}\ndamaged\n', 1),
        (b'{"step": 2, "actor/entropy": 0}\n', 2),
    ):
        with run.metrics.open("ab") as file:
            file.write(lines)
        assert [step for step, _ in catalog.curves["actor/entropy"]] == list(range(last + 1))
    assert "line 3: b'damaged'" in catalog.refused["metrics.jsonl"]
    run.forget_after(1)
    catalog.refresh()
    assert catalog.counts["files"] == 1 and not all_found(catalog, Filter(words="quagga"))[0]


def test_samples_left_out_for_time_are_read_next_time(tmp_path: Path) -> None:
    catalog = Catalog(make_run(tmp_path, num_steps=3).path)
    for num_files in (1, 2, 3, 3):
        catalog.refresh(budget_s=0.0)
        assert catalog.counts["files"] == num_files
    assert catalog.deepest(last=True, num=2) == ["p0.0#0", "p0.1#0"]  # these have samples of three agents
    assert catalog.deepest(last=False, num=1) == ["p0.0#0"]


def test_a_long_curve_is_shown_as_a_thousand_points(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    zero = dict.fromkeys([*(f"reward/solver/mean{end}" for end in ("", "/low", "/high")), "reward/all/mean"], 0)
    rows = [{"step": i, "own": i, "timing_s/step": i, **zero, "actor/grad_norm": 1} for i in range(3000)]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    catalog = look_at(run)
    curve, none = measured.curves(catalog, ["own", "unknown"])
    assert curve["steps"] == curve["values"] == [*range(1, 3000, 3)] and curve["every"] == 3
    assert none == {"steps": [], "values": [], "every": 1}
    assert measured.speed(catalog)["measured"]["step"] == 2974.5  # median of the last 50 steps
    charts = {each["title"]: each for each in measured.charts(catalog)}
    alone = ["own", "reward/solver/mean/low", "reward/solver/mean/high"]
    assert [*charts] == ["Reward", "Gradient norm", "Time per step", *alone]
    assert [each["is_main"] for each in charts.values()] == [True] * 3 + [False] * 3
    labels = [each["label"] for name in ("Reward", "Gradient norm") for each in charts[name]["series"]]
    assert labels == ["solver", "all", "grad_norm"]
    assert charts["Reward"]["is_zero"] and not charts["Time per step"]["is_zero"]
    assert [each["has_band"] for each in charts["Reward"]["series"]] == [True, False]


def test_an_agent_has_one_colour_and_other_series_have_others() -> None:
    found = series_colors(["solver", "main/solver", "judge", "x", "all", "y"], ["judge", "solver"])
    assert found["solver"] == found["main/solver"] == series_colors(["solver"], ["judge", "solver"])["solver"]
    assert len({*found.values()}) == len(found) - 1
    assert {activity_color(str(i)) for i in range(99)} == {*COLORS}


def test_warnings_of_a_run_and_of_its_metrics_are_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=4)
    printed = io.StringIO()
    for number in (0, 1):
        console = RunConsole(rank=number, stream=printed)
        console.keep_warnings(run.warnings)
        console.step = 3
        console.warning(f"rank {number} is \ud800 slow\n\x1b[2J")
    with run.warnings.open("ab") as file:
        file.write(b'{"step": 6, "text": "being writt')
    step_files(run.samples)[1].write_bytes(b"garbage")
    run.trace.write_bytes(b"garbage")
    unusual = {"actor/grad_spikes": 2, "main/actor/solver/grad_spikes": 1, "response_length/solver/clip_ratio": 0.51}
    with run.metrics.open("ab") as file:
        file.write(json.dumps({"step": 4, "response_length/judge/clip_ratio": 0.5, **unusual}).encode() + b"\n")
    catalog = look_at(run)
    assert catalog.trace == []
    warnings = measured.warnings(catalog)
    listed = [(each.get("first_step"), each["step"], each["kind"]) for each in warnings]
    said = [each["text"] for each in warnings if each["kind"] == "said"]
    assert said == ["rank 0 is \ud800 slow\n\x1b[2J"]  # rank 0 reports warnings for all ranks
    assert printed.getvalue() == "warning: rank 0 is ⟨U+D800⟩ slow\n␛[2J\n"
    of_metrics = [(0, 3, "reward/solver/missing"), (2, 2, "metrics/non_finite"), *((4, 4, name) for name in unusual)]
    assert sorted(listed, key=str) == [*of_metrics, (None, 1, "samples"), (None, 3, "said"), (None, None, "trace.json")]
    assert [step for _, step, _ in listed] == [4, 4, 4, 3, 3, 2, 1, None] and "grad_spikes up to 2)" in str(warnings)


def test_the_speed_of_a_step_is_shown_beside_the_plan(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=3)
    catalog = look_at(run)
    assert "no plan.json" in measured.speed(catalog)["planned"]["why_not"]
    plan = make_plan(read_config("qwen3_30b_a3b", [])[0], 64, "h100-80g")
    (run.path / "plan.json").write_text(as_json(plan))
    speed = measured.speed(catalog)
    rows = [row.values["timing_s/rollout"] for row in read_metrics(run.metrics)]
    (run.path / "plan.json").write_text("{}")
    assert "is not what marsrl plan --json writes" in measured.speed(catalog)["planned"]["why_not"]
    chosen = plan.policies[0].chosen
    assert chosen is not None and speed["planned"]["gpus"] == "64 x h100-80g"
    seconds = (plan.policies[0].rollout.seconds, chosen.time.total, plan.policies[0].sync.total, plan.step_s)
    assert list(speed["planned"]["parts"]) == ["rollout", "step", "publish", "total"]
    assert [*speed["planned"]["parts"].values()] == pytest.approx(seconds)
    assert speed["measured"]["rollout"] == sorted(rows)[1] and speed["measured"]["total"] is None


def test_a_problem_lives_from_its_oldest_publish_to_its_step_end(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    write_samples(run, 2, [make_group(make_sample("s", version=1)), make_group(make_sample("t", "judge", version=0))])
    trace = TraceLog(run.trace)
    for lane, name, start, end, arguments in (
        ("sync/main", "publish", 1.0, 2.0, {"version": 0}),
        ("sync/main", "publish", 5.0, 6.0, {"version": 1}),
        ("mark/step", "step 1", 3.0, 3.0, {}),
        ("mark/step", "step 2", 7.0, 7.0, {}),
        ("mark/step", "step 3", 9.0, 9.0, {}),
        ("sync/main", "publish", 10.0, 11.0, {"version": 1}),  # repeated, as in a resumed run
    ):
        trace.add(lane, name, trace.zero + start, trace.zero + end, arguments)
    trace.save()
    write_samples(run, 3, [make_group(make_sample("u", version=2))])
    run.write_config({"agents": {"judge": {}, "solver": {}}})
    catalog = look_at(run)
    lives = measured.life(catalog, "p0#0")["lives"]
    assert [(each["agent"], each["version"], each["start"], each["end"], each["samples"]) for each in lives] == [
        ("solver", 1, 6.0, 9.0, 1),
        ("judge", 0, 2.0, 9.0, 1),
        ("solver", 2, 9.0, 11.0, 1),  # version 2 was not published, so the life begins with the sample's step
    ]
    assert [each["color"] for each in lives] == ["c1", "c0", "c1"]  # colors follow the position in the team
    assert catalog.ages == [("judge", 1, 1), ("solver", 0, 2)]
    run.metrics.write_text('{"step": 1, "actor/updates": 0}\n{"step": 2, "actor/updates": 1}\n')
    assert catalog.ages == [("judge", 0, 1), ("solver", 0, 2)]  # step 1 trained nothing and made no version
    for low, high in ((4.0, 8.0), (6.0, 7.0)):
        seen = measured.spans(catalog, low, high)
        assert sorted(span[1:4] for span in seen["spans"]) == [("publish", 5.0, 6.0), ("step 2", 7.0, 7.0)]
    whole = measured.spans(catalog)
    assert (whole["low"], whole["high"], whole["end"], seen["num_left_out"]) == (1.0, 11.0, 11.0, 0)
