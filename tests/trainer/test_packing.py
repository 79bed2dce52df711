"""How a step is split into mini-batches, and these into micro-batches. Mini-batches have whole groups, have every token once, and
depend only on the seed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from letters import group_of as group

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.types import Finish, Group, Turn
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.mini_batches import Average, mini_batches
from marsrl.trainer.data.packing import TrainSequence, pack, plan_micro_batches


def sequence(
    prompt: list[int], completion: list[int], *, sampled: list[bool] | None = None, **kwargs: object
) -> TrainSequence:
    n = len(completion)
    defaults: dict[str, object] = {
        "uid": "s",
        "prompt_ids": np.array(prompt, np.int32),
        "token_ids": np.array(completion, np.int32),
        "is_sampled": np.array(sampled if sampled is not None else [True] * n, bool),
        "rollout_logprobs": -np.arange(1, n + 1, dtype=np.float32),
        "advantage": 1.0,
        "agent": 0,
        "temperature": 1.0,
    }
    return TrainSequence(**{**defaults, **kwargs})  # type: ignore[arg-type]


def test_values_of_a_sequence_are_packed_at_its_positions() -> None:
    first = sequence([1, 2], [3, 4], uid="a", advantage=-0.5, agent=2, is_positive=True, sampled=[True, False])
    second = sequence([5], [6, 7, 8], uid="b", advantage=2.0, agent=1)
    third = sequence([9], [9], uid="c", is_positive=True, advantage=np.float64(1))
    batch = pack([first, second, third], align=4)
    assert batch.uids == ("a", "b", "c") and batch.num_tokens == 12
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 12] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 4
    assert batch.advantages.dtype == pack([sequence([1], [2], advantage=3)]).advantages.dtype == torch.float32
    assert batch.advantages.tolist() == [-0.5, 2.0, 1.0] and batch.agent_of.tolist() == [*batch.agents] == [2, 1, 0]
    assert batch.is_positive.tolist() == [True, False, True]
    assert batch.trained_rows.tolist() == [1, 4, 5, 6, 8]
    assert batch.positive_rows.tolist() == [1, 8]
    assert (first.num_tokens, first.num_sampled, second.num_sampled) == (4, 1, 3)
    assert pack([first, second], align=8).cu_seqlens.tolist() == [0, 4, 8]  # nothing to pad
    assert pack([third, second]).max_seqlen == 4


def kept(*places: list[int]) -> KeptTokens:
    return KeptTokens.of([np.array(ids, np.int32) for ids in places])


def test_kept_tokens_are_stored_at_the_predicting_position() -> None:
    one = sequence([1, 2], [3, 4, 5], sampled=[True, False, True], kept_tokens=kept([3, 9], [], [4, 5, 6]))
    batch = pack([one, sequence([6], [7]), sequence([8, 8, 8], [9], kept_tokens=kept([9]))], align=4)
    support = batch.support
    assert support is not None and support.most == 3 and support.ids.dtype == torch.int32
    assert support.counts.tolist() == [0, 2, 0, 3, 0, 0, 0, 0, 0, 1, 0, 0]
    ids = [support.ids[a : a + n].tolist() for a, n in zip(support.starts.tolist(), support.counts.tolist())]
    assert ids == [[], [3, 9], [], [4, 5, 6], [], [], [], [], [], [9], [], []]
    assert all(target in row for target, row in zip(batch.targets.tolist(), ids) if row)
    assert pack([sequence([1], [2])]).support is None and pack([]).support is None
    assert pack([sequence([1], [2], kept_tokens=kept([]))]).support is None


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([[3, 4], [6], [7]], "token 1 of sample s is 5, but it is not among the 1"),
        ([[5, 6], [7], [3, 4]], "token 0 of sample s is 4, but it is not among the 2"),  # an index beyond the last one
    ],
)
def test_a_token_that_its_sampler_did_not_keep_is_an_error(places: list[list[int]], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        pack([sequence([1], [4, 5, 7], kept_tokens=kept(*places))])


def test_agents_with_different_temperatures_use_one_per_token() -> None:
    batch = pack([sequence([1], [2], temperature=0.5), sequence([3], [4], temperature=1.0)])
    assert isinstance(batch.temperature, torch.Tensor)
    assert batch.temperature.tolist() == [0.5, 0.5, 1.0, 1.0]
    padded = pack([sequence([1], [2], temperature=0.5), sequence([3], [4], temperature=2.0)], align=3).temperature
    assert isinstance(padded, torch.Tensor) and padded.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0, 2.0]
    assert pack([sequence([1], [2], temperature=0.5)]).temperature == 0.5


def test_supervised_weights_stand_where_their_token_is_predicted() -> None:
    batch = pack([sequence([1, 2], [3, 4], token_advantages=np.array([0.5, 6.0], np.float32), rollout_logprobs=None)])
    assert batch.token_advantages is not None
    assert batch.token_advantages.tolist() == [0.0, 0.5, 6.0, 0.0]
    assert batch.rollout_logprobs is None
    assert pack([sequence([1], [2]), sequence([1], [2], rollout_logprobs=None)]).rollout_logprobs is None
    own = np.array([3.0], np.float32)
    mixed = pack([sequence([1], [2], advantage=0.25), sequence([1], [2], token_advantages=own)])
    assert mixed.token_advantages is not None and mixed.token_advantages.tolist() == [0.25, 0.0, 3.0, 0.0]


def test_plans_by_hand() -> None:
    # 5 + 3, 4 + 3, 2: the longest sequence first, each into the first micro-batch with room.
    assert plan_micro_batches([5, 4, 3, 3, 2], 1, 8) == [[[0, 2], [1, 3], [4]]]
    assert plan_micro_batches([2, 4, 5, 3, 3], 1, 8) == [[[2, 3], [1, 4], [0]]]
    # Two ranks need a fourth micro-batch, so the fullest (5 + 3) is split.
    assert plan_micro_batches([5, 4, 3, 3, 2], 2, 8) == [[[1, 3], [4]], [[0], [2]]]
    # If several are equally full, the first is split.
    assert plan_micro_batches([4, 4, 4, 4], 3, 8) == [[[2, 3]], [[0]], [[1]]]
    assert plan_micro_batches([8, 2, 2], 3, 8) == [[[0]], [[1]], [[2]]]  # a micro-batch of one sequence is not split
    # Every second sequence moves to the new micro-batch.
    assert plan_micro_batches([3, 2, 2, 1], 2, 8) == [[[0, 2]], [[1, 3]]]
    assert plan_micro_batches([8], 2, 8) == [[[0]], [[]]]  # a single sequence cannot be split
    assert plan_micro_batches([], 2, 8) == [[[]], [[]]] and plan_micro_batches([], 1, 8) == [[[]]]
    with pytest.raises(ValueError, match=r"101 tokens but trainer.max_tokens_per_micro_batch is 100"):
        plan_micro_batches([5, 101, 7], 1, 100)


@given(sequences=st.lists(st.tuples(st.integers(1, 100), st.sampled_from("ab")), max_size=60), ranks=st.integers(1, 5))
def test_each_sequence_is_packed_once_and_ranks_have_equal_bins(sequences: list[tuple[int, str]], ranks: int) -> None:
    lengths, kinds = [length for length, _ in sequences], [kind for _, kind in sequences]
    plan = plan_micro_batches(lengths, ranks, 100, kinds)
    assert sorted(i for rank in plan for members in rank for i in members) == list(range(len(sequences)))
    assert len({len(rank) for rank in plan}) == 1
    assert all(len({kinds[i] for i in members}) <= 1 for rank in plan for members in rank)
    assert all(sum(lengths[i] for i in members) <= 100 for rank in plan for members in rank)


def work(lengths: list[int]) -> float:
    """Return the work of linear layers plus that of causal attention; the two are equal at 16384 tokens."""
    return sum(n + n * n / 16384 for n in lengths)


@given(lengths=st.lists(st.integers(1, 65536), min_size=8, max_size=60), ranks=st.integers(2, 4))
def test_ranks_share_the_work_of_attention_evenly(lengths: list[int], ranks: int) -> None:
    """Giving the heaviest micro-batch to the least loaded rank leaves a difference of at most one micro-batch's work.

    Equal numbers of tokens are not equal work: if two sequences are long and many are short, each rank gets a long one.
    """
    uneven = [32768, 32768] + [1024] * 64
    of_ranks = plan_micro_batches(uneven, 2, 32768)
    assert [sum(uneven[i] == 32768 for members in rank for i in members) for rank in of_ranks] == [1, 1]
    plan = plan_micro_batches(lengths, ranks, 65536)
    loads = [sum(work([lengths[i] for i in members]) for members in rank) for rank in plan]
    heaviest = max(work([lengths[i] for i in members]) for rank in plan for members in rank)
    assert max(loads) - min(loads) <= heaviest * (1 + 1e-9)


AGENTS = {"solver": AgentConfig()}
GROUPS = [group(f"{i}/solver", [1, 0, 0, 1], tokens=3 + i) for i in range(6)] + [group("9/solver", [1, 1, 1, 1])]


@pytest.mark.parametrize(("number", "num_groups"), [(1, 7), (2, 7), (3, 7), (4, 2), (4, 0)])
def test_mini_batches_keep_groups_whole_and_are_never_empty(number: int, num_groups: int) -> None:
    """If any group has spread, no mini-batch is empty. In the last case, no group has spread."""
    credited = credit(GROUPS[:num_groups] or GROUPS[-1:], CreditConfig(), AGENTS)
    batches = mini_batches(credited, number, Average(), seed=0, step=1)
    assert len(batches) == (min(number, num_groups) or 1)
    assert num_groups == 0 or all(update.sequences for update in batches)
    # The zero-spread group's tokens count too, unless it is alone.
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

    # The second mini-batch also has group 9, which has no spread and so no sequences. A resumed run must split alike.
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
    """Compare each token's factor with the definition. Groups without spread count; samples without a reward do not."""
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
        assert all(sequence.weight == 1 for sequence in update.sequences)  # exactly 1, so that nothing is multiplied


