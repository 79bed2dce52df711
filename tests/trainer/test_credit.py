"""Credit of groups equals results computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from letters import group_of as group
from letters import sampled as sample

from marsrl.rollout.config import AgentConfig, TeacherConfig
from marsrl.rollout.types import Finish, Group, Reward, Sample, Turn
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import (
    balanced,
    credit,
    drmas_metrics,
    masked_metrics,
    outcome_rewards,
    teacher_metrics,
)

AGENTS = {"solver": AgentConfig(), "verifier1": AgentConfig(loss_weight=0.5)}


def ended(groups: list[Group], *outcomes: float) -> list[Group]:
    """Return the same groups with these outcomes of their samples, in order."""
    left = iter(outcomes)
    return [replace(g, samples=tuple(replace(s, outcome=next(left)) for s in g.samples)) for g in groups]


def test_equal_rewards_train_nothing_but_count_in_denominators() -> None:
    of_tool = np.array([True, False, True])  # a tool's text trains nothing either
    groups = [group("0/solver", [1, 1, 1]), group("1/solver", [1, math.nan, 0], is_sampled=of_tool)]
    credited = credit(groups, CreditConfig(), AGENTS)
    assert [s.uid for s in credited.sequences] == ["1/solver:0", "1/solver:2"]
    assert [s.advantage for s in credited.sequences] == pytest.approx([1, -1], rel=1e-5)
    assert credited.num_tokens == 9 + 4 and "1/solver:1" not in credited.advantages
    assert credited.sequences[0].num_sampled == 2
    assert credit(groups, CreditConfig(count_zero_groups=False), AGENTS).num_tokens == 4


def trajectories(*rewards: list[float], instance: str = "0") -> list[Group]:
    """Return the Solver's and the Verifier's group of trajectories solver -> verifier -> solver ..., given by their rewards."""
    calls: dict[str, list[Sample]] = {"solver": [], "verifier1": []}
    for episode, each in enumerate(rewards):
        for place, reward in enumerate(each):
            agent = ("solver", "verifier1")[place % 2]
            uid = f"{instance}.{episode}/{agent}#{place}:0"
            calls[agent].append(sample(uid, reward, agent=agent, rollout_id=instance, group_id=f"{instance}/{agent}"))
    return [Group(f"{instance}/{agent}", instance, agent, tuple(samples)) for agent, samples in calls.items()]


SHARED = {"solver": AgentConfig(), "verifier1": AgentConfig()}


@pytest.mark.parametrize(
    ("normalise", "std", "right", "wrong"),
    [
        ("trajectory", "unbiased", 0.54, -1.62),  # the code published with Dr. MAS, without group_by_agent_id
        ("trajectory", "biased", 0.58, -1.73),
        ("global", "unbiased", 0.69, -1.37),
        ("global", "biased", 0.71, -1.41),
    ],
)
def test_the_published_baseline_counts_each_trajectory_once(
    normalise: Any, std: Any, right: float, wrong: float
) -> None:
    """Dr. MAS's math team: 6 trajectories of 2 calls (solution, approval), 2 of 3 calls (solution, rejection, new solution)."""
    groups = trajectories(*[[1, 1]] * 6, *[[0, 0, 0]] * 2)
    found = credit(groups, CreditConfig(normalise=normalise, std=std), SHARED).advantages
    assert len(found) == 6 * 2 + 2 * 3
    for uid, advantage in found.items():
        is_right = int(uid.partition("/")[0].partition(".")[2]) < 6
        assert advantage == pytest.approx(right if is_right else wrong, abs=0.006), uid


def test_std_none_compares_with_the_other_samples_undivided() -> None:
    groups = [group("0/solver", [1, 0, 0, 0]), group("1/solver", [0.5, 0.5]), group("2/solver", [1])]
    credited = credit(groups, CreditConfig(std="none"), SHARED)
    assert list(credited.advantages.values()) == pytest.approx([1, *[-1 / 3] * 3, 0, 0, 0])
    assert {s.uid for s in credited.sequences} == {f"0/solver:{i}" for i in range(4)}
    # Dr. GRPO's advantages, R - mean of all, multiplied by 4 / 3.
    assert [s.advantage * 3 / 4 for s in credited.sequences] == pytest.approx([0.75, *[-0.25] * 3])


