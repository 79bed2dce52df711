"""What a process has chosen for itself changes no op: default device and dtype, autocast, deterministic algorithms."""

import pytest
import torch
from every_op import (
    CALLS,
    EMPTY_TIERS,
    HEADS,
    TIERS,
    check_an_empty_batch_has_gradients_of_zero,
    check_autocast_changes_nothing,
    check_the_defaults_are_not_used,
    force,
    same,
    that_run_here,
)

from marsrl.kernels import (
    LossInputs,
    PolicyObjective,
    grouped_linear,
    linear_logprob,
    linear_policy_loss,
    policy_loss,
    rms_norm,
    swiglu,
)
from marsrl.kernels.head import bad_values, host_memory


@pytest.fixture
def call(name, tier, monkeypatch):
    """The call's name, its op served by that implementation."""
    force(monkeypatch, name, tier)
    return name


@pytest.mark.parametrize("name, tier", TIERS)
def test_the_defaults_are_not_used(call):
    check_the_defaults_are_not_used(call)


@pytest.mark.parametrize("name, tier", TIERS)
def test_deterministic_algorithms_serve_and_change_nothing(call):
    expected = CALLS[call]()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    try:
        same(CALLS[call](), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name, tier", TIERS)
def test_autocast_changes_nothing(call):
    check_autocast_changes_nothing(call)


@pytest.mark.parametrize("name, tier", EMPTY_TIERS)
def test_an_empty_batch_has_gradients_of_zero(call):
    check_an_empty_batch_has_gradients_of_zero(call)


@pytest.mark.parametrize("name", HEADS)
def test_a_learner_may_come_after_an_evaluation_in_inference_mode(name, monkeypatch):
    """Memory that a process keeps is written by both, and what inference mode has made cannot be written outside of it."""
    monkeypatch.setattr(host_memory._kept, "buffer", None, raising=False)
    with torch.inference_mode():
        linear_logprob(torch.randn(9, 16), torch.randn(40, 16), torch.arange(9))
    CALLS[name]()


def test_a_flag_of_bad_targets_may_be_made_in_inference_mode(monkeypatch):
    monkeypatch.setattr(bad_values, "_FLAGS", {})
    targets = torch.tensor([0, 7])
    with torch.inference_mode():
        bad_values._keep_first("op", "targets", targets, targets < 0, "0..4")
    bad_values._keep_first("op", "targets", targets, targets > 4, "0..4")
    with pytest.raises(ValueError, match=r"op: targets\[1\] is 7"):
        bad_values.raise_bad_values()


DIFFERENTIABLE = {
    "linear_policy_loss": lambda x: linear_policy_loss(x, torch.randn(40, 16), torch.arange(9), inputs()).loss,
    "linear_logprob": lambda x: linear_logprob(x, torch.randn(40, 16), torch.arange(9)).logprobs.sum(),
    "policy_loss": lambda x: policy_loss(x[:, 0], x[:, 1].detach(), inputs()).loss,
    "swiglu": lambda x: swiglu(x).sum(),
    "rms_norm": lambda x: rms_norm(x, torch.ones(16), eps=1e-6).sum(),
    "grouped_linear": lambda x: grouped_linear(x, torch.randn(1, 4, 16), torch.tensor([9])).sum(),
}


def inputs():
    return LossInputs(PolicyObjective(), torch.tensor([0, 9]), 9.0, advantages=torch.ones(1))


# The reference of policy_loss has no product: PyTorch differentiates it, as often as it is asked to.
DIFFERENTIABLE_TIERS = [
    (name, tier)
    for name in DIFFERENTIABLE
    for tier in that_run_here(name)
    if (name, tier) != ("policy_loss", "reference")
]


@pytest.mark.parametrize("name, tier", DIFFERENTIABLE_TIERS)
def test_a_second_derivative_is_refused_and_not_zero(call):
    x = torch.randn(9, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"{call}: create_graph=True asks for a second derivative"):
        torch.autograd.grad(DIFFERENTIABLE[call](x), x, create_graph=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_a_transform_of_torch_func_is_refused_by_name(name, transform):
    x = torch.randn(2, 9, 16) if transform is torch.vmap else torch.randn(9, 16)
    with pytest.raises(RuntimeError, match=f"{name} has no rule for torch.func's transforms"):
        transform(DIFFERENTIABLE[name], **({"randomness": "same"} if transform is torch.vmap else {}))(x)
