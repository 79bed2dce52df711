"""Started by torchrun: a run with a scripted engine whose rank 1 kills itself in the middle of step KILL_AT."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
from typing import Any

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.pool.build import make_pool
from marsrl.trainer import build, main
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.weights.comparison import ComparisonReport, EngineComparison


def script(request: DecodeRequest) -> str:
    rng = random.Random(request.uid)
    if request.uid.rpartition("/")[2].startswith("verifier"):
        return f"Findings: none\nVerdict: {rng.choice(['correct', 'wrong'])}"
    return f"So the answer is \\boxed{{{rng.choice(['7', '8'])}}}."


def kill_at(step: int) -> None:
    """Rank 1 dies between its backward pass and the reduction that rank 0 waits in."""
    forward_backward = Learner._forward_backward

    def die(self: Learner, *words: Any) -> Any:
        results = forward_backward(self, *words)
        if self.num_steps == step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return results

    Learner._forward_backward = die  # type: ignore[method-assign]


def run(model: str, settings: list[str]) -> int:
    renderer = ChatRenderer(model)
    engine = functools.partial(ScriptedEngine, script, encode=lambda text: renderer.encode_trusted(text).tolist())
    build.make_pool = functools.partial(make_pool, scripted=engine)  # type: ignore[assignment]
    EngineComparison.compare = lambda *_: ComparisonReport(1, 0, 0, 0, 0, 0, 0)  # type: ignore[method-assign]  # no log-probs
    if "KILL_AT" in os.environ:
        kill_at(int(os.environ["KILL_AT"]))
    return main.main(settings)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
