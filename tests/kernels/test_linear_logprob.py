"""linear_logprob: values and gradients against float64, on the hard cases."""

import pytest
import torch

from marsrl.kernels import LossInputs, PolicyObjective, linear_logprob, linear_policy_loss, raise_bad_values
from marsrl.kernels.head import bad_values
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


@pytest.mark.parametrize(
    "name, values, first, second",
    [
        ("targets", torch.tensor([0, -7, -100, 9]), r"targets\[1\] is -7, expected", r"targets\[2\] is -100"),
        (
            "temperature",
            torch.tensor([1.0, -1.5, torch.nan]),
            r"temperature\[1\] is -1.5, expected",
            r"temperature\[2\] is nan",
        ),
    ],
)
def test_bad_values_of_a_device_are_kept_until_they_are_asked_for(name, values, first, second):
    is_bad = ~(values >= 0)
    for part in (is_bad & (torch.arange(len(values)) != 1), is_bad):  # two calls; the earliest token of both is named
        bad_values._keep_first("linear_logprob", name, values, part, "something else")
    with pytest.raises(ValueError, match=f"linear_logprob: {first} something else"):
        raise_bad_values()
    raise_bad_values()  # said once
    is_bad[1] = False
    bad_values._keep_first("linear_logprob", name, values, is_bad, "something else")
    with pytest.raises(ValueError, match=second):
        raise_bad_values()
    bad_values._keep_first("linear_logprob", name, values, is_bad & False, "")
    bad_values._keep_first("linear_logprob", name, values[:0], is_bad[:0], "")
    raise_bad_values()
