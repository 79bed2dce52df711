"""Two agents of separate weights, decoded by real engines: what the token log says of each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from scripted_pool import sevens, train_here

from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.samples_log import read_samples, sample_files
from marsrl.trainer.report.token_log import read_tokens, token_files

KEPT_GROUPS = 2
TEAM = """
from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec

class Both(Orchestration):
    agents = (AgentSpec("first"), AgentSpec("second"))

    def follow(self, episode):
        return [episode.ask("first"), episode.ask("second")]
"""


def test_groups_of_each_agent_are_kept_with_what_its_own_policy_s_update_said(tmp_path: Path) -> None:
    """Float32 on both sides: engine and update agree where the weights are the same ones, in the second step too."""
    own = [f"{{model: {init_model('tiny', 'bytes', tmp_path / name, seed=seed)}, dtype: float32, optimizer: {{lr: 0.01}}}}"
           for seed, name in enumerate(("one", "two"))]  # fmt: skip
    (tmp_path / "team.py").write_text(TEAM)
    words = [
        "task=math", f"orchestration={tmp_path}/team.py:Both", f"policies={{one: {own[0]}, two: {own[1]}}}",
        "agents={first: {policy: one}, second: {policy: two}}", f"data.train={sevens(tmp_path)}",
        "rollout.engine=local", "rollout.placement=local", "rollout.prompts_per_step=3", "rollout.group_size=2",
        "rollout.max_response_tokens=24", "run.evaluate=false", "run.steps=2", "run.token_log_every=1",
        f"run.token_log_groups={KEPT_GROUPS}", "credit.normalise=agent", "credit.reward_scheme=outcome",
        "loss.entropy_coef=0.01",  # whoever has no advantage has a gradient, too
    ]  # fmt: skip
    run_directory = train_here(tmp_path, words)
    files = token_files(run_directory)
    assert list(files) == [1, 2]
    apart = []
    for step, file in files.items():
        samples = list(read_samples(sample_files(run_directory)[step]))
        log = read_tokens(file)
        kept = {record.group_id: record.agent for record in log.samples}
        assert Counter(kept.values()) == {"first": KEPT_GROUPS, "second": KEPT_GROUPS}
        assert {sample.uid for sample in samples if sample.group_id in kept} == {record.uid for record in log.samples}
        for record in log.samples:
            sample = samples[record.line - 1]
            policy = {"first": "one", "second": "two"}[sample.agent]
            assert (record.uid, record.policy, record.update) == (sample.uid, policy, 1)
            assert record.segments == sample.segments and {each.version for each in record.segments} == {step - 1}
            apart.append(np.abs(record.logprobs - record.rollout_logprobs))
    # nats; a token whose router finds two experts equally good may go another way (docs/numerics.md)
    assert np.mean(np.concatenate(apart) > 1e-4) < 0.02
