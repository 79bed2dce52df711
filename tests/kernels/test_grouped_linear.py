"""grouped_linear against autograd in float64; again in interpreter/test_ops.py."""

import pytest
import torch
from grouped_linear_cases import check_without_rows, compare, compare_main_grad
from torch.utils.checkpoint import checkpoint

from marsrl.kernels import grouped_linear


@pytest.fixture(params=["cpu", "reference"])
def implementation(request, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", request.param)
    return request.param


# ends inside of a tile and at its end, experts without rows; K and N that no tile divides
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 1, 7], [0, 5, 0], [0, 0, 0], [4, 4, 4], [5, 0, 3, 12, 0]])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_each_expert_sees_its_own_rows(counts, dtype, as_tensor, implementation):
    compare(counts, 10, 5, dtype, given=torch.tensor(counts) if as_tensor else counts)


def test_no_rows_and_no_expert(implementation):
    check_without_rows()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 1, 7], [0, 5, 0], [0, 0, 0], [5, 0, 3, 12, 0]])
def test_dw_is_added_to_main_grad(counts, dtype, implementation):
    if implementation == "reference":
        with pytest.raises(RuntimeError, match="main_grad is given, the reference leaves the gradient .* to autograd"):
            compare_main_grad(counts, 10, 6, dtype)
    else:
        compare_main_grad(counts, 10, 6, dtype)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_main_grad_gets_dw_once_under_activation_checkpointing(use_reentrant):
    x, weights, main_grad = (
        torch.randn(5, 4).requires_grad_(),
        torch.randn(2, 3, 4).requires_grad_(),
        torch.zeros(2, 3, 4),
    )
    weights.grad_added_to_main_grad = False

    def step(x):
        return grouped_linear(x.sin(), weights, [2, 3], main_grad=main_grad if torch.is_grad_enabled() else None).exp()

    for _ in range(2):  # micro-batches
        checkpoint(step, x, use_reentrant=use_reentrant).sum().backward()
        assert weights.grad_added_to_main_grad is True and weights.grad.shape == weights.shape
    (of_weights,) = torch.autograd.grad(grouped_linear(x.sin(), weights, [2, 3]).exp().sum(), weights)
    assert torch.equal(main_grad, 2 * of_weights)


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
    compare_main_grad(counts, 2048, 768, dtype, device="cuda")
