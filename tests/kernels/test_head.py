"""The fused heads by csrc/cpu, which makes dz of float32 models in place of logits and takes a bfloat16 one tile by tile."""

import pytest
import torch
from fused_head import arguments_for, chunks_of, head_case, run_policy_loss, with_exact_logits
from head_tests import BF16, FP32, HeadTests, Tier

from marsrl.kernels.head import gemms

# one row; around a chunk; odd vocabularies; two blocks of 4096 columns; more rows than a grid axis has programs
SHAPES = (
    *((1, 9, 5), (15, 9, 33), (26, 12, 4099), (513, 8, 64), (3, 4, 152063), (3, 4, 151936), (65537, 2, 5)),
)  # fmt: skip


class TestHead(HeadTests):
    @pytest.fixture(params=[FP32, BF16], ids=["float32", "bfloat16"])
    def tier(self, request, monkeypatch):
        monkeypatch.setattr(gemms, "HOST_TILE_ROWS", 50)
        return Tier("cpu", request.param, (60, 16, 131), SHAPES, lambda rows, patch, vocab: chunks_of(rows, patch))


@pytest.mark.parametrize("name", ["clip", "sequence ratio", "entropy bonus"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_number_of_threads_is_not_seen(dtype, name):
    case = with_exact_logits(head_case(20, 8, 8197))  # above the size that one thread keeps for itself
    arguments, threads, found = arguments_for(case, name), torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            result, *_ = run_policy_loss(case, arguments, dtype)
            found.append([result.loss, result.logprobs, result.entropy, result.coefficient])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))
