"""Runs of trainer/main.py whose model says by a script what the dual system is to say, and stands still in one phase of a turn.

    python tests/integration/killed_turns_worker.py PHASE INSTANCE FOLDER word-of-trainer/main.py ...

Everything is a run's own, the log-probs of the tokens too; only which token is drawn is told. From the rollout instance of that
number on, the engine stops in the phase, or with `tools` the server holds its answers, and FOLDER/held says that it is so; the
trainer waits for that before it publishes, so that its checkpoint keeps a turn in this very phase.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.local import engine as local
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.player.rollout import Rollout
from marsrl.trainer.main import main

NUM_CALLS = 2
READS = "it says so"
_BEGUN = {"thinking": 5, "distilling": 3, "resumed": 5}  # tokens of the turn, before it stands still there


def query(episode: str, turn: int) -> str:
    return f"{episode} {turn}"


def says(uid: str, turn: int) -> str:
    """What the sample says in this turn; the answer is right in every second episode."""
    episode = uid.partition("/")[0]
    if "/system1" in uid:
        return READS
    if turn < NUM_CALLS:
        call = {"tool": "search", "arguments": {"queries": [query(episode, turn)]}, "purpose": "p"}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    return f"<answer>{7 + int(episode.rpartition('.')[2]) % 2}</answer>"


class Script:
    """The tokens that rows are to draw, and whether one of them has come to where the engine stands still."""

    def __init__(self, phase: str, instance: int, folder: Path) -> None:
        self.renderer = ChatRenderer(folder / "model")
        self.phase, self.instance, self.held = phase, instance, folder / "held"

    def next_token(self, request: DecodeRequest, drawn: list[int]) -> int:
        turn, begun = self.place(request, drawn)
        whole = [*self.renderer.completion_ids(says(request.uid, turn)).tolist(), self.renderer.eos_id]
        return int(whole[min(begun, len(whole) - 1)])

    def place(self, request: DecodeRequest, drawn: list[int]) -> tuple[int, int]:
        """(turn, tokens that it has in it)."""
        ids = torch.tensor([*request.token_ids.tolist(), *drawn])
        start = int((ids == int(self.renderer.encode_trusted("<|im_start|>")[0])).nonzero()[-1]) + len("xassistant\n")
        return int((ids == self.renderer.eos_id).sum()) // 2, len(ids) - start

    def stands_still(self, request: DecodeRequest, drawn: list[int]) -> bool:
        if self.phase not in _BEGUN or int(request.uid[:6]) < self.instance:
            return False
        turn, begun = self.place(request, drawn)
        of_system1 = "/system1" in request.uid
        is_phase = of_system1 if self.phase == "distilling" else not of_system1 and turn == (self.phase == "resumed")
        return is_phase and begun >= _BEGUN[self.phase]


def follow(script: Script) -> None:
    """LocalEngine draws what the script says; publishing waits for `held` once the step before the instance is trained."""
    engine: Any = local
    step, collect, resting = local.LocalEngine._step, local.LocalEngine.collect, Rollout.resting

    def scripted_step(self: Any, batch: Any) -> list[DecodeResult]:
        ids = torch.tensor([script.next_token(row.request, row.tokens) for row in batch.rows])
        engine.draw_from = lambda scaled, *_: (ids, scaled.log_softmax(-1).gather(1, ids[:, None])[:, 0])
        return step(self, batch)

    def stopped_collect(self: Any, timeout_s: float) -> list[DecodeResult]:
        rows = self._batch.rows if self._batch is not None and not self._is_aborting else []
        if any(row.finish is None and script.stands_still(row.request, row.tokens) for row in rows):
            script.held.touch()
            time.sleep(0.05)
            return []
        return collect(self, 0.0 if script.phase else timeout_s)  # a step at a time, to stop at the right token

    @contextmanager
    def late_resting(self: Any, versions: Mapping[str, int] | None = None) -> Iterator[None]:
        while script.phase and self.stages.state.num_taken >= script.instance - 1 and not script.held.exists():
            time.sleep(0.05)
        with resting(self, versions):
            yield

    local.LocalEngine._step = scripted_step  # type: ignore[method-assign]
    local.LocalEngine.collect = stopped_collect  # type: ignore[method-assign]
    Rollout.resting = late_resting  # type: ignore[method-assign]


if __name__ == "__main__":
    phase, instance, folder, *words = sys.argv[1:]
    follow(Script(phase, int(instance), Path(folder)))
    sys.exit(main(words))
