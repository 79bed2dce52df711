"""How flash-attn and PyTorch's grouped GEMM are called, and when they are not."""

import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
from attention_cases import compare as compare_attention
from grouped_linear_cases import compare as compare_grouped_linear

from marsrl.kernels.attention_varlen import flash
from marsrl.kernels.attention_varlen.reference import attention_varlen_reference
from marsrl.kernels.grouped_linear import torch_impl
from marsrl.kernels.grouped_linear.counts import Counts


def install(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def flash_attn_varlen_func(
    q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, deterministic=False
):
    assert deterministic and cu_q.dtype == cu_k.dtype == torch.int32
    assert max_seqlen_q >= cu_q.diff().max() and max_seqlen_k >= cu_k.diff().max()
    return attention_varlen_reference(q, k, v, cu_q, cu_k, softmax_scale, causal)


@pytest.mark.parametrize("major, name", [(9, "flash_attn_interface"), (8, "flash_attn")])
def test_flash_attn_is_called_as_ours(major, name, monkeypatch):
    install(monkeypatch, name, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    flash._function.cache_clear()

    def attention(q, k, v, cu_seqlens, *, cu_seqlens_k, causal, scale):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        keys = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        return flash.attention_varlen_flash(q, k, v, cu_seqlens, keys, scale, causal)

    compare_attention([5, 0, 3], attention=attention)
    compare_attention([2, 4], [5, 4], attention=attention)


class Stranger:
    """As much of a CUDA tensor as the reasons look at."""

    def __init__(self, *shape, dtype=torch.bfloat16):
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cuda", 0)


def test_the_reasons_against_flash_attn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "float32" in flash.why_not_flash(Stranger(4, 2, 64, dtype=torch.float32))
    assert "head size 20" in flash.why_not_flash(Stranger(4, 2, 20))
    assert "on cpu" in flash.why_not_flash(torch.zeros(4, 2, 64))
    install(monkeypatch, "flash_attn_interface")
    assert "is for Hopper" in flash.why_not_flash(Stranger(4, 2, 64))
    install(monkeypatch, "flash_attn")
    assert flash.why_not_flash(Stranger(4, 2, 64)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in flash.machine_lacks_flash()


def test_grouped_mm_is_called_as_ours():
    def function(x, weights, counts):
        return torch_impl.grouped_linear_torch(x, weights, Counts(None, torch.tensor(counts)))

    compare_grouped_linear([3, 0, 5], 16, 8, torch.bfloat16, given=[3, 0, 5], function=function)


def test_the_reasons_against_peers_of_grouped_linear(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    known, unknown = Counts([4], None), Counts(None, torch.tensor([4]))
    why_not = torch_impl.why_not_grouped_mm
    assert why_not(Stranger(4, 16), Stranger(1, 8, 16), unknown) is None
    assert "multiples of 8" in why_not(Stranger(4, 12), Stranger(1, 8, 12), unknown)
    assert "takes bfloat16" in why_not(Stranger(4, 16, dtype=torch.float16), Stranger(1, 8, 16), unknown)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "below 9.0" in torch_impl.why_not_grouped_mm(Stranger(4, 16), Stranger(1, 8, 16), known)
