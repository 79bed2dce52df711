"""grouped_linear against autograd in float64; again in interpreter/test_ops.py."""

import pytest
import torch
from judging import judge

from marsrl.kernels import grouped_linear
from marsrl.kernels.grouped_linear.reference import grouped_linear_reference


def compare(counts, num_in, num_out, dtype, *, given, device="cpu", function=grouped_linear):
    """given: the counts as the function gets them."""
    x = torch.randn(sum(counts), num_in, device=device).to(dtype)
    weights = torch.randn(len(counts), num_out, num_in, device=device).to(dtype)
    judge(
        ("output", "x.grad", "weights.grad"),
        lambda x, w: function(x, w, given),
        lambda x, w: grouped_linear_reference(x, w, torch.tensor(counts)),
        (x, weights),
        [torch.randn(sum(counts), num_out, dtype=torch.float64, device=device)],
        terms=(num_in, num_out, max(counts)),
    )


# ends inside of a tile and at its end, experts without rows; K and N that no tile divides
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 1, 7], [0, 5, 0], [0, 0, 0], [4, 4, 4], [5, 0, 3, 12, 0]])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_each_expert_sees_its_own_rows(counts, dtype, as_tensor, implementation):
    compare(counts, 10, 5, dtype, given=torch.tensor(counts) if as_tensor else counts)


def test_no_rows_and_no_expert(implementation):
    for num_experts in (2, 0):
        x, weights = torch.randn(0, 8, requires_grad=True), torch.randn(num_experts, 4, 8, requires_grad=True)
        grouped_linear(x, weights, [0] * num_experts).sum().backward()
        assert x.grad.shape == (0, 8) and not weights.grad.any()


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