@pytest.mark.parametrize(("normalise", "same"), [("agent_mean", "agent"), ("agent_std", "global")])
def test_std_none_refuses_a_std_of_other_samples(normalise: Any, same: str) -> None:
    with pytest.raises(ValueError, match=f"credit.normalise={normalise} .* set credit.normalise={same}"):
        CreditConfig(normalise=normalise, std="none")


def test_a_step_compares_an_agents_samples_of_all_problems() -> None:
    """Each problem has one sample. The mean leaves out rewards of the other agent, and missing rewards."""
    groups = [group("0/solver", [1]), group("1/solver", [0]), group("2/solver", [0.5]), group("3/solver", [math.nan])]
    groups += [group("0/verifier1", [7], agent="verifier1"), group("1/verifier1", [7], agent="verifier1")]
    found = credit(groups, CreditConfig(normalise="step", std="none"), SHARED).advantages
    assert [found[f"{i}/solver:0"] for i in range(3)] == pytest.approx([0.75, -0.75, 0])
    assert [found[f"{i}/verifier1:0"] for i in range(2)] == [0, 0] and len(found) == 5
    divided = credit(groups, CreditConfig(normalise="step"), SHARED).advantages
    assert divided["0/solver:0"] == pytest.approx(0.5 / math.sqrt(1 / 6), rel=1e-4)
    assert credit(groups[:1], CreditConfig(normalise="step", std="none"), SHARED).advantages == {"0/solver:0": 0}


def test_a_step_counts_a_session_once_and_not_its_own_reward() -> None:
    one, other = of_sessions([3, 1], [0]), of_sessions([-1])
    other = replace(other, samples=tuple(replace(s, uid="1.0/solver#0:0", rollout_id="1") for s in other.samples))
    found = credit([one, other], CreditConfig(normalise="step", std="none"), SHARED).advantages
    assert found["0.0/solver#0:0"] == pytest.approx(3 - -0.5) and found["0.0/solver#1:0"] == pytest.approx(1 - -0.5)
    assert found["0.1/solver#0:0"] == pytest.approx(0 - (2 - 1) / 2)


def test_calls_of_a_trajectory_share_one_advantage() -> None:
    # Mean rewards of the trajectories: 1, 1/2, 0 (its only known reward), and unknown. The second problem's trajectories are a
    # separate set.
    groups = trajectories([1, 1], [1, 0], [0, math.nan], [math.nan, math.nan])
    groups += trajectories([5, 5], [5, 5], instance="1")
    credited = credit(groups, CreditConfig(normalise="trajectory"), SHARED)
    std = math.sqrt(1 / 6) + 1e-6
    expected = {"0.0": 0.5 / std, "0.1": 0.0, "0.2": -0.5 / std, "1.0": 0.0, "1.1": 0.0}
    for uid, advantage in credited.advantages.items():
        assert advantage == pytest.approx(expected[uid.partition("/")[0]], abs=1e-5), uid
    assert len(credited.advantages) == 3 * 2 - 1 + 2 * 2
    assert {s.uid for s in credited.sequences} == {"0.0/solver#0:0", "0.0/verifier1#1:0", "0.2/solver#0:0"}


def of_sessions(*rewards: list[float], agent: str = "solver", program: bool = True) -> Group:
    """Return an agent's samples in one problem's sessions, with these rewards. program: False for a native team's."""
    turns = (Turn(1, 0, 3, Finish.STOP),) if program else ()
    samples = (
        sample(f"0.{i}/{agent}#{j}:0", r, agent=agent, rollout_id="0", group_id=f"0/{agent}", turns=turns)
        for i, own in enumerate(rewards)
        for j, r in enumerate(own)
    )
    return Group(f"0/{agent}", "0", agent, tuple(samples))


NORMALISE = ("group", "agent", "agent_mean", "agent_std", "global")


@pytest.mark.parametrize("normalise", NORMALISE)
def test_a_session_counts_once_however_many_samples_it_has(normalise: Any) -> None:
    """A session has several samples if, for example, a summary replaces the history after each turn."""
    rules, groups = CreditConfig(normalise=normalise), [of_sessions([1, 1, 1, 1], [0])]
    groups.append(of_sessions([0], [1, 1, 1], agent="verifier1"))
    credited = credit(groups, rules, SHARED)
    for uid, advantage in credited.advantages.items():
        is_better = ("solver" in uid) == uid.startswith("0.0")
        assert advantage == pytest.approx(1 if is_better else -1, rel=1e-5), uid
    assert len(credited.advantages) == 9


