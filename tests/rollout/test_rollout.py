"""The thread that decodes while the trainer trains (4 s)."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from letters import judge, letter_config, letter_problems, letter_team, script

from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.types import Problem, Reward


def background(**options: Any) -> tuple[Rollout, Any]:
    config = letter_config(**{key: options.pop(key) for key in list(options) if key not in ("script", "judge")})
    team, engines = letter_team(config, **options)
    return Rollout(config, team, letter_problems(40), seed=0), engines[0]


def comes_true(condition: Callable[[], bool]) -> bool:
    """Waits for it: a minute, for machines that are busy."""
    for _ in range(6000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def rollout_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("marsrl-")]


def test_batches_come_while_versions_change() -> None:
    rollout, engine = background(segments=3)
    decoded: list[int] = []
    ages, ids = [], []
    for version in range(6):
        batch = rollout.next_batch({"main": version}, decoded.append)
        ages += [version - s.oldest_version for g in batch.groups for s in g.samples]
        ids += [g.group_id for g in batch.groups]
        with rollout.resting({"main": version + 1}):
            assert rollout.stages.team.pools["main"].num_under_way == 0
            engine._version = version + 1
    rollout.close()
    assert len(set(ids)) == len(ids) > 10
    assert 0 < max(ages) <= 4
    assert rollout_threads() == []


def test_an_error_in_the_thread_is_raised_in_the_trainer_with_its_traceback() -> None:
    asked = []

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
    assert rollout_threads() == []


def test_an_error_of_a_judge_is_raised_in_the_trainer() -> None:
    def broken(problem: Problem, answer: str) -> Future[Reward]:
        reward: Future[Reward] = Future()
        reward.set_exception(OSError("no judge"))
        return reward

    rollout, _ = background(judge=broken)
    with pytest.raises(RuntimeError, match="no judge"):
        rollout.next_batch({"main": 0})
    rollout.close()


def test_a_slow_judge_does_not_hold_up_the_engines() -> None:
    judges = ThreadPoolExecutor(1)
    let_go = threading.Event()

    asked = []

    def slow(problem: Problem, answer: str) -> Future[Reward]:
        asked.append(answer)
        return judges.submit(lambda: (let_go.wait(120), judge(problem, answer).result())[1])

    rollout, engine = background(judge=slow, overlap=1)
    trainer = threading.Thread(target=lambda: rollout.next_batch({"main": 0}))
    trainer.start()
    pool = rollout.stages.team.pools["main"]
    assert comes_true(
        lambda: bool(rollout.snapshot().stages.open) and not pool.num_under_way and engine.num_decoded() > 50
    )
    books = rollout.snapshot().stages
    assert not books.closed  # all solvers are decoded, and no answer is judged
    assert sum(len(group.unfinished) for group in books.open.values()) == len(asked) > 3
    let_go.set()
    trainer.join(120)
    assert not trainer.is_alive()
    rollout.close()
    judges.shutdown()


def test_a_request_that_never_comes_back_is_an_error_that_names_it() -> None:
    rollout, engine = background(deadline_s=0.2)
    engine.collect = lambda timeout_s: time.sleep(0.05) or []
    with pytest.raises(
        RuntimeError, match=r"request 000001/solver:0 has not come back after rollout.deadline_s = 0.2 s"
    ):
        rollout.next_batch({"main": 0})
    rollout.close()


def test_nothing_goes_on_after_weights_failed_to_arrive() -> None:
    rollout, engine = background()
    rollout.next_batch({"main": 0})
    with pytest.raises(OSError, match="disk full"), rollout.resting({"main": 1}):
        raise OSError("disk full")
    decoded = engine.num_decoded()
    time.sleep(0.3)
    assert engine.num_decoded() == decoded
    rollout.close()


def test_ctrl_c_ends_the_process(tmp_path: Path) -> None:
    program = tmp_path / "play.py"
    program.write_text(
        f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
sys.path.insert(0, {str(Path(__file__).parent)!r})
from letters import letter_config, letter_problems, letter_team
from marsrl.rollout.player.rollout import Rollout
config = letter_config()
rollout = Rollout(config, letter_team(config)[0], letter_problems(40), seed=0)
try:
    rollout.next_batch({{"main": 0}})
    print("playing", flush=True)
    time.sleep(60)
finally:
    rollout.close()
"""
    )
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "playing\n"
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=300)[1]
    assert process.returncode in (1, 130, -signal.SIGINT)
