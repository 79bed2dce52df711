"""Every op on each implementation that a CPU has: layouts, surroundings, numbers that are not finite, what is refused."""

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
from layout_cases import OPS, check_every_layout
from nonfinite_cases import KINDS, SETTINGS, check_given_logprobs, check_head, check_logprobs, check_loss

from marsrl.kernels import linear_logprob
from marsrl.kernels.head import bad_values, host_memory


@pytest.fixture
def call(name, tier, monkeypatch):
    """The call's name, its op served by that implementation."""
    force(monkeypatch, name, tier)
    return name


@pytest.mark.parametrize("name, tier", [(name, tier) for name in OPS for tier in that_run_here(name)])
def test_every_tensor_is_read_as_it_lies(call):
    check_every_layout(call)


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


DIFFERENTIABLE = (
    "linear_policy_loss, float32", "linear_logprob, float32", "policy_loss", "swiglu", "rms_norm", "grouped_linear"
)  # fmt: skip


def of_first_leaf(name):
    """(the op's first output as a function of the first tensor that has a gradient, that tensor)."""
    op = OPS[name]
    tensors = op.tensors()
    return lambda x: op.run({**tensors, op.leaves[0]: x})[0].sum(), tensors[op.leaves[0]]


# The reference of policy_loss has no product: PyTorch differentiates it, as often as it is asked to.
@pytest.mark.parametrize(
    "name, tier",
    [(name, tier) for name in DIFFERENTIABLE for tier in that_run_here(name) if (name, tier) != ("policy_loss", "reference")],
)  # fmt: skip
def test_a_second_derivative_is_refused_and_not_zero(call):
    function, x = of_first_leaf(call)
    with pytest.raises(RuntimeError, match=f"{call.split(',')[0]}: create_graph=True asks for a second derivative"):
        torch.autograd.grad(function(x.requires_grad_()), x, create_graph=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_transform_of_torch_func_is_refused_by_name(name):
    function, x = of_first_leaf(name)
    for call in (lambda: torch.func.grad(function)(x), lambda: torch.vmap(function, randomness="same")(x[None])):
        with pytest.raises(RuntimeError, match=f"{name.split(',')[0]} has no rule for torch.func's transforms"):
            call()


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_plain_pytorchs_and_no_other(kind, implementation, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    check_logprobs(kind)
    check_loss(kind)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_a_trained_token_reads_makes_the_loss_not_finite_and_nothing_else_does(setting, implementation):
    check_given_logprobs(setting, implementation)


@pytest.mark.parametrize("design", ["cpu", "cpu bfloat16", "reference"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_same_of_a_head(setting, design):
    check_head(setting, design)
