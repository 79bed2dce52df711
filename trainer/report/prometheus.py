"""A run's numbers for Prometheus at 127.0.0.1:run.prometheus_port/metrics, on rank 0 only; their names: docs/prometheus.md."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

COUNTED = (
    "actor/skipped_steps",
    "actor/empty_steps",
    "actor/grad_spikes",
    "rollout/engine_restarts",
    "rollout/resubmitted",
    "rollout/errors",
    "rollout/failed_requests",
    "rollout/failed_episodes",
    "rollout/tokens",
    "judge/calls",
    "judge/missing",
)
"""Metrics that count events of one step; summed, so that a scrape slower than steps misses none."""

_LABEL_OF_ROOT = {"policy_cost": "policy", "tools": "tool", "timing_s": "part"}

Labels = tuple[tuple[str, str], ...]
"""(label, value), sorted."""


def sample_of(name: str, agents: Collection[str], policies: Collection[str]) -> tuple[str, Labels]:
    """The Prometheus name and labels of a metric of metrics.jsonl.

    policies: prefixes of metrics; () if only one policy is trained.
    """
    parts, labels = name.split("/"), dict[str, str]()
    if len(parts) > 2 and parts[0] in policies:
        labels["policy"] = parts.pop(0)
    if parts[:2] == ["rollout", "engines"]:
        labels["policy"] = "/".join(parts[2:])
        del parts[2:]
    elif (label := _LABEL_OF_ROOT.get(parts[0])) is not None and len(parts) > 1:
        labels[label] = parts.pop(1)
    elif place := next((i for i in range(1, len(parts)) if parts[i] in agents), 0):
        labels["agent"] = parts.pop(place)
    elif len(parts) > 2 and parts[1] == "all":
        del parts[1]
    return "marsrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", "_".join(parts)), tuple(sorted(labels.items()))


_COUNTERS = {sample_of(name, (), ())[0] for name in COUNTED}
_Last = tuple[int | None, float, dict[str, dict[Labels, float]]]  # step, time.monotonic(), gauges


@dataclass(eq=False)
class MetricsPort:
    """Contents of the metrics port. A prometheus_client collector: read by server threads, written by the run's.

    num_steps: run.steps. engines: {policy: serving engines}; silences_s: {rank: seconds since its last beat}; at each scrape.
    """

    run: str
    agents: Collection[str]
    policies: Collection[str]
    num_steps: int
    engines: Callable[[], Mapping[str, int]]
    silences_s: Callable[[], Mapping[int, float]]
    _totals: dict[str, dict[Labels, float]] = field(default_factory=dict)
    _last: _Last = field(default_factory=lambda: (None, time.monotonic(), {}))

    def show(self, step: int, row: Mapping[str, float]) -> None:
        """Show the metrics of this step. If two get one name, the later one is shown."""
        gauges: dict[str, dict[Labels, float]] = {}
        policies = self.policies if len(self.policies) > 1 else ()
        totals = {name: dict(values) for name, values in self._totals.items()}
        for metric, value in row.items():
            name, labels = sample_of(metric, self.agents, policies)
            if name in _COUNTERS:
                of_name = totals.setdefault(name, {})
                of_name[labels] = of_name.get(labels, 0.0) + value
            else:
                gauges.setdefault(name, {})[labels] = float(value)
        self._totals = totals  # replaced, not changed: a scrape may be reading the old ones
        self._last = (step, time.monotonic(), gauges)

    def collect(self) -> Iterator[Any]:
        """Metric families, in the form that prometheus_client expects from collectors."""
        from prometheus_client.core import Metric

        def family(name: str, text: str, kind: str, values: Mapping[Labels, float]) -> Metric:
            found = Metric(name, text, kind)
            for labels, value in values.items():  # each sample has its labels and no other
                found.add_sample(f"{name}_total" if kind == "counter" else name, dict(labels), value)
            return found

        step, since, gauges = self._last
        own: dict[str, tuple[str, Mapping[Labels, float]]] = {
            "marsrl_run": ("1, its name as a label", {(("run", self.run),): 1.0}),
            "marsrl_steps": ("run.steps", {(): float(self.num_steps)}),
            "marsrl_seconds_since_step": (
                "since the last step was logged, or since the start",
                {(): time.monotonic() - since},
            ),
            "marsrl_engines": (
                "engines that serve now",
                {(("policy", name),): float(num) for name, num in self.engines().items()},
            ),
            "marsrl_rank_silence_seconds": (
                "since a rank last said that it lives",
                {(("rank", str(rank)),): silence for rank, silence in self.silences_s().items()},
            ),
        }
        if step is not None:
            own["marsrl_step"] = ("the last step that was logged", {(): float(step)})
        shown: dict[str, tuple[str, Mapping[Labels, float]]] = {
            name: ("of the last step, docs/metrics.md", values) for name, values in gauges.items() if name not in own
        }
        for name, (text, values) in (own | shown).items():
            yield family(name, text, "gauge", values)
        for name, values in self._totals.items():
            yield family(name, "of all steps since this start, docs/metrics.md", "counter", values)


@contextmanager
def served(port: int, shown: MetricsPort) -> Iterator[None]:
    """Serve http://127.0.0.1:port/metrics in the body; the port is free (preflight)."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(shown)
    server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
