"""The ops as torch.compile sees them, and as compiled code calls them."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from every_op import force, that_run_here
from traced_cases import CALLERS, SCHEMAS, check_a_compiled_caller, check_op

from marsrl.kernels import LossInputs, PolicyObjective, attention_varlen, linear_logprob, linear_policy_loss, rms_norm

TIERS = [(name, tier) for name in CALLERS for tier in that_run_here(name)]


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet():
    torch._dynamo.reset()


@pytest.mark.parametrize("name, tier", [(name, tier) for name in SCHEMAS for tier in that_run_here(name.split()[0])])
def test_torch_finds_no_fault(name, tier, monkeypatch):
    force(monkeypatch, name.split()[0], tier)
    check_op(name)


@pytest.mark.parametrize("name, tier", TIERS)
def test_a_compiled_caller_has_one_graph_and_the_gradients_of_eager_code(name, tier, monkeypatch):
    force(monkeypatch, name, tier)
    check_a_compiled_caller(name)


# that of swiglu has a product of its own, which autocast is for
@pytest.mark.parametrize("name, tier", [(name, tier) for name, tier in TIERS if name != "swiglu"])
def test_autocast_changes_nothing_in_compiled_code(name, tier, monkeypatch):
    force(monkeypatch, name, tier)
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    compiled = torch.compile(CALLERS[name], fullgraph=True, backend="eager")  # others run outside of autocast anyway
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = compiled(x, weight)
            results.append((out, *torch.autograd.grad(out.sum(), (x, weight))))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_the_implementation_is_chosen_when_compiled_code_runs(monkeypatch):
    compiled = torch.compile(lambda x: rms_norm(x, torch.ones(16), eps=1e-6), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 16, dtype=torch.float64)
    expected = compiled(x)
    monkeypatch.setenv("MARSRL_KERNELS", "reference")
    torch.testing.assert_close(compiled(x), expected)
    monkeypatch.setenv("MARSRL_KERNELS", "cpu")
    with pytest.raises(RuntimeError, match="MARSRL_KERNELS=cpu cannot serve this call of rms_norm: x is float64"):
        compiled(x)


def test_values_are_checked_when_compiled_code_runs():
    x = torch.randn(4, 2, 8)
    attend = torch.compile(lambda bounds: attention_varlen(x, x, x, bounds), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"attention_varlen: cu_seqlens is \[0, 5\], expected to rise from 0 to 4"):
        attend(torch.tensor([0, 5]))
    hidden, weight = torch.randn(4, 8), torch.randn(40, 8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def logprobs(targets, temperature):
        return linear_logprob(hidden, weight, targets, temperature=temperature).logprobs

    with pytest.raises(ValueError, match=r"linear_logprob: targets\[1\] is 40, expected 0..39"):
        logprobs(torch.tensor([0, 40, 1, 1]), torch.ones(4))
    with pytest.raises(
        ValueError, match=r"linear_logprob: temperature\[2\] is -1.0, expected a positive, finite number"
    ):
        logprobs(torch.zeros(4, dtype=torch.int64), torch.tensor([1.0, 1.0, -1.0, 1.0]))


def test_a_second_derivative_is_refused_by_name():
    x = torch.randn(4, 16, requires_grad=True)
    out = torch.ops.marsrl.rms_norm(x, torch.ones(16), 1e-6, 0.0)[0]
    with pytest.raises(RuntimeError, match="rms_norm: create_graph=True asks for a second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_gradients_of_another_implementations_forward_are_not_finite(monkeypatch):
    """No kernel may take the reference's leftovers for its own."""
    x = torch.randn(4, 16, requires_grad=True)
    compiled = torch.compile(lambda x: rms_norm(x, torch.ones(16), eps=1e-6), fullgraph=True, backend="aot_eager")
    monkeypatch.setenv("MARSRL_KERNELS", "reference")
    out = compiled(x)
    monkeypatch.setenv("MARSRL_KERNELS", "cpu")
    out.square().sum().backward()
    assert not x.grad.isfinite().any()


def test_inference_mode_serves_compiled_code_too():
    x, weight = torch.randn(6, 16), torch.randn(16)
    for caller in CALLERS.values():
        with torch.inference_mode():
            found = torch.compile(caller, fullgraph=True, backend="aot_eager")(x, weight)
        torch.testing.assert_close(found, caller(x, weight))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_vocabulary_shard_breaks_the_graph_and_says_why(group):
    hidden, weight, targets = torch.randn(4, 8), torch.randn(40, 8), torch.arange(4)

    def logprobs(hidden):
        return linear_logprob(2 * hidden, weight, targets, tp_group=group).logprobs * 3

    assert torch.equal(torch.compile(logprobs, backend="eager")(hidden), logprobs(hidden))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="linear_logprob has a tp_group, which is no argument for an op"):
        torch.compile(logprobs, fullgraph=True, backend="eager")(hidden)


def test_the_policy_loss_breaks_the_graph_and_says_why():
    weight, targets = torch.randn(40, 8), torch.arange(4)
    inputs = LossInputs(PolicyObjective(), torch.tensor([0, 4]), 4.0, advantages=torch.ones(1))

    @torch.compile(fullgraph=True, backend="eager")
    def loss(hidden):
        return linear_policy_loss(hidden, weight, targets, inputs).loss

    with pytest.raises(RuntimeError, match="linear_policy_loss forms its gradient in the forward"):
        loss(torch.randn(4, 8))


def test_importing_the_kernels_does_not_import_the_compiler():
    command = "import sys, marsrl.kernels; print([name for name in ('torch._dynamo', 'triton') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