@pytest.mark.parametrize("denominator", ["all", "agent"])
def test_the_samples_of_a_session_share_its_weight(denominator: Any) -> None:
    """loss.aggregation=sequence: two sessions, of three samples and of one, have equal weights, as with one sample each."""
    turns = (Turn(1, 0, 3, Finish.STOP),)
    several = replace(group("0", [1, 1, 1, 0]), agent="verifier1")
    sessions = ("0.0", "0.0", "0.0", "0.1")
    samples = (
        replace(s, uid=f"{name}/{s.uid}", turns=turns) for s, name in zip(several.samples, sessions, strict=True)
    )
    groups = [replace(several, samples=tuple(samples)), group("1", [1, 0], tokens=4)]
    credited = credit(groups, CreditConfig(), {**AGENTS, "verifier1": AgentConfig()})
    (update,) = mini_batches(credited, 1, Average("sequence", denominator), seed=0, step=1)
    num_all = 2 if denominator == "agent" else 4
    expected = [1 / (num_all * 3 * 3)] * 3 + [1 / (num_all * 3)] + [1 / (num_all * 4)] * 2
    assert [s.weight / update.normaliser for s in update.sequences] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("denominator", ["all", "agent"])
def test_a_sample_that_stands_for_several_weighs_as_many(denominator: Any) -> None:
    agents = {**AGENTS, "verifier1": AgentConfig()}
    groups = [group("0", [1, 0]), group("1", [1, 0, 1, 0], tokens=5, agent="verifier1")]
    # 2 copies of each sample of the Solver.
    credited = credit(groups, CreditConfig(balance="uniform"), agents, group_size=4)
    (update,) = mini_batches(credited, 1, Average(denominator=denominator), seed=0, step=1)
    sums = {"all": (4 * 3 + 4 * 5,) * 2, "agent": (4 * 3, 4 * 5)}[denominator]
    found = [sequence.weight / update.normaliser for sequence in update.sequences]
    assert found == pytest.approx([2 / sums[0]] * 2 + [1 / sums[1]] * 4, rel=1e-12)
