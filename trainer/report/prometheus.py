"""Metrics of a run for Prometheus at 127.0.0.1:run.prometheus_port/metrics, on rank 0 only (docs/prometheus.md)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from marsrl.rollout.imports import check_installed

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
"""Metrics that count events of one step, also as `<policy>/actor/...`. These metrics are served as totals, so that slow scrapes
miss no event."""


def why_not(port: int) -> str | None:
    """Return why rank 0 could not serve metrics on this port; None if it is free, or 0 (not served)."""
    if not port:
        return None
    check_installed(f"run.prometheus_port={port}", "prometheus_client", otherwise="unset it")
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        return f"run.prometheus_port={port}: {error.strerror}; set a free port, or 0"
    return None


@dataclass(eq=False)
class MetricsPort:
    """Contents of the metrics port, a prometheus_client collector: server threads read it, the run's threads write it.

    num_steps: run.steps.
    engines: called at each scrape, returns {policy: number of serving engines}.
    silences_s: called at each scrape, returns {rank: seconds since its last heartbeat}.
    """

    run: str
    num_steps: int
    engines: Callable[[], Mapping[str, int]]
    silences_s: Callable[[], Mapping[int, float]]
    _totals: Mapping[str, float] = field(default_factory=dict)
    _last: tuple[int | None, float, Mapping[str, float]] = field(default_factory=lambda: (None, time.monotonic(), {}))

    def show(self, step: int, row: Mapping[str, float]) -> None:
        """Show the metrics of this step."""
        counted = {name: self._totals.get(name, 0.0) + value for name, value in row.items() if name.endswith(COUNTED)}
        self._totals = {**self._totals, **counted}  # Replaced, not changed: a scrape may be reading the old one.
        self._last = (step, time.monotonic(), {name: value for name, value in row.items() if name not in counted})

    def collect(self) -> Iterator[Any]:
        """Yield metric families, as prometheus_client expects from collectors."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        step, since, values = self._last
        silences = {str(rank): silence for rank, silence in self.silences_s().items()}
        for name, text, label, value_of in (
            ("run", "1, with the run's name", "run", {self.run: 1}),
            ("steps", "run.steps", "", {"": self.num_steps}),
            ("step", "the last step that was logged", "", {} if step is None else {"": step}),
            (
                "seconds_since_step",
                "seconds since the last step was logged, or since the start",
                "",
                {"": time.monotonic() - since},
            ),
            ("engines", "engines that serve now", "policy", self.engines()),
            ("rank_silence_seconds", "seconds since another rank's last heartbeat", "rank", silences),
            ("metric", "metrics of the last step, docs/metrics.md", "name", values),
        ):
            family = GaugeMetricFamily(f"marsrl_{name}", text, labels=[label] if label else [])
            for label_value, value in value_of.items():
                family.add_metric([label_value] if label else [], value)
            yield family
        counter = CounterMetricFamily(
            "marsrl_count", "totals of all steps since this process started, docs/metrics.md", labels=["name"]
        )
        for name, value in self._totals.items():
            counter.add_metric([name], value)
        yield counter


@contextmanager
def served(port: int, shown: MetricsPort) -> Iterator[None]:
    """Serve http://127.0.0.1:port/metrics in the body; preflight has checked that the port is free."""
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