def test_a_reward_weighs_one_nth_of_its_session() -> None:
    # The sessions' means are 1/2, 0 and 1. Every reward is 1/2 from their mean, 1/2. Missing rewards do not count.
    group = of_sessions([1, 0, math.nan], [0, 0], [1], [math.nan])
    credited = credit([group], CreditConfig(), SHARED)
    std = 1 / 2
    expected = {"0#0": 1, "0#1": -1, "1#0": -1, "1#1": -1, "2#0": 1}
    found = {f"{uid[2]}{uid[10:12]}": advantage * 2 * std for uid, advantage in credited.advantages.items()}
    assert found == pytest.approx(expected, rel=1e-4)
    metrics = drmas_metrics([group])
    assert metrics["drmas/solver/mu"] == pytest.approx(0.5) and metrics["drmas/solver/sigma"] == pytest.approx(
        math.sqrt(1 / 6)
    )


def test_one_session_alone_has_no_siblings() -> None:
    alone = [of_sessions([1, 0], [math.nan])]
    assert set(credit(alone, CreditConfig(), SHARED).advantages.values()) == {0.0}
    raw = credit(alone, CreditConfig(singleton="raw"), SHARED).advantages
    assert list(raw.values()) == pytest.approx([1, 0], rel=1e-5)


def test_sessions_with_equal_means_train_their_spread() -> None:
    of_solver = credit([of_sessions([1, 0], [0.5])], CreditConfig(), SHARED).advantages
    assert list(of_solver.values()) == pytest.approx([math.sqrt(2), -math.sqrt(2), 0], rel=1e-5)


@pytest.mark.parametrize(
    ("normalise", "std"),
    [(n, std) for n in (*NORMALISE, "trajectory") for std in ("biased", "unbiased")]
    + [(n, "none") for n in ("group", "agent", "global", "trajectory")],
)
def test_with_one_sample_a_session_nothing_changes(normalise: Any, std: Any) -> None:
    rng, rules = np.random.default_rng(0), CreditConfig(normalise=normalise, std=std)
    drawn = rng.choice([0.1, 0.3, 1, math.nan, -2.7], (2, 16))
    found = []
    for is_program in (True, False):
        groups = [of_sessions(*([r] for r in own), agent=a, program=is_program) for a, own in zip(SHARED, drawn)]
        found.append(credit(groups, rules, SHARED))
    assert found[0].advantages == found[1].advantages and len(set(found[0].advantages.values())) > 3
    assert [s.advantage for s in found[0].sequences] == [s.advantage for s in found[1].sequences]


def test_policies_and_train_agents_do_not_change_comparisons() -> None:
    groups = [
        group("0/solver", [1, 1, 0]),
        group("0/solver:0/verifier1", [0, 0, 1, 0], "verifier1"),
        group("1/solver", [0, 0, 1]),
    ]
    two = {"solver": AgentConfig(policy="a"), "verifier1": AgentConfig(policy="b")}
    rules = CreditConfig(normalise="global")
    expected = credit(groups, rules, SHARED)
    found = credit(groups, rules, two)
    parts = [found.of([name]) for name in two]  # split by policy, as the training loop splits it
    assert {uid: a for part in parts for uid, a in part.advantages.items()} == expected.advantages
    assert sorted(s.uid for part in parts for s in part.sequences) == sorted(s.uid for s in expected.sequences)
    assert [part.num_tokens for part in parts] == [18, 12] and expected.num_tokens == 30
    assert {g.agent for g in parts[0].groups} == {"solver"} and len(parts[0].groups) == 2
    # If the Verifier is not trained, it stays in the Solver's baseline but is left out of everything else.
    alone = credit(groups, rules.model_copy(update={"train_agents": ("solver",)}), SHARED)
    assert alone.advantages == parts[0].advantages and alone.counted == parts[0].counted
    apart = [credit(groups[::2], rules, SHARED).advantages[uid] for uid in alone.advantages]
    assert apart != pytest.approx(list(alone.advantages.values()), abs=0.1)


