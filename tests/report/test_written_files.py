"""Samples, tokens, trace and summary are read back as written, and a damaged file is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from made_up_run import make_group, make_sample, make_summary

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.types import MISSING, Group, Reward
from marsrl.trainer.learner.trained_tokens import CLIPPED, GATED, MASKED, TrainedTokens
from marsrl.trainer.report.samples_log import read_samples, write_samples
from marsrl.trainer.report.summary import Evaluation, load_summary, save_summary
from marsrl.trainer.report.token_log import choose_samples, read_tokens, token_record, write_tokens
from marsrl.trainer.report.trace import Span, TraceLog, read_trace
from marsrl.trainer.runs.directory import RunDirectory, step_files


def group(agent: str, number: int, num_tokens: int = 4) -> Group:
    name = f"p{number}/{agent}"
    samples = [make_sample(f"{name}:{i}", agent, group_id=name, num_tokens=num_tokens) for i in range(2)]
    return make_group(*samples)


def test_groups_are_drawn_by_step_and_name_whatever_their_order() -> None:
    groups = [group(agent, number) for agent in ("solver", "verifier1") for number in range(9)]
    trained = {f"p{number}/solver:1" for number in range(9)}
    first = choose_samples(groups, trained, num_groups=2, seed=0, step=10)
    assert first == choose_samples(groups[::-1], trained, num_groups=2, seed=0, step=10)
    assert [uid.split("/")[1][:6] for uid in first] == ["solver"] * 2 + ["verifi"] * 2 + ["solver"] * 2 + ["verifi"] * 2
    drawn = {tuple(choose_samples(groups, trained, num_groups=1, seed=0, step=step)) for step in range(30)}
    assert len(drawn) > 10
    for step in range(5):  # one group with a gradient among nine
        only = choose_samples(groups, {"p3/verifier1:0"}, num_groups=1, seed=0, step=step)
        assert {"p3/verifier1:0", "p3/verifier1:1"} <= set(only)


def test_what_is_kept_of_a_step_is_bounded_and_groups_stay_whole() -> None:
    groups = [group("solver", 0, 1_000_000), group("verifier1", 1, 100), group("verifier1", 2, 100)]
    kept = choose_samples(groups, {"p0/solver:0"}, num_groups=9, seed=0, step=1)
    assert sorted(kept) == [f"p{number}/verifier1:{i}" for number in (1, 2) for i in range(2)]


def test_the_log_holds_what_engine_and_update_said_of_each_token(tmp_path: Path, renderer: ChatRenderer) -> None:
    text = "né 中!"
    ids = np.array([*text.encode(), renderer.eos_id], np.int32)
    num = len(ids)
    is_sampled = np.arange(num) != 4  # a tool wrote this token
    logprobs = np.linspace(-2, -0.1, num).astype(np.float32)
    sample = make_sample("u", token_ids=ids, is_sampled=is_sampled, rollout_logprobs=logprobs, text=text)
    marks = np.array([CLIPPED, GATED | MASKED, MASKED] + [0] * (num - 4), np.uint8)
    trained = TrainedTokens("u", logprobs[is_sampled] - 1, logprobs[is_sampled] * -1, marks, update=2)
    other = make_sample("v")
    records = [token_record(sample, 7, 3, "main", renderer, trained), token_record(other, 7, 4, "main", renderer)]
    run = RunDirectory.create(tmp_path, "a", "p")
    logged, untrained = read_tokens(write_tokens(run, 7, records))
    assert list(step_files(run.tokens)) == [7]
    pieces = [logged.text[a:b] for a, b in zip([0, *logged.ends], logged.ends, strict=False)]
    assert pieces == ["n", "", "é", " ", "", "", "中", "!", "<|im_end|>"]
    assert (logged.line, logged.update, untrained.update) == (3, 2, 0)
    assert logged.segments == sample.segments and logged.token_ids.tolist() == ids.tolist()
    assert logged.rollout_logprobs[is_sampled].tolist() == logprobs[is_sampled].tolist()
    assert logged.logprobs[is_sampled].tolist() == (logprobs[is_sampled] - 1).tolist()
    assert logged.entropy[is_sampled].tolist() == (-logprobs[is_sampled]).tolist()
    for column in (logged.rollout_logprobs, logged.logprobs, logged.entropy):
        assert np.isnan(column).tolist() == (~is_sampled).tolist()
    flags = [np.flatnonzero(column).tolist() for column in (logged.is_clipped, logged.is_gated, logged.is_masked)]
    assert flags == [[0], [1], [1, 2]]
    assert np.isnan(untrained.logprobs).all() and np.isfinite(untrained.rollout_logprobs).all()


def test_a_file_that_is_no_token_log_is_named(tmp_path: Path, renderer: ChatRenderer) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    path = write_tokens(run, 1, [token_record(make_sample("u"), 1, 1, "main", renderer)])
    whole = path.read_bytes()
    pq.write_table(pq.read_table(path).drop_columns(["line"]), path)
    for content in (path.read_bytes(), whole[:-9], b"", b"{}", b"</script>" * 99):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"step_1\.parquet is not a token log"):
            read_tokens(path)
    with pytest.raises(ValueError, match=r"step_2\.parquet is gone"):
        read_tokens(run.tokens / "step_2.parquet")


def test_pieces_of_tokens_are_the_text_of_all(renderer: ChatRenderer) -> None:
    for text in ("", "plain", "né 中文 🎉🎉 end", "\x00\u202e</script>"):
        assert "".join(renderer.pieces(np.array([*text.encode()], np.int32))) == text
    assert renderer.pieces(np.array([*"a中🎉b".encode()], np.int32)) == ["a", "", "", "中", "", "", "", "🎉", "b"]
    rng = np.random.default_rng(0)
    for _ in range(100):  # bytes that a random model may sample: token logs (pieces) and samples (decode) must agree
        ids = rng.choice(np.array([0x41, 0x80, 0xB8, 0xC3, 0xE4, 0xF0, 0x9F, 0x8E, 0xFF], np.int32), 40)
        assert "".join(renderer.pieces(ids)) == renderer.decode(ids)


HOSTILE = "\x00\x1b[31m\r\n\u2028\u2029\ud800 \udfff</script>\"'{}\x85\ufeff\U0001f600"


def test_hostile_text_round_trips_and_damaged_files_are_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    reward = Reward(MISSING, MISSING, {"x": math.inf}, HOSTILE)
    group = make_group(
        make_sample("u1", text=HOSTILE, prompt_text=HOSTILE, answer=HOSTILE, reward=reward),
        make_sample("u2", num_tokens=9),
    )
    for step in (10, 2):
        write_samples(run, step, [group], {"u2": 0.25})
    assert list(step_files(run.samples)) == [2, 10]
    first, second = read_samples(step_files(run.samples)[2])
    texts = {first.text, first.prompt, first.answer, first.note}
    assert texts == {HOSTILE.replace("\ud800", "?").replace("\udfff", "?")}
    assert first.reward is None and first.parts == {"x": None} and first.advantage is None
    assert (second.uid, second.advantage, second.num_tokens) == ("u2", 0.25, 9)
    assert second.segments == group.samples[1].segments
    path = step_files(run.samples)[2]
    path.write_bytes(b"garbage" + path.read_bytes())
    with pytest.raises(ValueError, match=r"step_2\.parquet is not a file of samples"):
        list(read_samples(path))


def test_a_trace_has_all_ranks_and_marks_and_can_be_continued(tmp_path: Path) -> None:
    trace, other = TraceLog(tmp_path / "trace.json"), TraceLog(None)
    trace.mark("step", 7)
    for _ in range(2):
        trace.mark("stage")
    with other.span("rank/1", "pack", step=7):
        pass
    for span in other.take():
        trace.add_wall(span)
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


def test_an_engine_clock_set_back_does_not_stop_the_run(tmp_path: Path) -> None:
    trace = TraceLog(tmp_path / "trace.json")
    trace.add_wall(Span("engine/0", "decode", 1000.0, 998.5))
    trace.save()
    [span] = read_trace(tmp_path / "trace.json")
    assert span.start_s == span.end_s


def test_a_summary_round_trips_with_the_engine_class(tmp_path: Path) -> None:
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
