"""Metrics for Prometheus; the alerts ask for no others."""

from __future__ import annotations

import math
import os
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from held_port import held_port
from prometheus_client.parser import text_string_to_metric_families

from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.read import ConfigError, read_config
from marsrl.trainer.report.prometheus import COUNTED, MetricsPort, sample_of, served

AGENTS, POLICIES = ("solver", "verifier1"), ("small", "large")
ROW = {
    "reward/all/mean": 0.5, "reward/solver/mean": 0.25, "reward/solver/missing": 2.0, "response_length/solver/clip_ratio": 0.1,
    "small/actor/entropy": 0.3, "small/actor/solver/entropy": 0.4, "large/actor/entropy": float("nan"),
    "large/train_rollout/prob_diff_mean": 1e-3, "rollout/engines/large": 2.0, "tools/python 3/errors": 1.0,
    "judge/missing_share": 0.01, "team/a b/c": 7.0, "timing_s/total": 3.5, "eval/solver/low": 0.2, "eval/system": 0.6,
}  # fmt: skip
EACH = {f"small/{name}" if name.startswith("actor/") else name: 2.0 for name in COUNTED}


def scrape(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """{name: {labels: value}}"""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                assert all(sample.labels.values()), f"{sample.name} {labels}: a label that says nothing"
                assert labels not in found.setdefault(sample.name, {}), f"{sample.name} {labels} is there twice"
                found[sample.name][labels] = sample.value
    return found


@pytest.fixture
def shown() -> MetricsPort:
    of_now = {"engines": lambda: {"large": 3}, "silences_s": lambda: {1: 2.5}}
    return MetricsPort('a "run"', agents=AGENTS, policies=POLICIES, num_steps=9, **of_now)


def test_the_names_of_metrics_become_names_and_labels() -> None:
    for metric, name, labels in (
        ("reward/solver/mean", "marsrl_reward_mean", {"agent": "solver"}),
        ("reward/all/mean", "marsrl_reward_mean", {}),
        ("actor/entropy", "marsrl_actor_entropy", {}),
        ("small/actor/solver/grad_norm", "marsrl_actor_grad_norm", {"policy": "small", "agent": "solver"}),
        ("rollout/engines/a/b", "marsrl_rollout_engines", {"policy": "a/b"}),
        ("policy_cost/large/seconds", "marsrl_policy_cost_seconds", {"policy": "large"}),
        ("tools/python 3/calls", "marsrl_tools_calls", {"tool": "python 3"}),
        ("eval/solver/low", "marsrl_eval_low", {"agent": "solver"}),
        ("eval/aime-25/solver", "marsrl_eval_aime_25", {"agent": "solver"}),
        ("timing_s/step", "marsrl_timing_s", {"part": "step"}),
        ("team/é\n{}/x", "marsrl_team______x", {}),
    ):
        assert sample_of(metric, AGENTS, POLICIES) == (name, tuple(sorted(labels.items()))), metric


def test_a_scrape_has_the_last_row_the_counts_since_the_start_and_all_that_alerts_ask_for(shown: MetricsPort) -> None:
    with held_port() as port:
        with served(port, shown):
            before = scrape(port)
            assert "marsrl_step" not in before and before["marsrl_run"] == {(("run", 'a "run"'),): 1}
            shown.show(1, {**ROW, **EACH, "gone/next": 1.0})
            shown.show(2, {**ROW, **EACH})
            now = scrape(port)
            assert now["marsrl_step"][()] == 2 and now["marsrl_steps"][()] == 9 and "marsrl_gone_next" not in now
            assert now["marsrl_reward_mean"] == {(): 0.5, (("agent", "solver"),): 0.25}
            assert now["marsrl_actor_entropy"][(("policy", "small"),)] == 0.3
            assert math.isnan(now["marsrl_actor_entropy"][(("policy", "large"),)])
            assert now["marsrl_engines"] == {(("policy", "large"),): 3}
            assert now["marsrl_rank_silence_seconds"] == {(("rank", "1"),): 2.5}
            assert now["marsrl_judge_calls_total"] == {(): 4} and "marsrl_judge_calls" not in now
            assert now["marsrl_actor_skipped_steps_total"] == {(("policy", "small"),): 4}
            assert now["marsrl_seconds_since_step"][()] >= 0
        with pytest.raises(urllib.error.URLError):
            scrape(port)
    (group,) = yaml.safe_load((Path(__file__).parents[2] / "docs" / "alerts.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 10
    for rule in group["rules"]:  # ask for nothing else
        assert set(rule) <= {"alert", "expr", "for", "annotations"} and rule["annotations"]["summary"]
        asked = set(re.findall(r"marsrl_\w+", rule["expr"]))
        assert asked <= now.keys() and (asked or rule["expr"].startswith("up{")), rule["alert"]


def test_a_port_that_is_taken_is_refused_by_the_rank_that_would_open_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config, _ = read_config(None, [f"run.prometheus_port={port}"])
        os.environ["RANK"] = "0"
        with pytest.raises(ConfigError, match=rf"run.prometheus_port={port}: .*in use"):
            preflight(config, world_size=1)
        os.environ["RANK"] = "1"
        preflight(config, world_size=1)
    os.environ["RANK"] = "0"
    with held_port() as port:
        preflight(read_config(None, [f"run.prometheus_port={port}"])[0], world_size=1)