def test_an_outcome_is_shared_across_policies_and_training() -> None:
    groups = [
        group("0/solver", [0, 1, 0]),
        Group("v", "0", "verifier1", (sample("v:0", 1, agent="verifier1", verdict=False, rollout_id="0"),)),
        Group("c", "0", "corrector1", (sample("c:0", 1, agent="corrector1", rollout_id="0"),)),
    ]
    agents = {"solver": AgentConfig(), "verifier1": AgentConfig(policy="b"), "corrector1": AgentConfig(policy="c")}
    rules = CreditConfig(reward_scheme="outcome", train_agents=("solver", "verifier1"), normalise="global")
    # solver:0 was corrected, so it counts 1, as do its report and correction; solver:2 is the only failure of five.
    credited = credit(ended(groups, 1, 1, 0, 1, 1), rules, agents)
    assert credited.advantages == pytest.approx(
        {"0/solver:0": 0.5, "0/solver:1": 0.5, "0/solver:2": -2.0, "v:0": 0.5}, rel=1e-4
    )
    (corrector,) = credited.of(["corrector1"]).groups
    assert [s.reward.value for s in corrector.samples] == [1]


def test_positive_means_success_before_penalties_above_baseline() -> None:
    def positive(*rewards: Reward, success: float = 1.0, keep_zero: bool = False, **rules: object) -> list[bool]:
        samples = tuple(replace(sample(f"0/solver:{i}", 0.0), reward=r) for i, r in enumerate(rewards))
        groups = [Group("0/solver", "0", "solver", samples)]
        credited = credit(groups, CreditConfig.model_validate(rules), AGENTS, success=success, keep_zero=keep_zero)
        return [s.is_positive for s in credited.sequences]

    penalised = Reward(0.9, 1.0, {"task": 1.0, "format": -0.1})
    assert positive(penalised, Reward(0.0, 0.0)) == [True, False]
    assert positive(penalised, Reward(1.0, 1.0)) == [False, True]  # right, but worse than the other
    assert positive(Reward(0.6, 0.6), Reward(0.2, 0.2)) == [False, False]
    assert positive(Reward(0.6, 0.6), Reward(0.2, 0.2), success=0.5) == [True, False]
    assert positive(Reward(1.0, 1.0), Reward(1.0, 1.0), keep_zero=True) == [False, False]


def test_a_right_verdict_with_a_failed_outcome_is_not_positive() -> None:
    # The first verdict finds the error, but the error stays; the second is a false alarm, but the result is right.
    groups = ended([group("v", [1, 0], "verifier1")], 0, 1)
    for scheme, expected in (("agentic", {"v:0"}), ("outcome", {"v:1"})):
        credited = credit(groups, CreditConfig.model_validate({"reward_scheme": scheme}), AGENTS)
        assert {s.uid for s in credited.sequences if s.is_positive} == expected


def test_outcomes_keep_only_form_penalties_and_may_be_missing() -> None:
    penalised = replace(sample("0/solver:0", 0), reward=Reward(0.8, 1.0, {"task": 1.0, "long": -0.1, "format": -0.1}))
    groups = [Group("0/solver", "0", "solver", (penalised, sample("0/solver:1", 1)))]
    first, second = (s.reward for g in outcome_rewards(ended(groups, 0.5, math.nan)) for s in g.samples)
    assert first == Reward(0.4, 0.5, {"outcome": 0.5, "format": -0.1}) and second.is_missing
    gone = replace(sample("0/solver:0", math.nan), finish=Finish.ERROR)  # its engine failed, but its episode continued
    (failed,) = outcome_rewards(ended([Group("0/solver", "0", "solver", (gone,))], 1))
    assert failed.samples[0].reward.is_missing
    (right,) = outcome_rewards(ended([group("1/solver", [0])], 1))
    assert right.samples[0].reward == Reward(1, 1, {"outcome": 1})  # no penalty is named if there is none


def test_zero_advantages_train_if_another_term_has_a_gradient() -> None:
    groups = [group("0/solver", [1, 1, math.nan]), group("1/solver", [1, 0])]
    credited = credit(groups, CreditConfig(count_zero_groups=False), AGENTS, keep_zero=True)
    assert [s.advantage != 0 for s in credited.sequences] == [False, False, True, True]
    assert credited.counted == {f"{i}/solver:{j}": 3 for i in (0, 1) for j in (0, 1)} and credited.num_tokens == 12
    plain = credit(groups, CreditConfig(count_zero_groups=False), AGENTS)
    assert set(plain.counted) == {"1/solver:0", "1/solver:1"} and set(plain.advantages) == set(credited.counted)


