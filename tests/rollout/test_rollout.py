"""The thread that decodes while the trainer trains (4 s)."""

from __future__ import annotations

import threading
import time
import traceback
from typing import Any

import pytest
from letters import letter_config, letter_problems, letter_team, script

from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.player.rollout import Rollout


def background(**options: Any) -> tuple[Rollout, Any]:
    config = letter_config(**{key: options.pop(key) for key in list(options) if key not in ("script", "judge")})
    team, engines = letter_team(config, **options)
    return Rollout(config, team, letter_problems(40), seed=0), engines[0]


def test_an_error_in_the_thread_is_raised_in_the_trainer_with_its_traceback() -> None:
    asked, before = [], set(threading.enumerate())  # of other tests

    def broken(request: DecodeRequest) -> list[int]:
        asked.append(request.uid)
        if len(asked) > 10:
            raise ZeroDivisionError("the engine burns")
        return script(request)

    rollout, _ = background(script=broken)
    with pytest.raises(RuntimeError, match="the engine burns") as caught:
        for _ in range(3):
            rollout.next_batch({"main": 0})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in broken" in "".join(traceback.format_exception(caught.value))
    for call in (rollout.snapshot, lambda: rollout.next_batch({"main": 0}), rollout.resting().__enter__):
        with pytest.raises(RuntimeError, match="the engine burns"):
            call()
    rollout.close()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("marsrl-")} <= before


def test_a_request_that_never_comes_back_is_an_error_that_names_it() -> None:
    rollout, engine = background(deadline_s=0.2)
    engine.collect = lambda timeout_s: time.sleep(0.05) or []
    with pytest.raises(
        RuntimeError, match=r"request 000001/solver:0 has not come back after rollout.deadline_s = 0.2 s"
    ):
        rollout.next_batch({"main": 0})
    rollout.close()
