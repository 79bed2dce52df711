"""Two and four gloo processes, each with a shard of the vocabulary, against one with all of it."""

import pytest
from vocab_parallel import CASES, assert_shards_equal_the_whole, run_ranks

TOKENS, CHUNK = 30, 8


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def of_ranks(request, tmp_path_factory):
    return run_ranks(request.param, TOKENS, CHUNK, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_shards_equal_the_whole(name, of_ranks):
    assert_shards_equal_the_whole(name, TOKENS, of_ranks)


def test_the_gate_sums_over_the_ranks_of_a_sample(of_ranks):
    assert all(gate.tolist() == [True] for _, gate in of_ranks)
