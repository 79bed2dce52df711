"""linear_logprob: values and gradients against float64, on the hard cases."""

import pytest
import torch

from marsrl.kernels import LossInputs, PolicyObjective, linear_logprob, linear_policy_loss
from marsrl.kernels.linear_logprob.reference import linear_logprob_reference


def test_mixed_dtypes():
    hidden, weight, targets = torch.randn(20, 8), torch.randn(70, 8), torch.randint(0, 70, (20,))
    mixed = linear_logprob(hidden.bfloat16(), weight, targets)
    exact, _ = linear_logprob_reference(hidden.bfloat16().double(), weight.double(), targets, 1.0, 70)
    torch.testing.assert_close(mixed.logprobs.double(), exact, atol=1e-5, rtol=1e-5)


NO_TEMPERATURES = [0.0, -1.5, float("nan"), float("inf")]


def with_temperature(name, temperature, mask=None):
    """The op of that name on four tokens."""
    hidden, weight, targets = torch.randn(4, 8), torch.randn(40, 8), torch.zeros(4, dtype=torch.int64)
    if name == "linear_logprob":
        return linear_logprob(hidden, weight, targets, temperature=temperature).logprobs
    inputs = LossInputs(PolicyObjective(), torch.tensor([0, 4]), 4.0, advantages=torch.ones(1), mask=mask)
    return linear_policy_loss(hidden, weight, targets, inputs, temperature=temperature).loss


@pytest.mark.parametrize("name", ["linear_logprob", "linear_policy_loss"])
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("value", NO_TEMPERATURES)
def test_a_temperature_that_is_none_is_named(name, implementation, value, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    with pytest.raises(ValueError, match=f"{name}: temperature is {value}, expected a positive, finite number"):
        with_temperature(name, value)
    for dtype in (torch.float32, torch.bfloat16):
        of_tokens = torch.tensor([1.0, 1.0, value, 1.0], dtype=dtype)
        message = rf"{name}: temperature\[2\] is {value}, expected a positive, finite number"
        with pytest.raises(ValueError, match=message):
            with_temperature(name, of_tokens)
    of_tokens, mask = torch.tensor([1.0, 1.0, value, 1.0]), torch.tensor([True, True, False, True])
    if name == "linear_policy_loss":  # that of a masked token is not read
        assert with_temperature(name, of_tokens, mask).isfinite()
