"""A step cut into mini-batches: whole groups, every token once, the same cut from the same seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from letters import group_of as group

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import Group
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.mini_batches import Average, mini_batches

AGENTS = {"solver": AgentConfig()}


GROUPS = [group(f"{i}/solver", [1, 0, 0, 1], tokens=3 + i) for i in range(6)] + [group("9/solver", [1, 1, 1, 1])]


@pytest.mark.parametrize(("number", "num_groups"), [(1, 7), (2, 7), (3, 7), (4, 2), (4, 0)])
def test_groups_stay_whole_nothing_is_lost_and_no_update_is_empty(number: int, num_groups: int) -> None:
    """Where any group has a spread: the last has none."""
    credited = credit(GROUPS[:num_groups] or GROUPS[-1:], CreditConfig(), AGENTS)
    batches = mini_batches(credited, number, Average(), seed=0, step=1)
    assert len(batches) == (min(number, num_groups) or 1)
    assert num_groups == 0 or all(update.sequences for update in batches)
    # of the zero-spread group too, but not where it is alone
    assert sum(update.normaliser for update in batches) == (credited.num_tokens if num_groups else 0)
    assert sorted(s.uid for each in batches for s in each.sequences) == sorted(s.uid for s in credited.sequences)
    of_group: dict[str, set[int]] = {}
    for i, update in enumerate(batches):
        for sequence in update.sequences:
            of_group.setdefault(sequence.uid.rpartition(":")[0], set()).add(i)
    assert all(len(places) == 1 for places in of_group.values())
    sizes = [len(update.sequences) for update in batches]
    assert max(sizes) - min(sizes) <= 8  # two groups of four


def test_the_cut_follows_seed_and_step_alone() -> None:
    def cut(seed: int, step: int, groups: list[Group] = GROUPS) -> list[list[str]]:
        batches = mini_batches(credit(groups, CreditConfig(), AGENTS), 3, Average(), seed=seed, step=step)
        return [sorted({s.uid[0] for s in update.sequences}) for update in batches]

    # the group beside "2" has no spread; no other cut tomorrow, or a run that goes on would train otherwise
    assert cut(0, 1) == cut(0, 1, GROUPS[::-1]) == [["0", "3", "4"], ["2"], ["1", "5"]]
    assert cut(0, 1) != cut(0, 2) and cut(0, 1) != cut(1, 1)


def test_mini_batches_share_what_is_counted() -> None:
    without_spread = [group(f"{i}/solver", [1, 1, 1, 1]) for i in range(6)]
    groups = [*without_spread, group("6/solver", [1, 0]), group("7/solver", [1, 0]), group("8/solver", [1, 0])]
    credited = credit(groups, CreditConfig(count_zero_groups=False), AGENTS)
    for step in range(9):
        updates = mini_batches(credited, 3, Average(), seed=0, step=step)
        assert [(len(update.sequences), update.normaliser) for update in updates] == [(2, 6)] * 3


@pytest.mark.parametrize("denominator", ["all", "agent"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum_constant"])
def test_denominators_are_those_of_the_formula(aggregation: str, denominator: str) -> None:
    """The factor on each token against the definition over lists; groups without spread count, missing rewards do not."""
    agents = {"solver": AgentConfig(), "verifier1": AgentConfig()}
    groups = [
        group("0", [1, 0], tokens=4),
        group("1", [1, 0, math.nan], tokens=7),
        group("2", [1, 1], tokens=5),
        group("3", [0, 1], tokens=2, agent="verifier1"),
        group("4", [0, 1], tokens=0, agent="verifier1"),
    ]
    average = Average(aggregation, denominator, max_tokens=9)  # type: ignore[arg-type]
    (update,) = mini_batches(credit(groups, CreditConfig(), agents), 1, average, seed=0, step=1)
    counted = [(s.agent, len(s.token_ids)) for g in groups for s in g.samples if not s.reward.is_missing]
    for sequence in update.sequences:
        agent, length = list(agents)[sequence.agent], sequence.num_tokens - 2
        rivals = [n for name, n in counted if denominator == "all" or name == agent]
        expected = {
            "token": 1 / sum(rivals),
            "sequence": 1 / (len(rivals) * max(1, length)),
            "sequence_sum_constant": 1 / (len(rivals) * 9),
        }
        assert sequence.weight / update.normaliser == pytest.approx(expected[aggregation], rel=1e-12)
    if (aggregation, denominator) in (("token", "all"), ("sequence_sum_constant", "all")):
        assert all(sequence.weight == 1 for sequence in update.sequences)  # nothing is multiplied


@pytest.mark.parametrize("denominator", ["all", "agent"])
def test_a_sample_that_stands_for_several_weighs_as_many(denominator: Any) -> None:
    agents = {**AGENTS, "verifier1": AgentConfig()}
    groups = [group("0", [1, 0]), group("1", [1, 0, 1, 0], tokens=5, agent="verifier1")]
    credited = credit(groups, CreditConfig(balance="uniform"), agents, group_size=4)  # 2 copies of each of the Solver's
    (update,) = mini_batches(credited, 1, Average(denominator=denominator), seed=0, step=1)
    sums = {"all": (4 * 3 + 4 * 5,) * 2, "agent": (4 * 3, 4 * 5)}[denominator]
    found = [sequence.weight / update.normaliser for sequence in update.sequences]
    assert found == pytest.approx([2 / sums[0]] * 2 + [1 / sums[1]] * 4, rel=1e-12)
