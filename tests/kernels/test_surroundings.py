"""What a process has chosen for itself changes no op: default device and dtype, autocast, deterministic algorithms."""

import pytest
import torch
from every_op import CALLS, HEADS, check_the_defaults_are_not_used, same

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
from marsrl.kernels.head import bad_targets, host_memory

IMPLEMENTATIONS = ["cpu", "reference"]


@pytest.fixture(params=IMPLEMENTATIONS)
def call(request, name, monkeypatch):
    """The op's name, with the implementation taken; packing has none of its own on the CPU."""
    if name != "pack" or request.param != "cpu":
        monkeypatch.setenv("MARSRL_KERNELS", request.param)
    return name


@pytest.mark.parametrize("name", CALLS)
def test_the_defaults_are_not_used(call):
    check_the_defaults_are_not_used(call)


@pytest.mark.parametrize("name", CALLS)
def test_deterministic_algorithms_serve_and_change_nothing(call):
    expected = CALLS[call]()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    try:
        same(CALLS[call](), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CALLS)
def test_autocast_changes_nothing(name):
    expected = CALLS[name]()
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = CALLS[name]()
    same(found, expected)


@pytest.mark.parametrize("name", HEADS)
def test_a_learner_may_come_after_an_evaluation_in_inference_mode(name, monkeypatch):
    """Memory that a process keeps is written by both, and what inference mode has made cannot be written outside of it."""
    monkeypatch.setattr(host_memory._kept, "buffer", None, raising=False)
    with torch.inference_mode():
        linear_logprob(torch.randn(9, 16), torch.randn(40, 16), torch.arange(9))
    CALLS[name]()


def test_a_flag_of_bad_targets_may_be_made_in_inference_mode(monkeypatch):
    monkeypatch.setattr(bad_targets, "_FLAGS", {})
    targets = torch.tensor([0, 7])
    with torch.inference_mode():
        bad_targets._keep_first("op", targets, targets < 0, 5)
    bad_targets._keep_first("op", targets, targets > 4, 5)
    with pytest.raises(ValueError, match=r"op: targets\[1\] is 7"):
        bad_targets.raise_bad_targets()


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


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_second_derivative_is_refused_and_not_zero(name):
    x = torch.randn(9, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"{name}: create_graph=True asks for a second derivative"):
        torch.autograd.grad(DIFFERENTIABLE[name](x), x, create_graph=True)
