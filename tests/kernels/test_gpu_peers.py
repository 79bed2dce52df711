"""Calls of flash-attn, PyTorch's packed attention and its grouped GEMM, and the choice between attention implementations."""

import inspect
import sys
from functools import partial

import pytest
import torch
from test_attention_varlen import choice
from test_attention_varlen import compare as compare_attention
from test_grouped_linear import by_grouped_mm
from test_grouped_linear import compare as compare_grouped_linear

from marsrl.kernels.attention_varlen import flash
from marsrl.kernels.attention_varlen.reference import attention_varlen_reference

# Arguments of each release's function. tests/install/test_locks.py compares those of the locked version 4 with its wheel.
BOUNDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash2": f"q, k, v, {BOUNDS}, dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False",
    "flash3": f"q, k, v, {BOUNDS}, softmax_scale=None, causal=False, deterministic=False",
    "flash4": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, "
    "causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False",
}
VERSIONS = {each.name: each for each in (flash.FLASH_4, flash.FLASH_3, flash.FLASH_2)}


@pytest.fixture
def install(monkeypatch, tmp_path):
    """install("flash4") makes a stand-in for this version importable.

    Its function passes its arguments to the module's `run`, which a test may set.
    """

    def clear():
        for cached in (flash._is_installed, flash._function):
            cached.cache_clear()
        for name in [name for name in sys.modules if name.startswith("flash_attn")]:
            del sys.modules[name]

    def lay(name):
        file = tmp_path / (VERSIONS[name].module.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def flash_attn_varlen_func({SIGNATURES[name]}):\n    return run(locals())\n")
        clear()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    clear()
    yield lay
    clear()


def as_ours(run):
    """Return a function that calls an implementation with the arguments of attention_varlen."""

    def attention(q, k, v, cu_seqlens, *, cu_seqlens_k, causal, scale, **options):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        keys = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        return run(q, k, v, cu_seqlens, keys, scale, causal, **options)

    return attention


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_calls_of_flash_attn_match_our_attention(name, deterministic, install):
    """deterministic=True is passed only if requested, because its buffers take gigabytes."""
    install(name)
    version = VERSIONS[name]
    asked = []

    def run(given):
        asked.append(given["deterministic"])
        bounds = given["cu_seqlens_q"], given["cu_seqlens_k"]
        assert all(each.dtype == torch.int32 for each in bounds)
        # The longest sequence's number of tokens, not the batch's; computed on the host.
        assert given["max_seqlen_q"] == given["max_seqlen_k"] == 5
        out = attention_varlen_reference(
            given["q"], given["k"], given["v"], *bounds, given["softmax_scale"], given["causal"]
        )
        return out if name == "flash2" else (out, None)  # newer versions also return the log-sum-exp

    sys.modules[flash._function(version.module).__module__].run = run
    attend = partial(flash.attention_varlen_flash, version, max_seqlen=5, deterministic=deterministic)
    compare_attention([5, 0, 3], attention=as_ours(attend))
    compare_attention([2, 4], [5, 4], attention=as_ours(attend))
    assert set(asked) == {deterministic}


def test_calls_of_torch_varlen_attn_match_our_attention(monkeypatch):
    from torch.nn.attention import varlen

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert (max_q, max_k, enable_gqa) == (5, 5, query.shape[1] != key.shape[1])
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        return attention_varlen_reference(query, key, value, cu_seq_q, cu_seq_k, scale, window_size == (-1, 0))

    words = inspect.signature(varlen.varlen_attn).parameters
    assert {"scale", "window_size", "enable_gqa"} <= words.keys()
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    attend = as_ours(partial(flash.attention_varlen_torch, max_seqlen=5))
    compare_attention([5, 0, 3], attention=attend)
    compare_attention([2, 4], [5, 4], causal=False, attention=attend)


@pytest.mark.parametrize(
    ("installed", "major", "wanted", "chosen"),
    [
        (["flash4", "flash3", "flash2"], 9, {}, "flash4"),
        (["flash3", "flash2"], 9, {}, "flash3"),
        (["flash4", "flash3", "flash2"], 8, {}, "flash2"),
        (["flash3"], 8, {}, "torch"),
        (["flash4"], 10, {}, "flash4"),
        ([], 9, {}, "torch"),
        ([], 8, {}, "torch"),
        (["flash4", "flash3", "flash2"], 9, {"dtype": torch.float32}, "triton"),
        (["flash4", "flash3"], 9, {"head_size": 192}, "flash4"),
        (["flash4", "flash2"], 10, {"head_size": 192}, "flash2"),
        (["flash4"], 10, {"head_size": 256}, "flash4"),
        (["flash4", "flash3"], 9, {"deterministic": True}, "flash4"),
        ([], 9, {"deterministic": True}, "triton"),
        (["flash2"], 7, {}, "triton"),
        (["flash4", "flash3", "flash2"], 9, {"device": "cpu"}, "cpu"),
    ],
)
def test_the_fastest_attention_that_can_serve_is_chosen(installed, major, wanted, chosen, install, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    for name in installed:
        install(name)
    asked = {"device": "cuda", "dtype": torch.bfloat16, "head_size": 128, **wanted}
    found = choice(asked.pop("device"), asked.pop("dtype"), asked.pop("head_size"), **asked)
    assert found.chosen == chosen, found.reasons
    assert all(found.reasons.values()) and set(found.reasons) | {chosen} == {
        "flash4", "flash3", "flash2", "torch", "triton", "cpu", "reference"
    }  # fmt: skip


def test_calls_of_grouped_mm_match_our_grouped_linear():
    compare_grouped_linear([3, 0, 5], 16, 8, torch.bfloat16, given=[3, 0, 5], function=by_grouped_mm)
