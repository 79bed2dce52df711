"""An evaluation is as long as its longest episode: nobody waits for the longest completion of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from letters import letter_config, letter_team

from marsrl.rollout.engines.protocol import DecodeResult, Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.evaluation import EvaluationPlay, Played
from marsrl.rollout.types import IntArray, Problem

PER_STEP = 3


@dataclass
class Heard:
    """said: the completions of each episode, in order, which ended in this order; num_steps: that the engine took; told: by
    progress; latency_s: of each episode, on a clock of one second a step."""

    said: dict[str, list[IntArray]] = field(default_factory=dict)
    latency_s: dict[str, float | None] = field(default_factory=dict)
    told: list[tuple[int, int, int]] = field(default_factory=list)
    num_steps: int = 0


def play(numbers: Sequence[int], most_open: int | None = None) -> Heard:
    """These episodes, to their ends."""
    team, (engine,) = letter_team(letter_config(), tokens_per_step=PER_STEP)
    collect, heard = engine.collect, Heard()

    def counted(timeout_s: float) -> list[DecodeResult]:
        heard.num_steps += 1
        return [replace(result, seconds=0.5) for result in collect(timeout_s)]

    engine.collect = counted  # type: ignore[method-assign]

    def note(played: Played) -> None:
        episode, samples = played.episode, played.samples
        assert episode.is_at_its_end and episode.id not in heard.said  # told once
        assert {sample.uid for sample in samples} == {f"{ask}:0" for ask in episode.answers}
        assert played.seconds == {sample.uid: 0.5 for sample in samples}
        heard.said[episode.id] = [sample.token_ids for sample in samples]
        heard.latency_s[episode.id] = played.latency_s

    play = EvaluationPlay(
        team,
        {"main": 0},
        48,
        Sampling(),
        progress=lambda *progress: heard.told.append(progress),
        on_end=note,
        most_open=most_open,
        now=lambda: float(heard.num_steps),
    )
    problem = Problem("p", "question", "7", "math")
    play.add([Episode(f"e{i}", f"e{i}", problem, purpose="evaluate") for i in numbers], seed=0)
    play.finish()
    return heard


def steps_of(heard: Heard) -> dict[str, list[int]]:
    """Steps in which the engine decodes each completion."""
    return {name: [math.ceil(len(tokens) / PER_STEP) for tokens in each] for name, each in heard.said.items()}


def test_a_slot_that_is_free_is_used() -> None:
    heard = play(range(10))
    steps = [*steps_of(heard).values()]
    rounds = [max(each[k] for each in steps if k < len(each)) for k in range(max(map(len, steps)))]
    assert len(heard.said) == 10 and len(rounds) > 3
    assert heard.num_steps == max(map(sum, steps)) < sum(rounds)
    assert heard.told[-1] == (10, 10, sum(len(tokens) for each in heard.said.values() for tokens in each))


def test_an_episode_takes_from_its_own_first_request_to_its_end() -> None:
    for heard in (play(range(10)), play(range(10), most_open=3)):
        assert heard.latency_s == {name: sum(each) for name, each in steps_of(heard).items()}
