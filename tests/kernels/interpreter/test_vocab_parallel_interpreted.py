"""Two gloo processes with a shard of the vocabulary each, with interpreted Triton kernels."""

from test_vocab_parallel import *  # noqa: F403
