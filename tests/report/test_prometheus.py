"""Metrics for Prometheus. The alerts of docs/alerts.yml use only these metrics."""

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
from marsrl.trainer.report.prometheus import COUNTED, MetricsPort, served

ROW = {
    "reward/all/mean": 0.5,
    "reward/solver/mean": 0.25,
    "reward/solver/missing": 0.0,
    "response_length/solver/clip_ratio": 0.1,
    "actor/entropy": 2.0,
    "large/actor/entropy": math.nan,
    "train_rollout/prob_diff_mean": 0.01,
    "judge/missing_share": 0.0,
    'team/\u00e9\n{}"/x': 1.0,
}
EACH = {f"small/{name}" if name.startswith("actor/") else name: 2.0 for name in COUNTED}


def scrape(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return {name: {labels: value}}."""
    metrics: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                assert all(sample.labels.values()), f"{sample.name} {labels}: a label is empty"
                assert labels not in metrics.setdefault(sample.name, {}), f"{sample.name} {labels} is there twice"
                metrics[sample.name][labels] = sample.value
    return metrics


def test_a_scrape_has_last_row_totals_and_all_alert_metrics() -> None:
    shown = MetricsPort('a "run"', num_steps=9, engines=lambda: {"large": 3}, silences_s=lambda: {1: 2.5})
    with held_port() as port:
        with served(port, shown):
            before = scrape(port)
            assert "marsrl_step" not in before and before["marsrl_run"] == {(("run", 'a "run"'),): 1}
            shown.show(1, {**ROW, **EACH, "gone/next": 1.0})
            shown.show(2, {**ROW, **EACH})
            now = scrape(port)
            assert now["marsrl_step"][()] == 2 and now["marsrl_steps"][()] == 9
            values = {labels[0][1]: value for labels, value in now["marsrl_metric"].items()}
            assert values == pytest.approx(ROW, nan_ok=True)
            assert now["marsrl_engines"] == {(("policy", "large"),): 3}
            assert now["marsrl_rank_silence_seconds"] == {(("rank", "1"),): 2.5}
            assert now["marsrl_count_total"] == {(("name", name),): 4.0 for name in EACH}
            assert now["marsrl_seconds_since_step"][()] >= 0
        with pytest.raises(urllib.error.URLError):
            scrape(port)
    (group,) = yaml.safe_load((Path(__file__).parents[2] / "docs" / "alerts.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 10
    for rule in group["rules"]:  # an alert uses only metrics that the scraped page has
        assert set(rule) <= {"alert", "expr", "for", "annotations"} and rule["annotations"]["summary"]
        asked = re.findall(r'(marsrl_\w+)(?:\{name=~?"(.+?)"\})?', rule["expr"])
        assert asked or rule["expr"].startswith("up{"), rule["alert"]
        for family, name in asked:
            assert any(re.fullmatch(name, of[0][1]) for of in now[family]) if name else now[family], rule["alert"]


def test_a_taken_port_is_refused_on_the_rank_that_opens_it() -> None:
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
