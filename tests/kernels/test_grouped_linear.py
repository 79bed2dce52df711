"""grouped_linear against autograd in float64; also in interpreter/test_ops.py."""

import pytest
import torch
from judging import judge
from torch.utils.checkpoint import checkpoint

from marsrl.kernels import grouped_linear
from marsrl.kernels.differentiable import Gradient
from marsrl.kernels.grouped_linear.reference import grouped_linear_reference
from marsrl.kernels.grouped_linear.torch_impl import TorchGroupedLinear
from marsrl.kernels.main_grad import MainGrad
from marsrl.kernels.testing import assert_accurate, off_by_an_ulp


def compare(counts, num_in, num_out, dtype, *, given, device="cpu", function=grouped_linear):
    """Compare with the definition. given: the counts as a tensor or a list, as passed to the function."""
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


def compare_main_grad(counts, num_in, num_out, dtype, *, device="cpu", function=grouped_linear):
    """Compare dW and dX of two backward passes into one main_grad, and check what Megatron's hooks see.

    The weights are [E, 2, num_out / 2, num_in].
    """
    x, upstream = (torch.randn(sum(counts), size, device=device).to(dtype) for size in (num_in, num_out))
    weights = torch.randn(len(counts), 2, num_out // 2, num_in, device=device).to(dtype).requires_grad_()
    weights.grad_added_to_main_grad = False
    placeholders = []
    weights.register_hook(placeholders.append)
    held = torch.randn(weights.shape, device=device)
    # Each expert's part is contiguous; the buffer holds other numbers between them.
    buffer = torch.zeros(len(counts), 8 + weights.shape[1:].numel(), device=device)
    main_grad, given = buffer[:, 8:].unflatten(1, weights.shape[1:]), torch.tensor(counts)
    main_grad.copy_(held)
    for _ in range(2):
        leaf, kept = x.clone().requires_grad_(), main_grad.clone()
        out = function(leaf, weights, given, main_grad=main_grad)
        assert torch.equal(main_grad, kept)  # the forward does not write it
        out.backward(upstream)
        assert leaf.grad is not None and weights.grad_added_to_main_grad is True
    assert [(each.shape, each.dtype) for each in placeholders] == [(weights.shape, dtype)] * 2

    def gradients(change):
        leaves = [change(each.detach()).requires_grad_() for each in (x, weights.flatten(1, 2))]
        of_x, of_weights = torch.autograd.grad(grouped_linear_reference(*leaves, given), leaves, change(upstream))
        return of_x, held + 2 * of_weights.view_as(held)

    results = (leaf.grad, main_grad), *map(gradients, (torch.Tensor.double, torch.clone, off_by_an_ulp))
    for name, terms, *values in zip(("x.grad", "main_grad"), (num_out, max(counts)), *results, strict=True):
        found, exact, plain, moved = values
        assert_accurate(name, found, exact, plain, moved=moved, terms=terms)
    has_no_rows = torch.tensor([count == 0 for count in counts], device=device)
    assert torch.equal(main_grad[has_no_rows], held[has_no_rows]) and not buffer[:, :8].any()


def by_grouped_mm(x, weights, counts, *, main_grad=None):
    """Compute grouped_linear with the implementation "torch", on any device."""
    buffer = None if main_grad is None else MainGrad(weights, main_grad.flatten(1, -2))
    given = TorchGroupedLinear(), x, weights.flatten(1, -2), torch.as_tensor(counts), buffer
    return Gradient("grouped_linear", num_tensors=3).node.apply(*given)


# Groups that end inside of a tile and at its end; experts without rows; K and N that no tile divides.
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 1, 7], [0, 5, 0], [0, 0, 0], [5, 0, 3, 12, 0]])
def test_dw_is_added_to_main_grad(counts, dtype, implementation):
    if implementation == "reference":
        with pytest.raises(
            RuntimeError, match="main_grad is given, but the reference computes the gradient .* by autograd"
        ):
            compare_main_grad(counts, 10, 6, dtype)
    else:
        compare_main_grad(counts, 10, 6, dtype)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_main_grad_gets_dw_once_under_activation_checkpointing(use_reentrant):
    x, weights = (torch.randn(size).requires_grad_() for size in ((5, 4), (2, 3, 4)))
    main_grad = torch.zeros(weights.shape)
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
