from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from made_up_run import make_group, make_sample, make_summary

from marsrl.rollout.types import MISSING, Reward
from marsrl.trainer.report.samples_log import read_samples, sample_files, write_samples
from marsrl.trainer.report.summary import Evaluation, load_summary, save_summary
from marsrl.trainer.report.trace import TraceLog, read_trace
from marsrl.trainer.runs.directory import RunDirectory

HOSTILE = "\x00\x1b[31m\r\n\u2028\u2029\ud800 \udfff</script>\"'{}\x85\ufeff\U0001f600"


def test_hostile_text_comes_back_but_for_lone_surrogates_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    reward = Reward(MISSING, MISSING, {"x": math.inf}, HOSTILE)
    group = make_group(
        make_sample("u1", text=HOSTILE, prompt_text=HOSTILE, answer=HOSTILE, reward=reward),
        make_sample("u2", num_tokens=9),
    )
    for step in (10, 2):
        write_samples(run, step, [group], {"u2": 0.25})
    assert list(sample_files(run)) == [2, 10]
    first, second = read_samples(sample_files(run)[2])
    texts = {first.text, first.prompt, first.answer, first.note}
    assert texts == {HOSTILE.replace("\ud800", "?").replace("\udfff", "?")}
    assert first.reward is None and first.parts == {"x": None} and first.advantage is None
    assert (second.uid, second.advantage, second.num_tokens) == ("u2", 0.25, 9)
    assert second.segments == group.samples[1].segments
    path = sample_files(run)[2]
    path.write_bytes(b"garbage" + path.read_bytes())
    with pytest.raises(ValueError, match=r"step_2\.parquet is no file of samples"):
        list(read_samples(path))


def test_other_ranks_and_marks_are_in_a_written_trace_and_a_run_goes_on_behind_it(tmp_path: Path) -> None:
    trace, other = TraceLog(tmp_path / "trace.json"), TraceLog(None)
    trace.mark("step", 7)
    for _ in range(2):
        trace.mark("stage")
    with other.span("rank/1", "pack", step=7):
        pass
    for span in other.take():
        trace.add_wall("rank/1", span)
    assert other.take() == []
    trace.save()
    spans = {span.lane: span for span in read_trace(tmp_path / "trace.json")}
    assert (spans["mark/step"].name, spans["mark/stage"].name) == ("step 7", "stage 2")
    assert (spans["rank/1"].name, spans["rank/1"].arguments) == ("pack", {"step": 7})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    instants = [event for event in events if event["ph"] == "i"]
    assert len(instants) == 3 and all(event["s"] == "g" and "dur" not in event for event in instants)
    again = TraceLog(tmp_path / "trace.json")
    again.mark("stage")
    again.save()
    stages = [span for span in read_trace(tmp_path / "trace.json") if span.lane == "mark/stage"]
    assert [span.name for span in stages] == ["stage 1", "stage 2", "stage 3"]
    assert stages[2].start_s >= max(span.end_s for span in spans.values()) - 1e-6


def test_a_summary_comes_back_and_its_engine_says_class(tmp_path: Path) -> None:
    path, summary = tmp_path / "summary.json", make_summary()
    save_summary(path, summary)
    assert load_summary(path) == summary
    values = json.loads(path.read_text())
    assert values["engine"]["class"] == "LLMEngine"
    assert set(values["after"]) == set(Evaluation.model_fields)
    assert {"mean", "low", "high", "n"} == set(values["before"]["system"])
    values["before"]["agents"]["solver"]["mean"] = 2
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"summary\.json(.|\n)*before\.agents\.solver\.mean"):
        load_summary(path)
