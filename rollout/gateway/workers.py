"""Locally started worker processes: kept running, and ended with the run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from marsrl.rollout.config import read_key
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.gateway.worker import UNUSABLE
from marsrl.rollout.http_server import listen, url_of

WORKER = Path(__file__).with_name("worker.py")
_MOST_IN_VAIN = 10  # maximum consecutive deaths of workers without a finished session in between
_BEGIN_S = 2.0  # delay between a worker's end and its replacement
_END_S = 5.0
_READ_S = 0.5
_NUM_SHOWN, _MOST_SHOWN = 5, 2000  # lines and characters kept of a worker's last output


class _Worker:
    """One worker process. Its stderr is forwarded to ours."""

    def __init__(self, words: Sequence[str], key: str) -> None:
        environment = {**os.environ, "MARSRL_WORKER_KEY": key}
        self.process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self._tail = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def last_words(self) -> str:
        """Return the last output lines of a worker that has ended, to append to an error message; "" without output."""
        self._reader.join(_READ_S)  # limited in time, because the worker's children may hold the pipe open
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        return f"; its last output: {' | '.join(lines[-_NUM_SHOWN:])}" if lines else ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        while chunk := os.read(self.process.stderr.fileno(), 1 << 16):
            self._tail = (self._tail + chunk)[-_MOST_SHOWN:]
            with suppress(OSError):
                os.write(2, chunk)


class Workers:
    """Worker processes of the run. url: the gateway's URL. key: the workers' API key."""

    def __init__(self, config: ExternalConfig, url: str, key: str) -> None:
        self._config, self._url, self._key = config, url, key
        self._num_started = self._num_in_vain = self._num_over = 0
        self._due_s = 0.0
        self._running: dict[str, _Worker] = {}  # worker processes, by name

    def watch(self, gateway: Gateway) -> None:
        """Start missing workers, and give the sessions of ended workers to others."""
        for name, worker in list(self._running.items()):
            if (code := worker.process.poll()) is None:
                continue
            del self._running[name]
            self._due_s = time.monotonic() + _BEGIN_S
            reason = f"its process ended with code {code}{worker.last_words()}"
            gateway.lose(name, reason)
            self._num_in_vain = self._num_in_vain + 1 if gateway.num_over == self._num_over else 0
            self._num_over = gateway.num_over
            if code == UNUSABLE or self._num_in_vain >= _MOST_IN_VAIN:
                gateway.fail(f"external: workers keep ending before their sessions; the last one, {name}: {reason}")
        while len(self._running) < self._config.workers and time.monotonic() >= self._due_s:
            name = f"worker{self._num_started}"
            self._num_started += 1
            options = ["--url", self._url, "--name", name, "--with-parent", "--most", str(self._config.concurrency)]
            self._running[name] = _Worker(worker_words(self._config, *options), self._key)
            gateway.expect(name)

    def end_hanging(self, names: Sequence[str]) -> None:
        """Kill the given workers if they were started here; new workers replace them."""
        for name in self._running.keys() & set(names):
            self._running[name].process.kill()

    def close(self) -> None:
        """End the workers and their children."""
        for worker in self._running.values():
            worker.process.terminate()
        for worker in self._running.values():
            try:
                worker.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def workers_key(config: ExternalConfig) -> str | None:
    """Return the key for workers on other hosts; None without external.key_env. Raises ValueError: the variable is not set."""
    return None if config.key_env is None else read_key(config.key_env, "external.key_env")


def join_line(config: ExternalConfig) -> str:
    """Return the command that starts a worker on another host, for display."""
    host = socket.gethostname() if config.host in ("0.0.0.0", "::") else config.host
    return (
        f"sessions wait for workers; run MARSRL_WORKER_KEY=(the key in {config.key_env}) python {WORKER} "
        f"--url {url_of(host, config.port)} --function my_agent.py:run on other hosts, which need only this file"
    )


def worker_words(config: ExternalConfig, *options: str) -> list[str]:
    words = [config.python or sys.executable, str(WORKER), *options]
    if config.function:
        return [*words, "--function", config.function]
    if config.environment:
        return [*words, "--environment", config.environment]
    return [*words, "--command", *config.command]


def check_external(config: ExternalConfig) -> str | None:
    """Return the workers' key (None: a random one), after checking that the program can start and the port is free.

    Raises ValueError: the key's variable is not set, the port is taken, or workers could not start the program.
    """
    key = workers_key(config)
    try:
        listen(config.host, config.port).close()
    except OSError as error:
        raise ValueError(f"external.host={config.host}, external.port={config.port}: {error}") from error
    check_program(config)
    return key


def check_program(config: ExternalConfig) -> None:
    """Raise ValueError for a program that workers could not start, such as one that `external.python` cannot import."""
    if not config.workers:
        return
    try:
        done = subprocess.run(
            worker_words(config, "--check"), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(
            f"external.python is {config.python}, which failed ({error}); expected a Python interpreter"
        ) from error
    if done.returncode != 0:
        raise ValueError(f"external.function, external.environment, external.command: {done.stderr.strip()[-2000:]}")
