"""Thread that runs an engine: it keeps decoding while results are batched for the collector.

    thread.submit(requests, version) -> decodes until nothing is under way
                                            | each result, when it ends
                                           v
    thread.collect(timeout_s)        <- a batch, once it is due

Handing over a batch costs the decoding thread a few milliseconds of the interpreter, whatever the batch's size, but a waiting
result delays everything that depends on it. So a result waits for others for at most a tenth of its own decoding time, and not at
all once nothing else is under way. Completions, and the tools and agents that depend on them, are slowed by at most a tenth.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Engine
from marsrl.rollout.pool.replicas import Timed
from marsrl.rollout.types import Finish

_WAIT_SHARE = 0.1
_DECODE_S = 0.1  # limit of one collect of the engine if nothing ends: `call` waits at most this long for decoding

Returned = TypeVar("Returned")


class EngineThread:
    """Thread that runs an engine; see the module. Any thread may call its methods. clock: returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # A single thread, because vLLM uses one CUDA stream per thread.
        self._executor = ThreadPoolExecutor(1, "marsrl-engine")
        self._changed = threading.Condition()  # guards the fields below
        self._began: dict[str, float] = {}  # start times of requests under way, by uid, seconds
        self._gathered: list[DecodeResult] = []
        self._due = math.inf  # time at which the batch must be handed over
        self._wake_at = math.inf  # time at which the collector takes all available results
        self._is_decoding = False
        self._since = 0.0  # time.time() at which decoding of the batch began
        self._error: BaseException | None = None

    def start(self, make: Callable[[], Engine]) -> None:
        """Build the engine."""
        self._engine = self.call(make)

    def call(self, function: Callable[[], Returned]) -> Returned:
        """Run the function in the engine's thread between decoding steps, and return its result."""
        return self._executor.submit(function).result()

    def submit(self, requests: Sequence[DecodeRequest], version: int) -> None:
        """Add requests before the engine's next step; raises WrongVersion unless it holds this version."""
        with self._changed:
            self._engine.submit(requests, version=version)
            now = self._clock()
            self._began.update((request.uid, now) for request in requests)
            self._decode_on()

    def collect(self, timeout_s: float, *, is_urgent: bool) -> Timed:
        """Return results and their decoding times; empty if none is due within timeout_s.

        is_urgent: True if a result may trigger further requests; False to batch for timeout_s, or until nothing is under way.

        Raises Exception: an error that the engine raised while decoding, or that was passed to `fail`.
        """
        end = self._clock() + timeout_s
        with self._changed:
            while self._error is None and (self._began or not self._gathered):
                self._wake_at = min(end, self._due) if is_urgent else end
                left = self._wake_at - self._clock()
                if left <= 0:
                    break
                self._changed.wait(left)
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            results, self._gathered = self._gathered, []
            self._due = self._wake_at = math.inf
            start, self._since = self._since, time.time()
            return Timed(results, start, self._since)

    def fail(self, error: BaseException) -> None:
        """Raise the error in the collector's next call."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def abort(self, adapter: str | None = None) -> None:
        """Stop requests that use the adapter (None: all); their partial results are due at once."""
        with self._changed:
            self._engine.abort(adapter)
            self._decode_on()  # even if nothing is under way, so that the engine handles the abort now

    def _decode_on(self) -> None:
        if not self._is_decoding:
            self._is_decoding, self._since = True, time.time()
            self._executor.submit(self._decode)

    def _decode(self) -> None:
        try:
            self._gather(self._engine.collect(_DECODE_S))
        except BaseException as error:
            with self._changed:
                self._is_decoding = False
            self.fail(error)

    def _gather(self, results: Sequence[DecodeResult]) -> None:
        with self._changed:
            now, is_first = self._clock(), not self._gathered
            is_aborted = any(result.finish is Finish.UNFINISHED for result in results)
            for result in results:
                self._due = min(self._due, now + _WAIT_SHARE * (now - self._began.pop(result.uid)))
            if is_aborted:
                self._due = now
            self._gathered += results
            self._is_decoding = bool(self._began)
            if self._is_decoding:
                self._executor.submit(self._decode)  # after pending calls
            if (results and is_first) or is_aborted or now >= self._wake_at or not self._is_decoding:
                self._changed.notify_all()
