"""attention_decode: one query a sequence over a padded cache."""

import pytest
import torch
from decode_cases import compare

from marsrl.kernels import attention_decode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
def test_each_row_sees_its_own_keys(implementation, heads, dtype, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    compare([7, 1, 16, 12], 16, heads, 8, dtype, scale=0.6)
    compare([64, 65, 150, 3], 160, heads, 40, dtype)  # around the C++ block of 64 keys


@pytest.mark.parametrize("implementation", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("scale", [-0.6, 0.0])
def test_any_finite_scale_is_served(scale, implementation, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    compare([7, 1, 16, 12], 16, (4, 2), 8, scale=scale)


def test_several_threads_change_nothing(monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "cpu")
    q, cache = torch.randn(16, 4, 64), torch.randn(16, 40, 2, 64)
    lengths = torch.randint(1, 41, (16,))
    one = attention_decode(q, cache, cache, lengths)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(one, attention_decode(q, cache, cache, lengths))


def test_the_cpu_reads_nothing_behind_a_length(monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "cpu")
    q, cache = torch.randn(2, 4, 8), torch.randn(2, 9, 2, 8)
    cache[0, 3:] = torch.nan
    assert attention_decode(q, cache, cache, torch.tensor([3, 9])).isfinite().all()


def test_float16_is_left_to_pytorch():
    compare([7, 3], 8, (4, 2), 8, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [64, 128])
def test_on_a_gpu(head_size, dtype, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    compare([3000, 1, 511, 512, 513, 77], 4096, (16, 8), head_size, dtype, device="cuda")
    compare([700, 64], 700, (14, 2), head_size, dtype, device="cuda")  # seven heads a key head


def test_what_stands_behind_a_length_does_not_count():
    q, cache = torch.randn(2, 4, 8), torch.randn(2, 9, 2, 8)
    lengths = torch.tensor([3, 9])
    changed = cache.clone()
    changed[0, 3:] = 1e4
    assert torch.equal(attention_decode(q, cache, cache, lengths), attention_decode(q, changed, changed, lengths))


def test_no_sequences():
    assert attention_decode(
        torch.zeros(0, 4, 8), *[torch.zeros(0, 5, 2, 8)] * 2, torch.zeros(0, dtype=torch.int64)
    ).shape == (0, 4, 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k_cache": torch.zeros(3, 5, 2, 8)}, r"k_cache has shape \[3, 5, 2, 8\], expected \[2, any, any, 8\]"),
        ({"v_cache": torch.zeros(2, 6, 2, 8)}, r"v_cache has shape \[2, 6, 2, 8\], expected \[2, 5, 2, 8\]"),
        (
            {"k_cache": torch.zeros(2, 5, 3, 8), "v_cache": torch.zeros(2, 5, 3, 8)},
            "3 heads, expected a divisor of q's 4",
        ),
        ({"lengths": torch.tensor([0, 3])}, r"lengths lie in 0..3, expected 1..5"),
        ({"lengths": torch.tensor([1, 6])}, r"lengths lie in 1..6, expected 1..5"),
        ({"lengths": torch.ones(2)}, "lengths has dtype float32, expected int64 or int32"),
        ({"scale": float("nan")}, "scale is nan, expected a finite number or None"),
        ({"q": torch.zeros(2, 4, 8, requires_grad=True)}, "requires a gradient, expected a call under torch.no_grad"),
    ],
)
def test_wrong_arguments_are_named_with_what_was_expected(change, message):
    arguments = {
        "q": torch.zeros(2, 4, 8),
        "k_cache": torch.zeros(2, 5, 2, 8),
        "v_cache": torch.zeros(2, 5, 2, 8),
        "lengths": torch.tensor([5, 1]),
    }
    with pytest.raises(ValueError, match="attention_decode: .*" + message):
        attention_decode(**{**arguments, **change})
