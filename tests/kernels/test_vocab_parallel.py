"""Two and four gloo processes, each with a shard of the vocabulary, against one with all of it; again in interpreter/."""

import pytest
from every_op import IS_INTERPRETED
from vocab_parallel import CASES, assert_shards_equal_the_whole, run_ranks

TOKENS, CHUNK, WORLDS = 30, 8, [2, pytest.param(4, marks=pytest.mark.slow)]
if IS_INTERPRETED:
    TOKENS, CHUNK, WORLDS = 6, 3, [2]


@pytest.fixture(scope="module", params=WORLDS)
def of_ranks(request, tmp_path_factory):
    chosen = {"MARSRL_KERNELS": "triton"} if IS_INTERPRETED else {}
    return run_ranks(request.param, TOKENS, CHUNK, tmp_path_factory.mktemp("ranks"), **chosen)


@pytest.mark.parametrize("name", CASES)
def test_shards_equal_the_whole(name, of_ranks):
    assert_shards_equal_the_whole(name, TOKENS, of_ranks)


def test_the_gate_sums_over_the_ranks_of_a_sample(of_ranks):
    assert all(gate.tolist() == [True] for _, gate in of_ranks)
