"""Started by torchrun: a run with a scripted engine whose rank 0 comes later than a collective waits, to every kind of thing
that it does alone."""

from __future__ import annotations

import datetime
import functools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from scripted_pool import ScriptedWithWeights, engines_are

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.player.rollout import Rollout
from marsrl.trainer import build, main
from marsrl.trainer.learner.megatron import parallel

LIMIT_S, LATE_S = 8.0, 10.0  # of a collective; how late rank 0 comes


def script(request: DecodeRequest) -> str:
    rng = random.Random(request.uid)
    if request.uid.rpartition("/")[2].startswith("verifier"):
        return f"Findings: none\nVerdict: {rng.choice(['correct', 'wrong'])}"
    return f"So the answer is \\boxed{{{rng.choice(['7', '8'])}}}."


def come_late() -> None:
    """Rank 0, once each: from the start of its engines, a stage, its part of a checkpoint, and engines that come to rest."""
    start = parallel.start

    def limited(*words: Any) -> None:
        start(*words)  # ranks come to it as far apart as their imports end
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=LIMIT_S))

    parallel.start = limited  # type: ignore[assignment]
    waits, resting = [LATE_S], Rollout.resting

    @contextmanager
    def late_resting(*words: Any) -> Iterator[None]:
        if waits:
            time.sleep(waits.pop())
        with resting(*words):
            yield

    Rollout.resting = late_resting  # type: ignore[method-assign, assignment]
    for owner, name in ((build, "make_pool"), (Rollout, "next_batch"), (Rollout, "snapshot")):
        setattr(owner, name, _late_once(getattr(owner, name)))


def _late_once(method: Callable[..., Any]) -> Callable[..., Any]:
    waits = [LATE_S]

    def late(*words: Any, **settings: Any) -> Any:
        if waits:
            time.sleep(waits.pop())
        return method(*words, **settings)

    return late


def run(model: str, settings: list[str]) -> int:
    renderer = ChatRenderer(model)
    encode = lambda text: renderer.encode_trusted(text).tolist()  # noqa: E731
    with engines_are(functools.partial(ScriptedWithWeights, Path(model), script, encode=encode)):
        come_late()
        return main.main(settings)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
