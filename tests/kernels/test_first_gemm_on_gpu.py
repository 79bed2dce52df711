"""The heads with products of their own, on a GPU, at real sizes."""

import pytest
import torch
from fused_head import (
    arguments_for,
    compare_logprob,
    compare_policy_loss,
    forced,
    head_case,
    linear_policy_loss,
    run_policy_loss,
)

from marsrl.kernels import PolicyObjective, linear_logprob
from marsrl.kernels.triton_machine import machine_lacks_triton

NAME = "linear_policy_loss=triton_gemm,linear_logprob=triton_gemm"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(machine_lacks_triton() is not None, reason=str(machine_lacks_triton())),
]


@pytest.mark.parametrize("name", ["pseudo on-policy", "k3, entropy bonus, tis", "sequence ratio"])
def test_an_objective_equals_its_definition(name):
    case = head_case(200, 64, 1021)
    compare_policy_loss(case, arguments_for(case, name), torch.bfloat16, NAME, "cuda")


# an H that no step divides; Qwen's vocabulary; an odd one; a row; tiles of rows and one row more; beyond a grid axis
@pytest.mark.parametrize(
    "shape",
    [
        (1937, 3584, 152064),
        (769, 2048, 151936),
        (80, 125, 64),
        (1, 64, 152063),
        (513, 256, 152063),
        (129, 896, 32257),
        (65537, 32, 37),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes(shape, dtype):
    if dtype == torch.float16 and shape[0] * shape[2] > 10**8:
        pytest.skip("float16 backward GEMMs are float32: seconds at this size")
    case = head_case(*shape, device="cuda")
    arguments = arguments_for(case, "k3, entropy bonus, tis")
    arguments["mask"][0] = True
    compare_policy_loss(case, arguments, dtype, NAME, "cuda")


@pytest.mark.parametrize("temperature", [1.5, "per token"])
def test_temperature_and_padded_vocabulary(temperature):
    if temperature == "per token":
        temperature = torch.rand(40) + 0.5
    hidden, weight, targets = head_case(40, 64, 151936)
    weight[151669:] = 50.0
    case = hidden, weight, targets % 151669
    found = compare_logprob(case, temperature, 151669, torch.bfloat16, NAME, "cuda")
    assert (found[3][151669:] == 0).all()


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_large_logits(scale):
    hidden, weight, targets = head_case(60, 16, 5003)
    case = torch.randn_like(hidden) * scale, weight, targets
    compare_logprob(case, dtype=torch.bfloat16, implementation=NAME, device="cuda")


def large(num_tokens=5000):
    hidden = torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(151936, 256, device="cuda") * 0.05).bfloat16().requires_grad_()
    arguments = {
        "objective": PolicyObjective(entropy_coef=0.01),
        "token_advantages": torch.randn(num_tokens, device="cuda"),
        "mask": torch.rand(num_tokens, device="cuda") < 0.9,
        "cu_seqlens": torch.tensor([0, 700, num_tokens], device="cuda"),
        "old_logprobs": torch.full((num_tokens,), -11.0, device="cuda"),
        "normaliser": torch.tensor(1800.0, device="cuda"),
    }
    return hidden, weight, torch.randint(0, 151936, (num_tokens,), device="cuda"), arguments


def test_two_runs_give_the_same_bits():
    hidden, weight, targets, arguments = large()
    with forced(NAME):
        first, dx, dw = run_policy_loss((hidden, weight, targets), arguments, torch.bfloat16)
        again, dx_again, dw_again = run_policy_loss((hidden, weight, targets), arguments, torch.bfloat16)
    assert torch.equal(first.loss, again.loss) and torch.equal(dx, dx_again) and torch.equal(dw, dw_again)


def test_the_host_never_waits_for_a_drained_stream():
    hidden, weight, targets, arguments = large()
    with forced(NAME):
        linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()  # compiles
        linear_logprob(hidden, weight, targets)
        torch.cuda.set_sync_debug_mode("error")
        try:
            linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
            out = linear_logprob(hidden, weight, targets)
            (out.logprobs.sum() + out.entropy.sum()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_evaluation_holds_a_fifth_of_the_memory_that_logits_take():
    hidden, weight, targets, arguments = large(4096)
    peaks, found = {}, {}
    for name in ("triton", NAME):
        with forced(name), torch.no_grad():
            linear_policy_loss(hidden, weight, targets, **arguments)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found[name] = linear_policy_loss(hidden, weight, targets, **arguments)
            peaks[name] = torch.cuda.max_memory_allocated() - before
    assert peaks[NAME] < peaks["triton"] / 5
    torch.testing.assert_close(found[NAME].logprobs, found["triton"].logprobs, atol=1e-5, rtol=1e-5)