def variance_inflation(groups: list[Group]) -> dict[str, float]:
    """Return the metric variance_inflation by agent."""
    found = {tuple(name.split("/")): value for name, value in drmas_metrics(groups).items()}
    return {agent: value for (_, agent, name), value in found.items() if name == "variance_inflation"}


def test_variance_inflation_by_hand() -> None:
    groups = [group("0/solver", [1, 1, 0, 0]), group("0/solver:0/verifier1", [1, 1, 1, 1], "verifier1")]
    # All: mean 3/4, var 3/16; solver: var 1/4, mean 1/2 -> (1/4 + 1/16) / (3/16) = 5/3; verifier: (1/4)^2 / (3/16) = 1/3.
    assert variance_inflation(groups) == pytest.approx({"solver": 5 / 3, "verifier1": 1 / 3})
    # An easy and a hard prompt: their different means must not count as a difference between agents.
    other = [group("1/solver", [0, 0, 1, math.nan]), group("1/solver:0/verifier1", [0, 1], "verifier1")]
    # All five: mean 2/5, var 6/25; solver: var 2/9, mean 1/3 -> 51/54; verifier: var 1/4, mean 1/2 -> 13/12.
    assert variance_inflation(other) == pytest.approx({"solver": (2 / 9 + 1 / 225) * 25 / 6, "verifier1": 13 / 12})
    # The inflation is the ratio of the squared advantages with a common baseline to those with the agent's own.
    moments = {}
    for normalise in ("global", "agent"):
        found = credit(other, CreditConfig.model_validate({"normalise": normalise}), SHARED).advantages.items()
        moments[normalise] = [sum(a**2 for uid, a in found if uid[:-2].endswith(name)) for name in SHARED]
    gained = [one / own for one, own in zip(moments["global"], moments["agent"], strict=True)]
    assert gained == pytest.approx(list(variance_inflation(other).values()), rel=1e-4)
    # A prompt's weight is the agent's number of calls for it.
    assert variance_inflation([*groups, *other]) == pytest.approx(
        {"solver": (4 * 5 / 3 + 3 * 17 / 18) / 7, "verifier1": (4 / 3 + 2 * 13 / 12) / 6}
    )
    flat = [group("2/solver", [1, 1]), group("2/v", [1], "verifier1"), group("2/c", [math.nan], "corrector1")]
    assert variance_inflation([*groups, *flat]) == variance_inflation(groups)
    alone = group("3/solver", [1, 0])  # the only agent with this prompt, so the common baseline equals its own
    assert variance_inflation([*groups, alone])["solver"] == pytest.approx((20 / 3 + 2) / 6)


def test_agent_statistics_are_per_prompt_and_averaged_over_calls() -> None:
    # In the first problem, the Solver's rewards differ and the Verifier's are equal.
    groups = [group("0/solver", [1, 1, 0, 0]), group("0/v", [1, 1], "verifier1")]
    groups += [group("1/solver", [0, 0, math.nan]), group("1/v", [0], "verifier1"), group("2/solver", [math.nan])]
    found = drmas_metrics(groups)
    # Flat groups count: 4 calls with mean and deviation 1/2, 2 calls with 0; pooled, the Solver's deviation would be .471.
    expected = {"solver/mu": 4 * 0.5 / 6, "solver/sigma": 4 * 0.5 / 6, "verifier1/mu": 2 / 3, "verifier1/sigma": 0}
    assert {name: found[f"drmas/{name}"] for name in expected} == pytest.approx(expected)


def test_copies_fill_every_agent_to_the_group_size() -> None:
    groups = [
        group("0/solver", [1] * 5),
        group("0/v", [1] * 2, "verifier1"),
        group("1/solver", [0]),
        group("2/solver", [1] * 3),
    ]
    copies = balanced([s for each in groups for s in each.samples], 3, seed=0)
    found = [sorted(copies[s.uid] for s in each.samples) for each in groups]
    assert found == [[0, 0, 1, 1, 1], [1, 2], [3], [1, 1, 1]]


