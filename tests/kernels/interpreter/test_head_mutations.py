"""What the tests of the heads' own products refuse: spoiled results, and tiles of the vocabulary that a kernel skips."""

import fused_head
import pytest
import torch
from small_tiles import use_small_tiles
from spoils import TILE, refuse_every_spoil, without_last_tile

from marsrl.kernels.head.first_gemm.triton_impl import Tiles, TritonFirstGemm

BF16 = torch.bfloat16
TILES = Tiles(64, 64, 32, parts=1, num_warps=4, num_stages=1, max_registers=None)


# exponentials in float32, in bfloat16
@pytest.fixture(params=["k3, entropy bonus, tis", "k3"])
def objective(request, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "linear_policy_loss=triton_gemm")
    use_small_tiles(monkeypatch, TILES)
    return request.param


def comparison(objective):
    """Logits of about 1, no token sure of its target: bfloat16 in plain PyTorch is then as exact as it gets."""
    case = torch.randn(64, 32), torch.randn(128, 32) * 0.1, torch.randint(0, 128 - TILE, (64,))
    arguments = fused_head.arguments_for(case, objective)
    return lambda dtype: fused_head.compare_policy_loss(case, arguments, dtype)


def test_every_spoiled_result_is_refused(objective, monkeypatch):
    refuse_every_spoil(fused_head, comparison(objective), BF16, monkeypatch)


def test_a_vocabulary_tile_that_is_skipped_is_seen(objective, monkeypatch):
    exponentials = TritonFirstGemm.exponentials
    compare = comparison(objective)

    def without_statistics(self, hidden, rows, head, out):
        return exponentials(self, hidden, rows, without_last_tile(head), out.zero_())

    def without_exponentials(self, hidden, rows, head, out):
        pieces = exponentials(self, hidden, rows, head, out)
        out[:, TILE : 2 * TILE] = 0
        return pieces

    def with_another_reference(self, hidden, rows, head, out):
        pieces = exponentials(self, hidden, rows, head, out)
        out[:, 64:128] *= 1.02
        return pieces

    for spoil in (without_statistics, without_exponentials, with_another_reference):
        monkeypatch.setattr(TritonFirstGemm, "exponentials", spoil)
        with pytest.raises(AssertionError, match="error|blocks"):
            compare(BF16)
