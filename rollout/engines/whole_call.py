"""generate() in terms of submit() and collect(): the one decode loop of an engine serves both."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Engine


def generate_all(
    engine: Engine, requests: Sequence[DecodeRequest], *, version: int, deadline_s: float | None
) -> list[DecodeResult]:
    """Results of all requests, in their order. On an error, Ctrl-C or the deadline nothing is left running.

    Raises:
        ValueError: two requests have one uid.
        TimeoutError: it took longer than deadline_s.
    """
    place = {request.uid: i for i, request in enumerate(requests)}
    if len(place) < len(requests):
        raise ValueError(f"generate: {len(requests)} requests have only {len(place)} different uids")
    end = math.inf if deadline_s is None else time.monotonic() + deadline_s
    results: dict[int, DecodeResult] = {}
    engine.submit(requests, version=version)
    try:
        while len(results) < len(requests):
            for result in engine.collect(max(0.0, end - time.monotonic())):
                results[place[result.uid]] = result
            if len(results) < len(requests) and time.monotonic() >= end:
                raise TimeoutError(
                    f"{type(engine).__name__}: {len(requests) - len(results)} of {len(requests)} requests are "
                    f"unfinished after rollout.deadline_s = {deadline_s:g} s; raise it, or ask for fewer or shorter "
                    "completions"
                )
    finally:
        if len(results) < len(requests):
            engine.abort()
            engine.collect(0.0)
    return [results[i] for i in range(len(requests))]
