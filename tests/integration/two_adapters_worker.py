"""Two adapters on one base, played by a script: `python two_adapters_worker.py FOLDER WORDS...` trains until the second of
them is to be published in step 2, and ends there as by kill -9."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from scripted_pool import engines_are, half_right, opened, saying

from marsrl.rollout.adapter import AdapterConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.loop import train

ADAPTERS = {
    "solver": AdapterConfig(rank=4, targets=("attention",)),
    "verifier": AdapterConfig(rank=2, targets=("attention",)),
}


def main(folder: Path, words: list[str]) -> None:
    model = read_config(None, words)[0].policies["main"].model
    with engines_are(saying(Path(model or ""), half_right, adapters=ADAPTERS)), opened(folder, words) as run:
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
    main(Path(sys.argv[1]), sys.argv[2:])
