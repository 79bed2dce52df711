import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marsrl.trainer.packing import TrainSequence, pack, plan_micro_batches


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


def test_the_shift_is_made_once_and_tool_text_is_not_trained() -> None:
    batch = pack([sequence([1, 2], [3, 4, 5], sampled=[True, False, True]), sequence([6], [7])])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    # position 1 (token 2) predicts 3; position 2 predicts the tool's 4; position 3 predicts 5; position 5 predicts 7
    assert batch.mask.tolist() == [False, True, False, True, False, True, False]
    assert batch.targets[batch.mask].tolist() == [3, 5, 7]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs[batch.mask].tolist() == [-1.0, -3.0, -1.0]


def test_padding_belongs_to_the_last_sequence_and_is_masked() -> None:
    batch = pack([sequence([1], [2, 3])], align=8)
    assert batch.num_tokens == 8
    assert batch.cu_seqlens.tolist() == [0, 8]
    assert batch.mask.tolist() == [True, True] + [False] * 6
    assert batch.position_ids.tolist() == list(range(8))


def test_a_rank_without_work_packs_one_masked_token() -> None:
    batch = pack([], align=4)
    assert batch.num_tokens == 4
    assert not batch.mask.any()
    assert batch.advantages.tolist() == [0.0]


def test_agents_with_different_temperatures_get_a_temperature_a_token() -> None:
    batch = pack([sequence([1], [2], temperature=0.5), sequence([3], [4], temperature=1.0)])
    assert isinstance(batch.temperature, torch.Tensor)
    assert batch.temperature.tolist() == [0.5, 0.5, 1.0, 1.0]
    assert pack([sequence([1], [2], temperature=0.5)]).temperature == 0.5


def test_supervised_weights_stand_where_their_token_is_predicted() -> None:
    batch = pack([sequence([1, 2], [3, 4], token_weights=np.array([0.5, 6.0], np.float32), rollout_logprobs=None)])
    assert batch.token_advantages is not None
    assert batch.token_advantages.tolist() == [0.0, 0.5, 6.0, 0.0]
    assert batch.rollout_logprobs is None


lengths_of = st.lists(st.integers(1, 100), max_size=60)


@given(lengths=lengths_of, ranks=st.integers(1, 5))
def test_every_sequence_is_in_one_micro_batch_and_ranks_have_equally_many(lengths: list[int], ranks: int) -> None:
    plan = plan_micro_batches(lengths, ranks, max_tokens=100)
    placed = sorted(i for rank in plan for members in rank for i in members)
    assert placed == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    assert all(sum(lengths[i] for i in members) <= 100 for rank in plan for members in rank)


@given(lengths=st.lists(st.integers(1, 100), min_size=8, max_size=60))
def test_ranks_share_the_tokens_evenly(lengths: list[int]) -> None:
    """No rank holds more than the lightest plus one full micro-batch."""
    loads = [sum(lengths[i] for members in rank for i in members) for rank in plan_micro_batches(lengths, 2, 100)]
    assert max(loads) - min(loads) <= 100


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60))
def test_first_fit_decreasing_stays_within_its_bound(lengths: list[int]) -> None:
    """FFD uses at most 11/9 OPT + 6/9 bins (Dosa 2007), and OPT is at least the total over the bin size."""
    num_bins = len(plan_micro_batches(lengths, 1, 100)[0])
    larger_than_half = sum(length > 50 for length in lengths)
    optimum_at_most = max(
        1, 2 * -(-sum(lengths) // 100), larger_than_half
    )  # next-fit needs no more than twice the total
    assert num_bins <= 11 / 9 * optimum_at_most + 6 / 9


def test_a_sequence_that_fits_no_micro_batch_says_which_setting_to_raise() -> None:
    with pytest.raises(ValueError, match=r"101 tokens but trainer.max_tokens_per_micro_batch is 100"):
        plan_micro_batches([101], 1, 100)


def work(lengths: list[int]) -> float:
    """Linear layers and causal attention, which weigh the same at 16384 tokens."""
    return sum(n + n * n / 16384 for n in lengths)


@given(lengths=st.lists(st.integers(1, 65536), min_size=8, max_size=60), ranks=st.integers(2, 4))
def test_ranks_share_the_work_of_attention_evenly(lengths: list[int], ranks: int) -> None:
    """Dealing the heaviest micro-batch to the lightest rank leaves at most one micro-batch's work between them."""
    plan = plan_micro_batches(lengths, ranks, 65536)
    loads = [sum(work([lengths[i] for i in members]) for members in rank) for rank in plan]
    heaviest = max(work([lengths[i] for i in members]) for rank in plan for members in rank)
    assert max(loads) - min(loads) <= heaviest * (1 + 1e-9)


def test_equal_tokens_are_not_equal_work() -> None:
    """Two long sequences and many short ones, equally many tokens a micro-batch: each rank gets one of the long ones."""
    lengths = [32768, 32768] + [1024] * 64
    plan = plan_micro_batches(lengths, 2, 32768)
    assert [sum(lengths[i] == 32768 for members in rank for i in members) for rank in plan] == [1, 1]
