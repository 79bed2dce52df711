"""Detects silent engine processes: stopped, or on a machine that is gone. A busy one still answers.

pulse.listen(actors)          # repeatedly while waiting
pulse.silent_for_s(replica)   # how long we have listened to it in vain
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

_ASK_EVERY = 0.1  # of the allowed silence
_GAP_S = 1.0  # counted at most between two calls of listen: during a longer gap nobody listened


@dataclass(slots=True)
class _Asked:
    call: Any  # None: answered
    since: float
    silent_s: float = 0.0


class EnginePulse:
    """Pings each engine, which answers in a thread of its own. Methods may be called from any thread.

    silence_s: after which an engine counts as lost (run.silence_s).
    """

    def __init__(self, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.silence_s = silence_s
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}
        self._listened = -float("inf")

    def listen(self, actors: Mapping[int, Any]) -> None:
        """Take answers and ping again, without waiting. actors: by replica."""
        with self._lock:
            now = self._clock()
            elapsed, self._listened = min(now - self._listened, _GAP_S), now
            calls = [asked.call for asked in self._asked.values() if asked.call is not None]
            done = set(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) if calls else set()
            for replica, actor in list(actors.items()):
                asked = self._asked.get(replica)
                if asked is not None and asked.call is not None:
                    if asked.call in done:  # an error, too: whoever waits for another answer gets it
                        asked.call, asked.silent_s = None, 0.0
                    else:
                        asked.silent_s += elapsed
                elif asked is None or now - asked.since > _ASK_EVERY * self.silence_s:
                    self._asked[replica] = _Asked(actor.is_there.remote(), now)

    def silent_for_s(self, replica: int) -> float:
        """Seconds of listening since the ping; 0 if it has answered."""
        with self._lock:
            return self._asked[replica].silent_s if replica in self._asked else 0.0

    def forget(self, replica: int) -> None:
        """Reset a replica: another process takes its place."""
        with self._lock:
            self._asked.pop(replica, None)
