"""Every op in each CPU implementation: memory layouts, defaults of the process, non-finite numbers, refused arguments.

interpreter/test_every_op.py runs most of these tests for Triton's implementations.
"""

from dataclasses import replace

import pytest
import torch
from every_op import CALLS, IS_INTERPRETED, TIERS, WITH_GRADIENTS, call, force, resized, same
from layout_cases import HEADS, OPS, check_every_layout, results, tensors_of
from nonfinite_cases import FEW, KINDS, SETTINGS, check_given_logprobs, check_logprobs, check_loss

from marsrl.kernels.attention_varlen.cpu import padded_by_length
from marsrl.kernels.head import host_memory

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

# Tests of layouts use only one call of each head if interpreted: a call takes 0.25 s, and a head has 20 tensors in 4 layouts.
NOT_LAID_OUT = (HEADS.keys() if IS_INTERPRETED else set()) - {
    "linear_logprob, float32",
    "linear_policy_loss with main_grad, bfloat16",
}
IMPLEMENTATIONS = ["triton"] if IS_INTERPRETED else ["cpu", "reference"]


@pytest.fixture
def served(name, tier, monkeypatch):
    """Make the implementation `tier` serve the op of the call `name`; return the name."""
    force(monkeypatch, name, tier)
    return name


@pytest.mark.parametrize("name, tier", [each for each in TIERS if each[0] in OPS and each[0] not in NOT_LAID_OUT])
def test_every_tensor_is_read_in_any_memory_layout(served):
    check_every_layout(served)


@pytest.mark.parametrize("name, tier", TIERS)
def test_ops_ignore_the_default_device_and_dtype(served):
    """The default device is `meta`, and the default dtype is float64.

    A tensor that an op creates without a device would have no memory; without a dtype, it would have elements of a size that the
    kernels do not expect.
    """
    expected, tensors = call(served), tensors_of(CALLS[served])
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = results(CALLS[served], tensors)
    finally:
        torch.set_default_dtype(torch.float32)
    same(found, expected)


@pytest.mark.parametrize("name, tier", TIERS)
def test_autocast_changes_nothing(served):
    """Forward and backward have the same dtypes and bits."""
    expected = call(served)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(call(served), expected)


@pytest.mark.parametrize("name, tier", WITH_GRADIENTS)
def test_an_empty_batch_has_gradients_of_zero(served):
    """A call without tokens: per-token tensors are empty, and no sequence or expert has tokens."""
    op = CALLS[served]
    tensors = resized(tensors_of(op), 0)
    leaves = [tensors[which].requires_grad_() for which in op.leaves]
    ends = [each.sum() for each in op.run(tensors) if each.requires_grad]
    assert ends
    for leaf, grad in zip(leaves, torch.autograd.grad(ends, leaves), strict=True):
        assert grad.shape == leaf.shape and not grad.any()


@pytest.mark.parametrize("name, tier", WITH_GRADIENTS)
def test_a_frozen_input_changes_no_other_gradient(served):
    op, tensors = CALLS[served], tensors_of(CALLS[served])
    expected, num_outputs = results(op, tensors), len(op.run(tensors))
    gradients = dict(zip(op.leaves, expected[num_outputs:], strict=True))
    for frozen in op.leaves:
        others = tuple(leaf for leaf in op.leaves if leaf != frozen)
        found = results(replace(op, leaves=others), tensors)
        same(found, [*expected[:num_outputs], *(gradients[leaf] for leaf in others)])
    assert not any(each.requires_grad for each in op.run(tensors))


@pytest.mark.parametrize("name, tier", [each for each in WITH_GRADIENTS if each[1] != "reference"])
def test_training_works_after_evaluation_in_inference_mode(served, monkeypatch):
    """Evaluation and training fill the same caches, and tensors created in inference mode cannot be written outside of it."""
    monkeypatch.setattr(host_memory._kept, "buffer", None, raising=False)
    padded_by_length.cache_clear()
    with torch.inference_mode():
        CALLS[served].run(tensors_of(CALLS[served]))
    call(served)


# Implementations that consist of PyTorch's operations, so second derivatives exist.
PYTORCHS = [("policy_loss", "reference"), ("attention_varlen", "cpu"), ("attention_varlen of keys, both ways", "cpu")]


@pytest.mark.parametrize("name, tier", [each for each in WITH_GRADIENTS if each not in PYTORCHS])
def test_a_second_derivative_is_refused_and_not_zero(served):
    op, tensors = CALLS[served], tensors_of(CALLS[served])
    leaf = tensors[op.leaves[0]].requires_grad_()
    out = op.run(tensors)[0].float().sum()
    name = served.split(",")[0].split()[0]
    with pytest.raises(RuntimeError, match=f"{name}: create_graph=True needs second derivatives"):
        torch.autograd.grad(out, leaf, create_graph=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_nonfinite_row_matches_pytorch_and_spoils_no_other(kind, implementation, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    check_logprobs(kind)
    check_loss(kind)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("setting", FEW if IS_INTERPRETED else SETTINGS)
def test_only_values_read_by_trained_tokens_spoil_the_loss(setting, implementation):
    check_given_logprobs(setting, implementation)