def test_drawn_samples_depend_on_seed_instance_and_agent_only() -> None:
    def drawn(rollout: str = "0", agent: str = "solver", seed: int = 0, step: int = 1) -> list[int]:
        samples = [sample(f"{rollout}/{agent}:{i}", 1, agent=agent) for i in range(9)]
        return [i for i in range(9) if balanced(samples[::step], 3, seed)[f"{rollout}/{agent}:{i}"]]

    # The draw must not change when a run is resumed; the order of arrival does not matter.
    assert drawn() == drawn(step=-1) == [0, 1, 4]
    assert drawn() not in (drawn("1"), drawn(agent="verifier1"), drawn(seed=1))


def test_a_balanced_step_trains_and_counts_copies() -> None:
    groups = [group("0/solver", [0, 1, 0, 1, 0]), group("0/solver:0/verifier1", [1, 0], "verifier1")]
    groups += [group("1/solver", [1, 0, 0, 1, 1])]
    rules = CreditConfig(balance="uniform")
    copies = balanced([s for g in groups for s in g.samples], 3, seed=7)
    credited = credit(groups, rules, AGENTS, group_size=3, seed=7)
    taken = [uid for uid, number in copies.items() if number]
    assert [s.uid for s in credited.sequences] == list(credited.counted) == taken and len(taken) == 3 + 2 + 3
    twice = {uid for uid, number in copies.items() if number == 2}
    assert credited.copies == dict.fromkeys(twice, 2) and len(twice) == 1  # all others are trained once
    assert credited.num_tokens == 3 * 9
    plain = credit(groups, CreditConfig(), AGENTS)
    # Balance does not change how rewards are compared.
    assert credited.advantages == plain.advantages and plain.copies == {}
    solver, verifier = credited.of(["solver"]), credited.of(["verifier1"])
    assert solver.copies == {} and solver.num_tokens == 18
    assert verifier.copies == credited.copies and verifier.num_tokens == 9


def test_a_teacher_changes_only_sampled_tokens() -> None:
    student, teacher = np.array([-1, -2, -3], np.float32), np.array([-0.5, -4, 9], np.float32)
    agents = {"solver": AgentConfig(loss_weight=0.5, teacher=TeacherConfig(policy="big", coef=2.0))}
    sampled = np.array([True, True, False])  # a tool wrote the last token
    groups = [
        group("0/solver", [1, 0], rollout_logprobs=student, is_sampled=sampled),
        group("1/solver", [1, 1], rollout_logprobs=student, is_sampled=sampled),
        group("2/solver", [math.nan, 1], rollout_logprobs=student, is_sampled=sampled),
    ]
    known = {s.uid: teacher for g in groups for s in g.samples if not s.reward.is_missing}
    credited = credit(groups, CreditConfig(), agents, teacher_logprobs=known)
    plain = credit(groups, CreditConfig(), {"solver": AgentConfig(loss_weight=0.5)})
    assert credited.advantages == plain.advantages and credited.counted == plain.counted
    assert [s.uid for s in credited.sequences] == ["0/solver:0", "0/solver:1", "1/solver:0", "1/solver:1", "2/solver:1"]
    sure, unsure = (1 - math.exp(-1)) ** 2, (1 - math.exp(-2)) ** 2
    baseline = (sure * 0.5 - unsure * 2) / (sure + unsure)
    for sequence, of_reward in zip(credited.sequences, (0.5, -0.5, 0, 0, 0), strict=True):
        assert sequence.token_advantages is not None
        of_teacher = [2 * (0.5 - baseline), 2 * (-2 - baseline)]
        assert sequence.token_advantages.tolist() == pytest.approx([*(of_reward + a for a in of_teacher), 0], abs=1e-5)
    assert [s.is_positive for s in credited.sequences] == [True, False, False, False, False]
    metrics = teacher_metrics([s for g in groups for s in g.samples], known)
    assert metrics == {"teacher/solver/kl": pytest.approx((-0.5 + 2) / 2)}


