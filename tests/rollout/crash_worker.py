"""Plays with a do-nothing learner, killed again and again: `python crash_worker.py FOLDER KILLS OVERLAP`.

Each life is a forked child that goes on from the last checkpoint; a byte in a pipe tells of everything it does, and
after a random number of bytes it gets SIGKILL. The last life is left alone. Prints the number of kills.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from letters import letter_config, letter_problems, letter_team, script, set_version

from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.player.stages import RolloutState
from marsrl.rollout.state import decode, encode
from marsrl.trainer.runs.directory import write_atomically

NUM_PROBLEMS, EPOCHS = 8, 2


@dataclass(frozen=True)
class Saved:
    """A checkpoint: how many steps were made, what was trained in them, and the rollout."""

    step: int
    trained: list[tuple[str, str]]  # (group_id, problem_id)
    rollout: RolloutState


def live(file: Path, overlap: int, pipe: int) -> None:
    """Train until every group of EPOCHS epochs is trained."""

    def tell(request: DecodeRequest) -> list[int]:
        os.write(pipe, b".")
        return script(request)

    config = letter_config(overlap=overlap, segments=3)
    team, engines = letter_team(config, script=tell)
    rollout = Rollout(config, team, letter_problems(NUM_PROBLEMS), seed=0)
    step, trained = 0, []
    if file.exists():
        saved = decode(Saved, file.read_bytes())
        step, trained = saved.step, list(saved.trained)
        rollout.restore(saved.rollout)
    set_version(step, engines[0])
    while True:
        batch = rollout.next_batch({"main": step})
        trained += [(group.group_id, group.samples[0].problem_id) for group in batch.groups]
        step += 1
        with rollout.resting({"main": step}):
            set_version(step, engines[0])
        state = rollout.snapshot()
        write_atomically(file, encode(Saved(step, trained, state)))
        os.write(pipe, b".")
        if not is_under_way(state):
            break
    rollout.close()


def is_under_way(state: RolloutState) -> bool:
    """Is something of the epochs not trained yet?"""
    books = state.stages
    left = [each.ask.episode_id for each in books.open.values()] + [ask.episode_id for ask in books.pending]
    left += [group.rollout_id for group in books.closed] + [g.rollout_id for b in books.ready for g in b.groups]
    return books.num_instances < NUM_PROBLEMS * EPOCHS or any(int(i) <= NUM_PROBLEMS * EPOCHS for i in left)


def main(folder: Path, kills: int, overlap: int) -> None:
    rng = random.Random(overlap)
    for life in range(kills + 1):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            live(folder / "checkpoint", overlap, writing)
            os._exit(0)
        os.close(writing)
        left = rng.randrange(1, 120) if life < kills else sys.maxsize
        while left > 0 and (told := os.read(reading, min(left, 4096))):
            left -= len(told)
        if left <= 0:
            time.sleep(rng.random() * 0.004)
            os.kill(child, signal.SIGKILL)
        os.close(reading)
        _, status = os.waitpid(child, 0)
        expected = signal.SIGKILL if life < kills else 0
        if status != expected:
            raise SystemExit(f"life {life} ended with {status}, expected {expected}")
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
