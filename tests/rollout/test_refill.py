"""A step adds a problem for each group with equal rewards (without spread), and the problems of such groups rest.

Completions are scripted letters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from letters import (
    END,
    PROMPT_ENDS,
    Play,
    WeighedEngine,
    judge,
    letter_config,
    letter_problems,
    next_batch,
    submissions,
)

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.evaluation import EvaluationPlay
from marsrl.rollout.player.refill import Counting, Spread
from marsrl.rollout.player.stages import RolloutState, StepBatch
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.rewards.judge import known
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Group, Problem, Reward

Script = Callable[[DecodeRequest], list[int]]
# {pipeline: agent whose groups are counted; None: all groups of an instance}.
TEAMS = {"agentic": "solver", "trajectory": None}


def spread_of(groups: Sequence[Group]) -> Spread:
    rewards = [sample.reward for group in groups for sample in group.samples if group.agent == "solver"]
    if len({reward.value for reward in rewards if not reward.is_missing}) > 1:
        return Spread.TASK
    return Spread.UNKNOWN if any(reward.is_missing for reward in rewards) else Spread.NONE


def live(*numbers: int, lengths: Callable[[int], int] = lambda number: 9) -> Script:
    """Return a script in which only the problems with these numbers have groups with spread.

    In their groups, one Solver sample is right, and Verifiers find errors, which makes the trajectories longer. In other groups,
    no sample is right. lengths: function from a problem's number to the length of its completions.
    """

    def script(request: DecodeRequest) -> list[int]:
        number = int(request.uid[:6])
        is_right = number in numbers and request.uid.endswith(":0")
        said = f"\\boxed{{{8 - is_right}}}"
        if "verifier" in request.uid.rpartition("/")[2]:
            said = f"Verdict: {'wrong' if number in numbers else 'correct'}"
        begun = request.token_ids.tolist()[::-1].index(PROMPT_ENDS)
        return [*map(ord, ("." * lengths(number) + "\n" + said)[begun:]), END]

    return script


def refilled(pipeline: str = "agentic", orchestration: str = "solver", **refill: float) -> dict[str, Any]:
    """Return options of Play: refill, with eight problems a step and without overlap."""
    options = {"pipeline": pipeline, "prompts_per_step": 8, "overlap": 0, "refill": {"groups": 6, **refill}}
    counting = Counting(spread_of, TEAMS[pipeline])
    return {"config": letter_config(**options), "orchestration": orchestration, "counting": counting}


def counts(batch: StepBatch) -> dict[str, float]:
    return {name[7:]: value for name, value in batch.metrics.items() if name.startswith("refill/")}


def drawn_in(sent: Sequence[tuple[list[str], bool]]) -> list[list[int]]:
    """Return the numbers of the problems that begin in each submission of Solvers."""
    waves = [sorted({int(uid[:6]) for uid in uids if "/solver:" in uid and uid.count("/") == 1}) for uids, _ in sent]
    return [wave for wave in waves if wave]


@pytest.mark.parametrize("pipeline", TEAMS)
def test_dead_groups_add_problems_until_enough_are_live(pipeline: str) -> None:
    play = Play(script=live(1, 2, 3, 9, 11, 12), **refilled(pipeline))
    sent = submissions(play.pool)
    batch = next_batch(play.stages)
    assert drawn_in(sent) == [[*range(1, 9)], [9, 10, 11], [12]]
    assert [int(group.rollout_id) for group in batch.groups] == [*range(1, 13)]  # includes groups without spread
    added = [s for group in batch.groups[8:] for s in group.samples]
    expected = {"problems": 4, "live": 6, "dead": 6, "short": 0, "form_only": 0}
    assert counts(batch) == expected | {"tokens": sum(len(s.token_ids) for s in added)}
    assert batch.metrics["rollout/stages"] == 1
    play.publish(1)
    # The next step counts from 0.
    assert counts(next_batch(play.stages)) == counts(batch) | {"problems": 8, "live": 0, "dead": 16, "short": 6} | {
        "tokens": 8 * 3 * len(added[1].token_ids)
    }


@pytest.mark.parametrize(("most", "last"), [(1.25, 10), (1.375, 11)])
def test_at_the_limit_a_step_trains_the_groups_it_has(most: float, last: int) -> None:
    play = Play(script=live(1, 2, 3, 9, 10, 11), **refilled(most=most))
    batch = next_batch(play.stages)
    assert [int(group.rollout_id) for group in batch.groups] == [*range(1, last + 1)]
    assert counts(batch)["short"] == 11 - last and counts(batch)["live"] == last - 5


def test_dead_groups_go_on_to_their_verifiers() -> None:
    play = Play(script=live(1, 2, 3, 9, 10, 11), **refilled(orchestration="verifier_corrector"))
    assert {group.agent for group in next_batch(play.stages).groups} == {"solver"}  # Verifiers wait for the next stage
    sent = submissions(play.pool)
    play.publish(1)
    next_batch(play.stages)
    verified = {int(uid[:6]) for uid in sent[0][0] if uid.rpartition("/")[2].startswith("verifier1")}
    assert verified == {*range(1, 12)}


@pytest.mark.parametrize("pipeline", TEAMS)
def test_enough_live_groups_add_nothing(pipeline: str) -> None:
    batch = next_batch(Play(script=live(*range(1, 7)), **refilled(pipeline, "verifier_corrector")).stages)
    assert counts(batch)["problems"] == 0 and (counts(batch)["live"], counts(batch)["dead"]) == (6, 2)


def test_a_filling_pipeline_adds_nothing() -> None:
    options = refilled(orchestration="verifier_corrector")
    options["counting"] = Counting(lambda groups: Spread.NONE, "corrector1")  # asked in the third stage
    play = Play(script=live(*range(1, 99)), **options)
    found = []
    for version in range(1, 4):
        found.append(counts(next_batch(play.stages))["problems"])
        play.publish(version)
    assert found == [0, 0, 6]  # the added problems' Correctors are asked later, so no more are due


def unbroken(**options: Any) -> tuple[bytes, dict[str, float]]:
    batch = next_batch(Play(**options).stages)
    return encode(batch.groups), counts(batch)


@pytest.mark.parametrize("pipeline", TEAMS)
def test_a_run_killed_between_waves_makes_the_same_batch(pipeline: str) -> None:
    lengths = lambda number: (number * 7) % 23  # noqa: E731
    options = refilled(pipeline, "verifier_corrector") | {"script": live(1, 2, 3, 9, 11, 12, lengths=lengths)}
    whole = unbroken(**options)
    for num_drawn in (8, 11, 12):
        play = Play(**options)
        play.stages.want()
        while play.stages.state.num_instances < num_drawn:
            play.stages.advance(0.0)
        again = Play(state=decode(RolloutState, encode(play.stages.snapshot())), **options)
        batch = next_batch(again.stages)
        assert (encode(batch.groups), counts(batch)) == whole
        assert batch.groups[-1].rollout_id == "000012" or pipeline == "trajectory"


class OneByOne(WeighedEngine):
    """Engine whose requests finish one after the other, in the order of submission or the reverse."""

    def __init__(self, script: Script, *, is_reversed: bool) -> None:
        super().__init__(script)
        self.held: list[DecodeResult] = []
        self.place = -1 if is_reversed else 0

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        self.held += super().collect(timeout_s)
        return [self.held.pop(self.place)] if self.held else []


@pytest.mark.parametrize("pipeline", TEAMS)
def test_the_batch_does_not_depend_on_the_order_of_finishing(pipeline: str) -> None:
    options = refilled(pipeline, "verifier_corrector")
    batches = []
    for is_reversed in (False, True):
        engine = OneByOne(live(3, 6, 7, 9, 10, 12), is_reversed=is_reversed)
        batches.append(unbroken(pool=EnginePool(LocalReplicas([engine]), slots=64), **options))
    assert batches[0] == batches[1] and batches[0][1]["problems"] == 4


def test_with_overlap_a_stage_waits_for_its_added_problem() -> None:
    config = letter_config(overlap=1, refill={"groups": 2})
    slow = live(2, 3, 4, 5, lengths=lambda number: 30 if number == 5 else 2)
    play = Play(config, script=slow, counting=Counting(spread_of, "solver"), orchestration="solver")
    play.stages.want()
    while play.stages.state.num_instances < 5:
        play.stages.advance(0.0)
    assert play.stages.state.num_stages == 2  # the second stage is running too
    while len(play.stages.state.ready) < 2:
        play.stages.advance(0.0)
    first, second = play.stages.state.ready
    assert [int(g.rollout_id) for g in first.groups] == [1, 2]
    assert [int(g.rollout_id) for g in second.groups] == [3, 4, 5]


def test_with_overlap_each_dead_group_adds_one_problem_at_once() -> None:
    config = letter_config(overlap=1, prompts_per_step=4, refill={"groups": 4, "most": 1.5})
    engine = OneByOne(live(4), is_reversed=False)
    pool = EnginePool(LocalReplicas([engine]), slots=12)
    play = Play(config, pool=pool, counting=Counting(spread_of, "solver"), orchestration="solver")
    play.stages.want()
    num_added = []
    while len(play.stages.state.closed) < 3:
        before = len(play.stages.state.closed)
        play.stages.advance(0.0)
        if len(play.stages.state.closed) > before:
            num_added.append(play.stages.state.num_instances - 4 * play.stages.state.num_stages)
    assert num_added == [1, 2, 2]  # problems are added up to the limit
    assert counts(next_batch(play.stages))["problems"] == 2


def test_groups_that_differ_in_form_alone_fill_no_quota() -> None:
    forms = {"000001", "000002", "000009"}
    spread = lambda groups: Spread.FORM if groups[0].rollout_id in forms else spread_of(groups)  # noqa: E731
    options = refilled() | {"counting": Counting(spread, "solver")}
    batch = next_batch(Play(script=live(*range(1, 20)), **options).stages)
    assert counts(batch)["problems"] == 0 and counts(batch)["form_only"] == 2  # the other six groups are live
    options["config"] = letter_config(prompts_per_step=8, overlap=0, refill={"groups": 8})
    batch = next_batch(Play(script=live(*range(1, 20)), **options).stages)
    found = counts(batch)
    assert (found["problems"], found["live"], found["dead"], found["form_only"]) == (3, 8, 3, 3)


def test_no_more_problems_are_added_above_max_unfinished() -> None:
    options = refilled()
    options["config"] = options["config"].model_copy(update={"segments": 2, "segment_length": 24, "max_unfinished": 4})
    long = live(lengths=lambda number: 30 * (number in (1, 2)))  # six samples are carried over
    batch = next_batch(Play(script=long, **options).stages)
    assert counts(batch)["problems"] == 0 and counts(batch)["dead"] == 6


def test_an_evaluation_draws_no_problems() -> None:
    play = Play(script=live(1, 2, 3, 9, 10, 11), **refilled())
    next_batch(play.stages)
    before, played = encode(play.stages.snapshot()), list[str]()
    play.stages.rest()
    evaluation = EvaluationPlay(
        play.stages.team, {"main": 0}, 48, Sampling(), on_end=lambda p: played.append(p.episode.id)
    )
    problem = letter_problems(60)(0)
    # None of these episodes' groups has spread.
    evaluation.add([Episode(f"{i:06d}", f"{i:06d}", problem, purpose="evaluate") for i in range(100, 108)], 0)
    evaluation.finish()
    assert sorted(played) == [f"{i:06d}" for i in range(100, 108)] and encode(play.stages.snapshot()) == before


def epochs_of(problem: str, dead: Collection[int], *, restart: bool = False, rest: int = 4) -> list[int]:
    """Return the epochs below 20 in which `problem`, one of three, is drawn. dead: epochs in which its groups have no spread."""
    epoch = 0

    def judged(judged_problem: Problem, answer: str) -> Future[Reward]:
        return (
            known(Reward(1.0, 1.0)) if judged_problem.id == problem and epoch in dead else judge(judged_problem, answer)
        )

    config = letter_config(overlap=0, prompts_per_step=1, group_size=2)
    options: dict[str, Any] = {"script": live(*range(1, 70)), "judge": judged, "orchestration": "solver"}
    options |= {"problems": 3, "counting": Counting(spread_of, "solver", rest)}
    play, drawn = Play(config, **options), list[int]()
    while True:
        # The epoch, unless `problem` rests and is passed over. Then another problem is drawn, whose groups always have spread.
        epoch = play.stages.state.num_instances // 3
        (group,) = next_batch(play.stages).groups
        number = int(group.rollout_id) - 1
        if number >= 60:
            return drawn
        assert number // 3 >= epoch
        if group.samples[0].problem_id == problem:
            drawn.append(number // 3)
        if restart:
            play = Play(config, state=decode(RolloutState, encode(play.stages.snapshot())), **options)
        play.publish(play.version + 1)


@pytest.mark.parametrize("restart", [False, True])
def test_a_dead_problem_rests_longer_until_it_has_spread(restart: bool) -> None:
    assert epochs_of("p0", range(20), restart=restart) == [0, 2, 5, 10, 15]
    assert epochs_of("p1", {0, 2, 6}, restart=restart) == [0, 2, 5, 6, *range(8, 20)]
    assert epochs_of("p1", range(20), rest=0) == [*range(20)]


@pytest.mark.parametrize(
    "spreads", [(Spread.TASK, Spread.NONE), (Spread.NONE, Spread.TASK), (Spread.NONE, Spread.NONE)]
)
def test_a_problem_rests_if_none_of_its_groups_has_spread(spreads: tuple[Spread, Spread]) -> None:
    of_groups = iter(spreads * 9)  # one problem with two solutions; a group of Verifiers reads each
    counting = Counting(lambda groups: next(of_groups), "verifier1", 4)
    config = letter_config(overlap=0, prompts_per_step=1, pipeline="trajectory")
    play = Play(config, script=live(1), problems=1, orchestration="verifier_corrector", counting=counting)
    next_batch(play.stages)
    assert bool(play.stages.state.resting) == (Spread.TASK not in spreads)


def test_problems_do_not_rest_after_a_resume_without_data_rest() -> None:
    config, options = letter_config(overlap=0, prompts_per_step=3), {"problems": 3, "orchestration": "solver"}
    play = Play(config, script=live(), counting=Counting(spread_of, "solver", 4), **options)
    next_batch(play.stages)
    state = decode(RolloutState, encode(play.stages.snapshot()))
    assert len(state.resting) == 3
    next_batch((again := Play(config, script=live(), state=state, **options)).stages)
    assert again.stages.state.num_instances == 6


def test_a_problem_without_known_rewards_does_not_rest() -> None:
    def lost(problem: Problem, answer: str) -> Future[Reward]:
        return known(Reward(float("nan"), float("nan"))) if problem.id == "p0" else known(Reward(1.0, 1.0))

    config = letter_config(overlap=0, prompts_per_step=3, refill={"groups": 1})
    play = Play(
        config, judge=lost, problems=3, orchestration="solver", script=live(), counting=Counting(spread_of, "solver", 4)
    )
    batch = next_batch(play.stages)
    resting = play.stages.state.resting
    assert set(resting) == {"p1", "p2"} and batch.metrics["data/resting"] == sum(r.left > 0 for r in resting.values())
    assert counts(batch)["dead"] == 6 and counts(batch)["short"] == 1
