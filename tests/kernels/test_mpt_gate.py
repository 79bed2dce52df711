"""mpt_gate selects only positive samples with low entropy; also in interpreter/test_mpt_gate_interpreted.py."""

import pytest
import torch
from every_op import IS_INTERPRETED

from marsrl.kernels import mpt_gate


def case():
    """Return (entropy, mask, cu_seqlens) on the default device."""
    mask = torch.tensor([True, True, False, True, True, True, True, True])
    return torch.tensor([0.1, 0.2, 9.0, 0.3, 0.3, 0.0, 0.1, 0.1]), mask, torch.tensor([0, 3, 3, 5, 8])


TIERS = ["triton"] if IS_INTERPRETED else ["cpu", "reference", pytest.param("triton", marks=pytest.mark.gpu)]


@pytest.fixture(params=TIERS, autouse=True)
def implementation(request, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", request.param)
    torch.set_default_device("cuda" if request.param == "triton" and not IS_INTERPRETED else None)
    yield
    torch.set_default_device(None)  # not "cpu": this would leave a device mode active, which torch.compile traces


@pytest.mark.parametrize("poison", [9.0, torch.nan])
def test_the_gate_uses_mean_entropy_over_trained_tokens(poison):
    entropy, mask, cu_seqlens = case()
    entropy = torch.where(mask, entropy, poison)
    positive = torch.tensor([True, True, True, False])
    # Mean entropies: 0.15; none; 0.3; 0.067, but the sample is not positive.
    assert mpt_gate(entropy, mask, cu_seqlens, positive).tolist() == [True, False, False, False]
    assert mpt_gate(entropy, mask, cu_seqlens, positive, entropy_threshold=0.31).tolist() == [True, False, True, False]


@pytest.mark.smoke
def test_the_batch_is_gated_as_one():
    arguments = case()
    positive = torch.tensor([True, True, False, True])  # mean over the seven tokens: 1.1 / 7 = 0.157
    assert mpt_gate(*arguments, positive, scope="batch").tolist() == [True, True, False, True]
    assert not mpt_gate(*arguments, positive, scope="batch", entropy_threshold=0.15).any()


def test_without_trained_tokens_nothing_is_gated():
    entropy, mask, cu_seqlens = case()
    for scope in ("sample", "batch"):
        assert not mpt_gate(entropy, mask & False, cu_seqlens, torch.ones(4, dtype=torch.bool), scope=scope).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_long_sequences_are_summed_in_double(dtype):
    lengths = torch.tensor([0, 1, 1500, 3, 0, 2600])  # lengths below and above a device's block
    cu_seqlens = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    entropy, mask = torch.rand(int(cu_seqlens[-1])).to(dtype), torch.rand(int(cu_seqlens[-1])) < 0.7
    parts = zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])
    means = torch.tensor([entropy[a:b][mask[a:b]].double().mean() for a, b in parts])
    positive = torch.ones(6, dtype=torch.bool)
    for threshold in (0.4, 0.499, 0.5, 0.501, 2.0):
        found = mpt_gate(entropy, mask, cu_seqlens, positive, entropy_threshold=threshold)
        assert found.tolist() == (means < threshold).tolist()
