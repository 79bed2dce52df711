from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up_run import make_group, make_sample

from marsrl.rollout.types import MISSING, Reward
from marsrl.trainer.report.group_metrics import one_sided_verdicts, summarise
from marsrl.trainer.report.metrics import NON_FINITE, MetricsLog, read_metrics
from marsrl.trainer.report.step_metrics import WINDOW, GradSpikes
from marsrl.trainer.report.summary import wilson_interval
from marsrl.trainer.report.unread import Ended, unread
from marsrl.trainer.runs.directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "a", "p")


def test_values_that_are_not_finite_become_null_and_are_counted(run: RunDirectory) -> None:
    with MetricsLog(run) as log:
        log.log(0, {"a": math.nan, "b": -math.inf, "c": 1.5})
    line = run.metrics.read_text()
    assert json.loads(line) == {"step": 0, "a": None, "b": None, "c": 1.5, NON_FINITE: 2}
    assert "NaN" not in line and "Infinity" not in line


def test_resumed_metrics_have_each_step_once_in_tensorboard_too(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(run) as log:
        for step in range(5):
            log.log(step, {"actor/loss": step})
    with open(run.metrics, "a") as file:
        file.write('{"step": 5, "actor/loss"')  # killed while writing
    assert len(read_metrics(run.metrics)) == 5
    with MetricsLog(run, resume_step=2) as log:
        for step in range(3, 7):
            log.log(step, {"actor/loss": 10 * step})
    logged = [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40), (5, 50), (6, 60)]
    assert [(r.step, r.values["actor/loss"]) for r in read_metrics(run.metrics)] == logged
    events = EventAccumulator(str(run.tensorboard)).Reload().Scalars("actor/loss")
    assert [(e.step, e.value) for e in events] == logged


def test_metrics_are_never_overwritten_and_steps_never_repeat(run: RunDirectory) -> None:
    with MetricsLog(run) as log:
        log.log(3, {"a": 1})
        with pytest.raises(ValueError, match="once"):
            log.log(3, {"a": 2})
    with pytest.raises(ValueError, match="not overwritten"):
        MetricsLog(run)


def test_unread_answers_are_reported_with_share_and_example() -> None:
    form = "answer in the form \\boxed{...}"
    cut, plain = Ended(False, True, 128, "so we\x1b[2J\tadd\n\n"), Ended(False, False, 9, "<b>It</b> is\n18\u202e")
    read, unasked = Ended(True, False, 20, "\\boxed{18}"), Ended(False, True, 0, "")
    assert unread("solver", form, [plain] * 56 + [cut] * 41 + [read] * 3) == (
        "97 % of solver's completions (97 of 100) have no answer in the form \\boxed{...}; 41 % were cut at 128 tokens; one ends "
        '"<b>It</b> is␊18⟨U+202E⟩"'
    )
    assert unread("critic", "", [plain, plain, cut]) == (
        '33 % of critic\'s completions (1 of 3) were cut at 128 tokens; one ends "so we␛[2J␉add"'
    )
    # Nothing is reported unless more than a fifth of the outputs is unread.
    assert unread("solver", form, [plain] + [read] * 4) == unread("solver", form, []) == ""
    assert unread("solver", form, [unasked]).endswith("; 100 % had a prompt longer than agents.solver.max_input_tokens")


@pytest.mark.parametrize("step", [None, -1, 0, 3])
def test_wandb_resumes_only_a_run_with_logged_steps(
    step: int | None, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, object]] = []
    page = SimpleNamespace(log=lambda row, step: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **words: told.append(words) or page))
    with MetricsLog(run, wandb_project="mine", resume_step=step):
        assert told[0]["resume"] == ("must" if step == 3 else "never")  # `marsrl sft` begins at -1


@pytest.mark.parametrize("line", [b"nonsense", b'{"step": 1, "act\xffr/loss": 2.0}', b'{"step": null}'])
def test_a_damaged_line_is_named(line: bytes, run: RunDirectory) -> None:
    run.metrics.write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(run.metrics)


