"""Two gloo processes with a shard of the vocabulary each, on the interpreted Triton kernels."""

import pytest
from vocab_parallel import CASES, assert_shards_equal_the_whole, run_ranks

TOKENS, CHUNK = 6, 3


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return run_ranks(2, TOKENS, CHUNK, tmp_path_factory.mktemp("ranks"), MARSRL_KERNELS="triton")


@pytest.mark.parametrize("number", range(4), ids=[f"{name}, {real}" for name, real in CASES[:4]])
def test_shards_equal_the_whole(number, of_ranks):
    assert_shards_equal_the_whole(number, TOKENS, of_ranks)


def test_the_statistics_of_a_chunk_travel_while_the_next_is_computed(of_ranks):
    assert [rank.in_flight for rank in of_ranks] == [2, 2]


def test_shards_of_exponentials_equal_the_whole(tmp_path, monkeypatch):
    """A bfloat16 model, whose exponentials wait for the statistics of all shards."""
    kernels, cases = "linear_policy_loss=triton_gemm,linear_logprob=triton_gemm", [0, 1, 4]
    monkeypatch.setenv("MARSRL_KERNELS", kernels)
    of_ranks = run_ranks(2, TOKENS, 2, tmp_path, "bfloat16", cases, MARSRL_KERNELS=kernels)
    for place, number in enumerate(cases):
        assert_shards_equal_the_whole(number, TOKENS, of_ranks, place, "bfloat16")
    assert [rank.in_flight for rank in of_ranks] == [2, 2]
