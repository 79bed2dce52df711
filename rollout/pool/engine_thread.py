"""The one thread in which an engine lives: it decodes on, whoever asks for results, and results are gathered meanwhile.

    thread.submit(requests, version) -> decodes until nothing is under way
                                           | each result, as it ends
                                           v
    thread.collect(timeout_s)        <- those gathered, once they are due

Handing results over costs the decoding thread a few milliseconds of the interpreter, however many there are; a result that
is not handed over delays what follows from it. So a result waits for others for at most a tenth of the time that it took,
and not at all once nothing else is under way: neither short nor long completions, nor the tools and agents that wait for
them, get more than a tenth slower, and a step in which a sample ends is as long as any other.
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

_WAIT_SHARE = 0.1
_DECODE_S = 1.0  # one call of the engine's collect where nothing ends

Returned = TypeVar("Returned")


class EngineThread:
    """See the module. Any thread may call its methods. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._executor = ThreadPoolExecutor(1, "marsrl-engine")  # vLLM has a CUDA stream of its own in each thread
        self._changed = threading.Condition()  # guards what follows
        self._began: dict[str, float] = {}  # by uid of what is under way, seconds
        self._gathered: list[DecodeResult] = []
        self._due = math.inf  # when what was gathered has waited long enough
        self._wake_at = math.inf  # when whoever collects takes what there is
        self._is_decoding = False
        self._since = 0.0  # time.time() from which what is gathered was decoded
        self._error: BaseException | None = None

    def start(self, make: Callable[[], Engine]) -> None:
        """Make the engine."""
        self._engine = self.call(make)

    def call(self, function: Callable[[], Returned]) -> Returned:
        """Runs the function in the engine's thread, once nothing is decoded there; returns its result."""
        return self._executor.submit(function).result()

    def submit(self, requests: Sequence[DecodeRequest], version: int) -> None:
        """Requests enter the engine before its next step; raises WrongVersion unless it holds this version."""
        with self._changed:
            self._engine.submit(requests, version=version)
            now = self._clock()
            self._began.update((request.uid, now) for request in requests)
            self._decode_on()

    def collect(self, timeout_s: float, *, is_urgent: bool) -> Timed:
        """Results and when they were decoded; none where none is due within timeout_s.

        is_urgent: something may follow from a result. Else they are gathered for timeout_s, or until nothing is under way.

        Raises:
            Exception: what the engine raised while it decoded, or `fail` was told.
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
            return Timed(results, start, max(start, self._since))

    def fail(self, error: BaseException) -> None:
        """Have it raised to whoever collects."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def abort(self) -> None:
        """End all requests where they are: they are due at once."""
        with self._changed:
            self._engine.abort()
            self._decode_on()  # the engine forgets the abort where nothing was under way

    def _decode_on(self) -> None:
        if not self._is_decoding:
            self._is_decoding, self._since = True, time.time()
            self._executor.submit(self._decode)

    def _decode(self) -> None:
        try:
            while self._is_decoding:
                self._gather(self._engine.collect(_DECODE_S))
        except BaseException as error:
            with self._changed:
                self._is_decoding = False
            self.fail(error)

    def _gather(self, results: Sequence[DecodeResult]) -> None:
        with self._changed:
            now, is_first = self._clock(), not self._gathered
            for result in results:
                self._due = min(self._due, now + _WAIT_SHARE * (now - self._began.pop(result.uid)))
            self._gathered += results
            self._is_decoding = bool(self._began)
            if (results and is_first) or now >= self._wake_at or not self._is_decoding:
                self._changed.notify_all()