def test_a_missing_reward_is_counted_and_not_averaged() -> None:
    group = make_group(
        make_sample("a", num_tokens=2, version=1),
        make_sample("b", num_tokens=6, version=3, reward=Reward(0.0, 0.0)),
        make_sample("c", num_tokens=4, version=3, reward=Reward(MISSING, MISSING, note="timeout")),
    )
    metrics = summarise([group], version=3, num_unfinished=7, advantages={"a": 1.0, "b": -1.0})
    assert metrics["reward/solver/mean"] == 0.5 and metrics["reward/solver/missing"] == 1
    assert metrics["response_length/solver/mean"] == 4 and metrics["response_length/solver/max"] == 6
    assert metrics["advantage/solver/fraction_zero"] == pytest.approx(1 / 3)
    assert metrics["rollout/staleness_mean"] == pytest.approx(2 / 3) and metrics["rollout/staleness_max"] == 2
    assert metrics["rollout/unfinished"] == 7 and metrics["rollout/finish_stop"] == 3
    nothing = summarise([make_group(make_sample("d", reward=Reward(MISSING, MISSING)))], version=0)
    assert "reward/solver/mean" not in nothing and all(map(math.isfinite, nothing.values()))
    assert summarise([], version=0)["rollout/samples"] == 0


def test_the_overlong_penalty_is_averaged_if_it_is_set() -> None:
    samples = [
        make_sample(str(i), reward=Reward(1 + cost, 1.0, {"overlong": cost})) for i, cost in enumerate([0.0, -0.5])
    ]
    missing = make_sample("2", reward=Reward(MISSING, MISSING))
    assert summarise([make_group(*samples, missing)], version=0)["reward/solver/overlong"] == -0.25
    assert "reward/solver/overlong" not in summarise([make_group(make_sample("3"))], version=0)


@pytest.mark.parametrize(("num_correct", "warned"), [(0, True), (4, True), (5, False), (50, False), (96, True)])
def test_a_verifier_that_always_says_the_same_is_warned_about(num_correct: int, warned: bool) -> None:
    verdicts = [True] * num_correct + [False] * (100 - num_correct)
    group = make_group(*(make_sample(str(i), "verifier1", verdict=v) for i, v in enumerate(verdicts)))
    assert summarise([group], version=0)["verdicts/verifier1/fraction_wrong"] == pytest.approx(1 - num_correct / 100)
    assert bool(one_sided_verdicts([group])) is warned
    few = make_group(*(make_sample(str(i), "verifier1", verdict=True) for i in range(19)))
    assert not one_sided_verdicts([few])


def test_wilson_agrees_with_published_values() -> None:
    # Newcombe 1998 (Stat. Med. 17:857), table I, method 3
    table = ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718))
    for successes, n, low, high in table:
        assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(0, 0) == (0, 1) and wilson_interval(7, 7)[1] == 1


def test_detection_recall_counts_only_readable_verdicts() -> None:
    # (verdict, agrees): two of three wrong solutions were detected.
    of_wrong = [(False, 1.0), (True, 0.0), (False, 1.0)]
    # The third has no verdict; the correctness of the last is unknown.
    of_right = [(True, 1.0), (False, 0.0), (None, None), (False, None)]
    samples = []
    for i, (verdict, agrees) in enumerate([*of_wrong, *of_right]):
        parts = {} if agrees is None else {"verdict": agrees, "format": -0.1}
        reward = Reward(agrees or 0.0, agrees or 0.0, parts)
        samples.append(make_sample(f"p0#0/verifier1:{i}", "verifier1", verdict=verdict, reward=reward))
    found = summarise([make_group(*samples)], version=0)
    assert found["verdicts/verifier1/recall_wrong"] == pytest.approx(2 / 3)
    # One of the three rejected solutions was right.
    assert found["verdicts/verifier1/precision_wrong"] == pytest.approx(2 / 3)
    right = summarise([make_group(samples[3], samples[4])], version=0)
    assert "verdicts/verifier1/recall_wrong" not in right and right["verdicts/verifier1/fraction_wrong"] == 0.5


def spikes_of(norms: list[float]) -> list[float]:
    spikes = GradSpikes()
    return [spikes.found({"actor/grad_norm": norm, "actor/loss": 9.0})["actor/grad_spikes"] for norm in norms]


def test_a_gradient_norm_above_five_running_medians_is_a_spike() -> None:
    assert spikes_of([1, 1, 1, 1, 1, 5.0, 5.1]) == [0, 0, 0, 0, 0, 0, 1]
    assert spikes_of([1, 1, 1, 1, 100]) == [0] * 5  # a median needs at least five norms
    assert spikes_of([1, 0, 0, 0, 0, 0, 0, 2]) == [0] * 8  # norms of 0, of steps that trained nothing, are in no median
    assert spikes_of([1] * 5 + [math.nan, math.inf, 1]) == [0] * 5 + [1, 1, 0]
    # The median covers the last fifty steps, so a norm of 4 is a spike at first and becomes normal.
    assert spikes_of([1] * WINDOW + [4] * WINDOW + [20, 21])[-2:] == [0, 1] and WINDOW == 50
    assert spikes_of([1] * WINDOW + [4] * 20 + [6])[-1] == 1
