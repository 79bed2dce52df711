"""Commands that start engines, as they are written, with their defaults; only the model is small and of few words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from commands import run_by
from desk import Desk, boxing_model

from marsrl.trainer.report.metrics import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def model(desk: Desk) -> Path:
    return boxing_model(desk.folder / "model")


def test_a_model_of_ones_own_is_trained(desk: Desk, model: Path) -> None:
    """Evaluation, a step, a publish that is checked: in bfloat16, which is the default."""
    (words,) = {tuple(desk.words(each, lambda _: model)) for each in run_by("test_a_model_of_ones_own_is_trained")}
    run = desk.until_version_1(list(words))
    ours, interrupted, _ = desk.console().partition("marsrl: interrupted")  # what follows is torchrun's traceback
    assert interrupted and "Traceback" not in ours, desk.console()[-4000:]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["policies"]["main"]["dtype"] == "bfloat16" and config["run"]["steps"] == 100
    assert config["rollout"]["engine"] == "vllm"
    step = read_metrics(run / "metrics.jsonl")[0]
    assert step.step == 1 and 0 < step.values["reward/solver/mean"] < 1  # 7 or 8, by a coin
    assert step.values["actor/empty_steps"] == step.values["actor/skipped_steps"] == 0
    assert step.values["sync/seconds"] > 0  # version 1 was published, and proven
    assert step.values["sync/probe_tokens"] == 640
    assert 0 < step.values["sync/probe_diff_median"] < 2 * step.values["sync/probe_noise"]


def test_a_team_is_evaluated(desk: Desk, model: Path) -> None:
    commands = [desk.words(each, lambda _: model) for each in run_by("test_a_team_is_evaluated")]
    assert len({tuple(words[:-1]) for words in commands}) == 1  # but for the problems' name they are one
    assert desk.start(commands[0]).wait(600) == 0, desk.console()[-6000:]
    lines = desk.console().splitlines()
    result = json.loads("\n".join(lines[lines.index("{") : lines.index("}") + 1]))
    solver = result["agents"]["solver"]
    assert 0 < solver["mean"] < 1 and solver["n"] > 0
