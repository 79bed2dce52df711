"""Two gloo processes with a shard of the vocabulary each, on the interpreted Triton kernels."""

import pytest
from vocab_parallel import CASES, assert_shards_equal_the_whole, run_ranks

TOKENS, CHUNK = 6, 3


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return run_ranks(2, TOKENS, CHUNK, tmp_path_factory.mktemp("ranks"), MARSRL_KERNELS="triton")


@pytest.mark.parametrize("name", CASES)
def test_shards_equal_the_whole(name, of_ranks):
    assert_shards_equal_the_whole(name, TOKENS, of_ranks)
