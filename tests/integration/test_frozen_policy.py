"""A whole run of a team with a trained policy and a frozen one behind a chat server.
tests/trainer/test_read_config.py tests refused settings.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from completions_server import Handler, completions_server
from scripted_pool import engines_are, half_right, on_sevens, samples_of, saying, train_here

from marsrl.commands.look.api import Api
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.summary import load_summary
from marsrl.trainer.report.token_log import read_tokens
from marsrl.trainer.runs.directory import step_files


def verify(handler: Handler, body: dict[str, object], before: int) -> None:
    """Answer with random verdicts; some requests find the server busy at first, others fail for good."""
    seed = int(str(body["seed"]))
    if seed % 5 == 0 and not before:
        handler.send(429, b"busy")
    elif seed % 11 == 0:
        handler.send(400, b"no")
    else:
        handler.complete(f"Findings: none\nVerdict: {random.Random(seed).choice(['correct', 'wrong'])}")


@pytest.mark.slow
@pytest.mark.smoke
def test_a_trained_policy_learns_beside_a_frozen_one(tmp_path: Path) -> None:
    model = init_model("tiny", "bytes", tmp_path / "model")
    with completions_server(verify) as server, engines_are(saying(model, half_right)):
        words = ["run.steps=3", "run.evaluate=false", "run.token_log_every=1", f"sync.directory={tmp_path}"]
        words += ["credit.train_agents=[solver, corrector1, corrector2]"]
        words += ["agents.verifier1.policy=judge", "agents.verifier2.policy=judge"]
        words += ["policies.judge={frozen: true, engine: openai}"]
        served = f"{{base_url: '{server.base_url}', model: judge-7b, api: chat, backoff_s: 0.01, retries: 2}}"
        words += [f"policies.judge.openai={served}"]
        directory = train_here(tmp_path, on_sevens(tmp_path, model, *words))
    samples = samples_of(directory)
    verdicts = [r for r in samples if r.agent == "verifier1"]
    assert len(server.bodies) > len(verdicts) > 0  # some were requested twice
    assert {r.verdict for r in verdicts} >= {True, False} and all(r.advantage is None for r in verdicts)
    assert {part.version for r in verdicts for part in r.segments} == {0}
    assert {part.version for r in samples if r.agent == "solver" for part in r.segments} == {0, 1, 2}
    logged = [record for file in step_files(directory.tokens).values() for record in read_tokens(file)]
    of_judge = [record for record in logged if record.policy == "judge"]  # the judge's server returns no log-probs
    assert {record.agent for record in of_judge} >= {"verifier1"} and {record.update for record in of_judge} == {0}
    assert all(np.isnan(record.rollout_logprobs).all() for record in of_judge)
    assert {record.update for record in logged if record.policy == "main"} >= {1}
    assert {headers["path"] for headers in server.headers} == {"/v1/chat/completions"}
    assert {message["role"] for body in server.bodies for message in body["messages"]} == {"system", "user"}
    viewed = Api([directory.path])
    viewed.runs()
    assert viewed.questions["tokens"](run=0, step=3, line=of_judge[-1].line)["kept"]["rollout"][0] is None
    rows = read_metrics(directory.path / "metrics.jsonl")
    counted = [row.values.get("cost/verifier1/output_tokens", 0) for row in rows]
    answers = [r for r in verdicts if r.segments]
    assert sum(counted) == 3 * len(answers)  # the server reports 3 tokens for each answer
    assert rows[-1].values["actor/grad_norm"] > 0 and rows[-1].values["rollout/staleness_max"] <= 1
    summary = load_summary(directory.summary)
    assert summary.engine.kind == "scripted" and summary.verified_syncs == 4
    assert not list(tmp_path.glob("marsrl-weights-*"))
