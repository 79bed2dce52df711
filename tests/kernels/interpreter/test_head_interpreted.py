"""The fused heads and the policy objective in interpreted Triton, at small sizes.

Blocks are smaller still, so that every loop runs more than once.
"""

import pytest
from test_head import *  # noqa: F403
from test_policy_loss import (  # noqa: F401
    test_clips_stop_the_gradient_and_log_ratios_are_clamped,
    test_every_objective_of_given_logprobs_equals_its_definition,
)

from marsrl.kernels.head.rows import triton_impl


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    sizes = {"BLOCK_COLUMNS": 64, "PIECE_COLUMNS": 128, "JOIN_ELEMENTS": 16, "JOIN_PIECES": 2, "BLOCK_TOKENS": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(triton_impl, name, size)
