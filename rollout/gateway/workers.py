"""Worker processes that are started here: kept running, and ended with the run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.gateway.worker import UNUSABLE
from marsrl.rollout.http_line import read_key

WORKER = Path(__file__).with_name("worker.py")
_MOST_IN_VAIN = 10  # workers that end, one after the other, while no session comes to its end
_BEGIN_S = 2.0  # between a worker's end and the start of another in its place
_END_S = 5.0


class Workers:
    """The processes. url: of the gateway; key: the workers'."""

    def __init__(self, config: ExternalConfig, url: str, key: str) -> None:
        self._config, self._url, self._key = config, url, key
        self._num_started = self._num_in_vain = self._num_over = 0
        self._due_s = 0.0
        self._running: dict[str, subprocess.Popen[bytes]] = {}  # by their names

    def watch(self, gateway: Gateway) -> None:
        """Start those that are missing; what those that ended were playing is played by others."""
        for name, process in list(self._running.items()):
            if (code := process.poll()) is not None:
                del self._running[name]
                self._due_s = time.monotonic() + _BEGIN_S
                reason = f"its process ended with code {code}"
                gateway.lose(name, reason)
                self._num_in_vain = self._num_in_vain + 1 if gateway.num_over == self._num_over else 0
                self._num_over = gateway.num_over
                if code == UNUSABLE or self._num_in_vain >= _MOST_IN_VAIN:
                    gateway.fail(f"external: workers end before their sessions: {reason}; what they said stands above")
        while len(self._running) < self._config.workers and time.monotonic() >= self._due_s:
            self._start()

    def end_hanging(self, names: Sequence[str]) -> None:
        """End those of these workers that were started here: others come in their places."""
        for name in self._running.keys() & set(names):
            self._running[name].kill()

    def close(self) -> None:
        """End them, and what they started."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        name = f"worker{self._num_started}"
        self._num_started += 1
        options = ["--url", self._url, "--name", name, "--with-parent", "--most", str(self._config.concurrency)]
        environment = {**os.environ, "MARSRL_WORKER_KEY": self._key}
        self._running[name] = subprocess.Popen(
            worker_words(self._config, *options), env=environment, stdin=subprocess.DEVNULL
        )


def workers_key(config: ExternalConfig) -> str | None:
    """The key by which workers from elsewhere join; None: they do not. ValueError where its variable holds none."""
    return None if config.key_env is None else read_key(config.key_env, "external.key_env")


def worker_words(config: ExternalConfig, *options: str) -> list[str]:
    """The command line of a worker."""
    words = [config.python or sys.executable, str(WORKER), *options]
    if config.function:
        return [*words, "--function", config.function]
    if config.environment:
        return [*words, "--environment", config.environment]
    return [*words, "--command", *config.command]


def check_program(config: ExternalConfig) -> None:
    """Refuse a program that workers could not start: a function that cannot be imported by `external.python`.

    Raises:
        ValueError: says why.
    """
    if not config.workers:
        return
    try:
        done = subprocess.run(
            worker_words(config, "--check"), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise ValueError(f"external.python is {config.python}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"external: the import of {config.function or config.environment} took longer than 120 s"
        ) from error
    if done.returncode != 0:
        raise ValueError(f"external.function, external.environment: {done.stderr.strip()[-2000:]}")