def test_a_teachers_baseline_is_of_the_agents_other_samples() -> None:
    """If a sample were in its own baseline, its tokens would lower their own advantages. A sample that cannot be compared affects
    no other sample.
    """
    agents = {name: AgentConfig(loss_weight=0, teacher=TeacherConfig(policy="big")) for name in ("solver", "verifier1")}
    student = np.full(3, -1, np.float32)
    groups = [
        group("0/solver", [1, 0, 0], rollout_logprobs=student),
        group("0/solver:0/verifier1", [1], "verifier1", rollout_logprobs=student),
    ]
    uids = [s.uid for g in groups for s in g.samples]
    differences = ([-1, -2, -3], [4, 4, 4], [math.nan, 6, 6], [1, 2, 3])
    known = {uid: student + np.array(d, np.float32) for uid, d in zip(uids, differences, strict=True)}
    sequences = credit(groups, CreditConfig(), agents, teacher_logprobs=known).sequences
    # Agents with loss_weight 0 have no positive samples.
    assert not any(s.is_positive or s.advantage for s in sequences)
    found = [s.token_advantages for s in sequences]
    baselines = ((3 * 4 + 2 * 6) / 5, (2 * 6 - 6) / 5, (3 * 4 - 6) / 6, 0)
    for advantages, own, baseline in zip(found, differences, baselines, strict=True):
        assert advantages is not None
        assert advantages.tolist() == pytest.approx([d - baseline for d in own], abs=1e-5, nan_ok=True)


def test_masked_cut_samples_stay_in_their_groups_statistics() -> None:
    cut = replace(sample("0/solver:2", 0), finish=Finish.LENGTH)
    groups = [Group("0/solver", "0", "solver", (sample("0/solver:0", 1), sample("0/solver:1", 0), cut))]
    plain = credit(groups, CreditConfig(), AGENTS)
    known = {"0/solver:2": np.full(3, -0.5, np.float32)}  # masked samples get no gradient from a teacher either
    agents = {"solver": AgentConfig(teacher=TeacherConfig(policy="big"))}
    masked = credit(groups, CreditConfig(), agents, masks_truncated=True, keep_zero=True, teacher_logprobs=known)
    assert {s.uid for s in plain.sequences} == {f"0/solver:{i}" for i in range(3)} and plain.num_tokens == 9
    expected = {uid: plain.advantages[uid] for uid in ("0/solver:0", "0/solver:1")}
    assert {s.uid: s.advantage for s in masked.sequences} == expected
    assert masked.counted == {"0/solver:0": 3, "0/solver:1": 3} and set(masked.advantages) == set(masked.counted)
    assert masked_metrics(masked) == {"response_length/solver/masked": pytest.approx(1 / 3)}
    assert masked.of(["solver"]).masked == {"0/solver:2"} and not masked.of(["verifier1"]).masked
    assert masked_metrics(plain) == {"response_length/solver/masked": 0}


def test_samples_that_are_balanced_are_those_left_by_masking() -> None:
    cut = replace(sample("0/solver:2", 0), finish=Finish.LENGTH)
    groups = [Group("0/solver", "0", "solver", (sample("0/solver:0", 1), sample("0/solver:1", 0), cut))]
    rules = CreditConfig(balance="uniform")
    credited = credit(groups, rules, AGENTS, group_size=4, masks_truncated=True)
    assert credited.copies == {"0/solver:0": 2, "0/solver:1": 2} and credited.num_tokens == 12


def test_a_step_of_masked_samples_trains_nothing() -> None:
    samples = tuple(replace(sample(f"0/solver:{i}", i), finish=Finish.LENGTH) for i in range(2))
    credited = credit([Group("0/solver", "0", "solver", samples)], CreditConfig(), AGENTS, masks_truncated=True)
    assert not credited.sequences and not credited.counted and credited.num_tokens == 0


def test_an_outcome_keeps_the_penalty_for_length() -> None:
    long = replace(sample("0/solver:0", 0), reward=Reward(0.25, 1.0, {"task": 1.0, "format": -0.5, "overlong": -0.25}))
    short = replace(sample("0/solver:1", 0), reward=Reward(1.0, 1.0, {"task": 1.0, "overlong": 0.0}))
    (group,) = outcome_rewards(ended([Group("0/solver", "0", "solver", (long, short))], 1, 0.5))
    assert group.samples[0].reward == Reward(0.25, 1.0, {"outcome": 1, "format": -0.5, "overlong": -0.25})
    assert group.samples[1].reward == Reward(0.5, 0.5, {"outcome": 0.5, "overlong": 0.0})
