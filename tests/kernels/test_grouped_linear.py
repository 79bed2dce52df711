"""grouped_linear: a loop of GEMMs against autograd in float64."""

import pytest
import torch
from grouped_linear_cases import check_without_rows, compare

from marsrl.kernels import grouped_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 1, 7], [0, 5, 0], [0, 0, 0], [4, 4, 4]])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_each_expert_sees_its_own_rows(counts, dtype, as_tensor):
    compare(counts, 6, 5, dtype, given=torch.tensor(counts) if as_tensor else counts)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_no_rows_and_no_expert(implementation, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    check_without_rows()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("on_device", [True, False])
def test_on_a_gpu(implementation, dtype, on_device, monkeypatch):
    if implementation == "torch" and (dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] < 9):
        pytest.skip("torch._grouped_mm takes bfloat16 on Hopper")
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    counts = [300, 0, 1, 128, 0, 907, 64, 5]
    given = torch.tensor(counts, device="cuda") if on_device else counts
    compare(counts, 2048, 768, dtype, given=given, device="cuda")


def test_frozen_weights_and_strided_rows():
    x = torch.randn(8, 6).t().requires_grad_()
    output = grouped_linear(x, torch.randn(2, 4, 8), [2, 4])
    output.sum().backward()
    assert x.grad.shape == (6, 8)


@pytest.mark.parametrize(
    "counts, message",
    [
        ([2, 3], r"tokens_per_expert is \[2, 3\], expected 2 counts that add up to 6 rows"),
        ([6], r"tokens_per_expert has shape \[1\], expected \[2\]"),
        ([7, -1], "expected 2 counts"),
        (torch.tensor([3.0, 3.0]), "tokens_per_expert has dtype float32, expected int64 or int32"),
    ],
)
def test_wrong_counts_are_named_with_what_was_expected(counts, message):
    with pytest.raises(ValueError, match="grouped_linear: .*" + message):
        grouped_linear(torch.randn(6, 8), torch.randn(2, 4, 8), counts)
