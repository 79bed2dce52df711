"""Documented commands that start engines run with their defaults; only the model is replaced by a small one with short
answers.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from completions_server import Handler, completions_server
from desk import MODEL, Desk, boxing_model
from documented_commands import run_by

from marsrl.trainer.machine import native_dtype
from marsrl.trainer.report.metrics import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def model(desk: Desk) -> Path:
    return boxing_model(desk.folder / "model")


def test_a_model_of_ones_own_is_trained(desk: Desk, model: Path) -> None:
    """Run an evaluation, a step and a verified publish, in the dtype that this machine computes natively."""
    (words,) = {tuple(desk.words(each, lambda _: model)) for each in run_by("test_a_model_of_ones_own_is_trained")}
    run = desk.until_version_1(list(words))
    ours, interrupted, _ = desk.console().partition("marsrl: interrupted")  # torchrun's traceback follows
    assert interrupted and "Traceback" not in ours, desk.console()[-4000:]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["policies"]["main"]["dtype"] == native_dtype()[0] and config["run"]["steps"] == 100
    assert config["rollout"]["engine"] == "vllm"
    step = read_metrics(run / "metrics.jsonl")[0]
    # Answers are 7 or 8 at random. The probability that no group of 8 has both is below 10^-16.
    assert step.step == 1 and 0 < step.values["reward/solver/mean"] < 1
    assert step.values["actor/empty_steps"] == step.values["actor/skipped_steps"] == 0
    assert step.values["sync/seconds"] > 0  # version 1 was published and verified
    assert step.values["sync/probe_tokens"] == 640
    assert 0 <= step.values["sync/probe_diff_median"] <= 2 * step.values["sync/probe_noise"]  # both are 0 in float32


def test_a_team_is_evaluated(desk: Desk, model: Path) -> None:
    commands = [desk.words(each, lambda _: model) for each in run_by("test_a_team_is_evaluated")]
    assert "orchestration=solver" in commands[0]  # the first command takes minutes on a CPU
    team = next(words for words in commands if "orchestration=solver" not in words)
    # Other commands evaluate the Solver alone, or other problems, or a few short problems without vLLM and Ray.
    own = r"orchestration=solver|data\.eval=.*|evaluate\.num_problems=.*|agents\.solver\..*|rollout\.(engine|placement)=local"
    assert {tuple(word for word in words if not re.fullmatch(own, word)) for words in commands} == {tuple(team[:-1])}
    assert desk.start(team).wait(600) == 0, desk.console()[-6000:]
    lines = desk.console().splitlines()
    result = json.loads("\n".join(lines[lines.index("{") : lines.index("}") + 1]))
    num_problems, solver = len((desk.folder / "problems.jsonl").read_text().splitlines()), result["agents"]["solver"]
    assert result["num_problems"] == result["num_episodes"] == solver["n"] == num_problems
    assert 0 <= solver["mean"] == result["alone"]["mean"] <= 1  # answers are 7 or 8 at random
    assert solver["mean"] * num_problems == pytest.approx(round(solver["mean"] * num_problems))
    assert result["usage"]["solver"]["calls"] >= num_problems and solver["length"]["cut"] < 1


def test_problems_are_curated(desk: Desk, model: Path) -> None:
    (words,) = [desk.words(each, lambda _: model) for each in run_by("test_problems_are_curated")]
    os.environ["JUDGE_KEY"] = "key"

    def reply(handler: Handler, body: dict[str, Any], before: int) -> None:
        handler.complete("<verdict>yes</verdict>")

    own = ["rollout.engine=local", "rollout.placement=local", "rollout.max_response_tokens=40", "orchestration=solver"]
    with completions_server(reply) as server:
        given = MODEL.sub(str(model), (desk.folder / "curation.yaml").read_text())
        (desk.folder / "curation.yaml").write_text(given.replace("http://judge.example:8000/v1", server.base_url))
        assert desk.start([*words, *own]).wait(600) == 0, desk.console()[-6000:]
    assert len(server.bodies) == 4 and "graduate: 2 kept, 0 dropped" in desk.console()
    # The random model may be right so often that problems are dropped as too easy.
    (played,) = (line for line in desk.console().splitlines() if line.startswith("best_of_n: "))
    num_kept = int(played.split()[1])
    assert len((desk.folder / "curated/curated.jsonl").read_text().splitlines()) == num_kept <= 2
