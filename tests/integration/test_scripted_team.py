"""All five agents on math problems with a scripted engine and the real learner, loop, rewards, logs and report."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.build import make_pool
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.trainer import build
from marsrl.trainer.init_model import init_model
from marsrl.trainer.loop import train
from marsrl.trainer.metrics import read_metrics
from marsrl.trainer.preflight import preflight
from marsrl.trainer.read_config import read_config
from marsrl.trainer.run_directory import RunDirectory
from marsrl.trainer.samples_log import read_samples, sample_files
from marsrl.trainer.summary import load_summary

AGENTS = {"solver", "verifier1", "corrector1", "verifier2", "corrector2"}


def script(request: DecodeRequest) -> str:
    """Half of the answers right, verdicts by a coin, one in eight a hostile text without either."""
    rng = random.Random(request.uid)
    if rng.random() < 0.125:
        return "</think> <script>alert(1)</script> {report} Verdict: maybe \\boxed{"
    if request.uid.rpartition("/")[2].startswith("verifier"):
        return f"Findings: none\nVerdict: {rng.choice(['correct', 'wrong'])}"
    return f"So the answer is \\boxed{{{rng.choice(['7', '8'])}}}."


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    data = tmp_path / "train.jsonl"
    lines = [{"question": f"What is 7, asked for the {i}th time?", "answer": "7"} for i in range(40)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = init_model("tiny", "bytes", tmp_path / "model")
    renderer = ChatRenderer(model)
    engine = functools.partial(ScriptedEngine, script, encode=lambda text: renderer.encode_trusted(text).tolist())
    monkeypatch.setattr(build, "make_pool", functools.partial(make_pool, scripted=engine))
    settings = [
        "task=math", f"policies.main.model={model}", "policies.main.dtype=float32", f"data.train={data}",
        "rollout.engine=scripted", "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_response_tokens=120",
        "run.steps=6", "evaluate.num_problems=3", "evaluate.probe_size=4", "sync.tolerance=1e6",
    ]  # fmt: skip
    checked = preflight(read_config(None, settings)[0], world_size=1)
    directory = RunDirectory.create(tmp_path / "runs", "scripted", "math_default", "off")
    directory.write_config(checked.config.model_dump(mode="json"))
    with build.open_run(checked, directory) as run:
        train(run)
    return directory.path


def test_five_agents_are_played_credited_trained_and_reported(run_directory: Path) -> None:
    samples = [r for path in sample_files(RunDirectory(run_directory)).values() for r in read_samples(path)]
    assert {r.agent for r in samples} == AGENTS
    rewards = {r.uid: r for r in samples}
    for record in samples:
        if record.agent.startswith("verifier") and record.parent_uid in rewards and record.verdict is not None:
            assert record.reward == float(record.verdict == (rewards[record.parent_uid].correct == 1))
        if record.answer is None and record.verdict is None:
            assert record.reward == 0
    rows = read_metrics(run_directory / "metrics.jsonl")
    last = rows[-1].values
    assert {name.split("/")[1] for name in last if name.startswith("reward/") and name.endswith("/mean")} == AGENTS | {
        "all"
    }
    assert all(row.values["actor/empty_steps"] == 0 for row in rows)
    assert all(None not in row.values.values() for row in rows)
    assert rows[-1].values["actor/grad_norm"] > 0
    summary = load_summary(run_directory / "summary.json")
    assert summary.engine.kind == "scripted" and summary.verified_syncs == 7
    page = (run_directory / "report.html").read_text()
    assert "<script>alert(1)</script>" not in page and "&lt;script&gt;" in page
