"""Two adapters on one base, played by a script: `python two_adapters_worker.py FOLDER MODEL WORDS...` trains until the second of
them is to be published in step 2, and ends there as by kill -9."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from scripted_pool import ScriptedWithWeights, engines_are, opened

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest, Engine
from marsrl.trainer.loop import train

ADAPTERS = {
    "solver": AdapterConfig(rank=4, targets=("attention",)),
    "verifier": AdapterConfig(rank=2, targets=("attention",)),
}


def script(request: DecodeRequest) -> str:
    rng = random.Random(request.uid)
    if request.uid.rpartition("/")[2].startswith("verifier"):
        return f"Findings: none\nVerdict: {rng.choice(['correct', 'wrong'])}"
    return f"So the answer is \\boxed{{{rng.choice(['7', '8'])}}}."


def engine_of(model: str) -> Callable[[], Engine]:
    """It says what the script says, whichever adapter is asked, and scores the probe with each."""
    renderer = ChatRenderer(model)

    def encode(text: str) -> list[int]:
        return [int(token) for token in renderer.encode_trusted(text)]

    return functools.partial(ScriptedWithWeights, Path(model), script, encode=encode, adapters=ADAPTERS)


def main(folder: Path, model: str, words: list[str]) -> None:
    with engines_are(engine_of(model)), opened(folder, words) as run:
        publish, published = run.publish, list[str]()

        def publish_or_die(policy: str, *, is_new: bool) -> None:
            if run.step == 2 and published:
                os.kill(os.getpid(), signal.SIGKILL)
            if run.step == 2:
                published.append(policy)
            publish(policy, is_new=is_new)

        run.publish = publish_or_die  # type: ignore[method-assign]
        train(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
