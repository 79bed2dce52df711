"""An evaluation is as long as its longest episode: nobody waits for the longest completion of a round."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from letters import letter_config, letter_team

from marsrl.rollout.engines.protocol import DecodeResult, Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.schedule.at_once import AtOnce
from marsrl.rollout.types import IntArray, Problem, Sample

PER_STEP = 3


def played(
    numbers: Sequence[int], most_open: int | None = None
) -> tuple[dict[str, list[IntArray]], int, list[tuple[int, int, int]]]:
    """({episode: its completions in order}, steps that the engine took, what progress told) of these episodes."""
    team, (engine,) = letter_team(letter_config(), tokens_per_step=PER_STEP)
    collect, steps = engine.collect, []

    def counted(timeout_s: float) -> list[DecodeResult]:
        steps.append(timeout_s)
        return [replace(result, seconds=0.5) for result in collect(timeout_s)]

    engine.collect = counted  # type: ignore[method-assign]
    told: list[tuple[int, int, int]] = []
    said: dict[str, list[IntArray]] = defaultdict(list)

    def note(episode: Episode, samples: Sequence[Sample], seconds: Mapping[str, float]) -> None:
        assert episode.is_at_its_end and episode.id not in said  # told once
        assert {sample.uid for sample in samples} == {f"{ask}:0" for ask in episode.answers}
        assert seconds == {sample.uid: 0.5 for sample in samples}
        said[episode.id] = [sample.token_ids for sample in samples]

    player = AtOnce(team, {"main": 0}, 48, Sampling(), lambda *progress: told.append(progress), note)
    player.most_open = most_open
    problem = Problem("p", "question", "7", "math")
    player.play([Episode(f"e{i}", f"e{i}", problem, purpose="evaluate") for i in numbers], seed=0)
    player.finish()
    return said, len(steps), told


def test_a_slot_that_is_free_is_used() -> None:
    said, num_steps, told = played(range(10))
    steps_of = [[math.ceil(len(tokens) / PER_STEP) for tokens in each] for each in said.values()]
    rounds = [max(each[k] for each in steps_of if k < len(each)) for k in range(max(map(len, steps_of)))]
    assert len(said) == 10 and len(rounds) > 3
    assert num_steps == max(map(sum, steps_of)) < sum(rounds)
    assert told[-1] == (10, 10, sum(len(tokens) for each in said.values() for tokens in each))


def test_a_draw_does_not_depend_on_what_is_played_beside_it() -> None:
    together, alone = played(range(4))[0], played([2])[0]
    assert [tokens.tolist() for tokens in together["e2"]] == [tokens.tolist() for tokens in alone["e2"]]


def test_the_first_episodes_end_while_the_last_have_not_begun() -> None:
    freely, windowed = played(range(10))[0], played(range(10), most_open=3)
    said, _, told = windowed
    assert {name: [t.tolist() for t in each] for name, each in said.items()} == {
        name: [t.tolist() for t in each] for name, each in freely.items()
    }
    assert told[-1][:2] == (10, 10)
    assert begins_in_turn(said) and not begins_in_turn(freely)


def begins_in_turn(said: Mapping[str, object]) -> bool:
    """With three open at a time the i-th begins, and so ends, when i - 2 have ended."""
    return all(place >= int(name[1:]) - 2 for place, name in enumerate(said))
