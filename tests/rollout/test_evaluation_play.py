"""An evaluation is as long as its longest episode: nobody waits for the longest completion of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from letters import letter_config, letter_team

from marsrl.rollout.engines.protocol import DecodeResult, Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.evaluation import EvaluationPlay, Played
from marsrl.rollout.types import Problem

PER_STEP = 3


def play(numbers: Sequence[int], most_open: int | None = None) -> tuple[list[Played], list[tuple[int, int, int]], int]:
    """These episodes as they end, what progress is told, and the steps that the engine took, each a second of the clock."""
    team, (engine,) = letter_team(letter_config(), tokens_per_step=PER_STEP)
    collect, ended, told, num_steps = engine.collect, list[Played](), list[tuple[int, int, int]](), 0

    def counted(timeout_s: float) -> list[DecodeResult]:
        nonlocal num_steps
        num_steps += 1
        return [replace(result, seconds=0.5) for result in collect(timeout_s)]

    engine.collect = counted  # type: ignore[method-assign]
    play = EvaluationPlay(
        team, {"main": 0}, 48, Sampling(), progress=lambda *progress: told.append(progress), on_end=ended.append,
        most_open=most_open, now=lambda: float(num_steps),
    )  # fmt: skip
    problem = Problem("p", "question", "7", "math")
    play.add([Episode(f"e{i}", f"e{i}", problem, purpose="evaluate") for i in numbers], seed=0)
    play.finish()
    assert sorted(each.episode.id for each in ended) == sorted(f"e{i}" for i in numbers)  # told once
    for each in ended:
        assert each.episode.is_at_its_end
        assert {sample.uid for sample in each.samples} == {f"{ask}:0" for ask in each.episode.answers}
        assert each.seconds == {sample.uid: 0.5 for sample in each.samples}
    return ended, told, num_steps


def steps_of(each: Played) -> list[int]:
    """Steps in which the engine decodes each completion."""
    return [math.ceil(len(sample.token_ids) / PER_STEP) for sample in each.samples]


def test_a_slot_that_is_free_is_used() -> None:
    ended, told, num_steps = play(range(10))
    steps = [steps_of(each) for each in ended]
    rounds = [max(each[k] for each in steps if k < len(each)) for k in range(max(map(len, steps)))]
    assert len(rounds) > 3 and num_steps == max(map(sum, steps)) < sum(rounds)
    assert told[-1] == (10, 10, sum(len(sample.token_ids) for each in ended for sample in each.samples))


def test_an_episode_takes_from_its_own_first_request_to_its_end() -> None:
    for most_open in (None, 3):
        assert all(each.latency_s == sum(steps_of(each)) for each in play(range(10), most_open)[0])
