"""The fused heads on a GPU at real sizes, against float64 on the same device."""

import pytest
import torch
from fused_head import (
    arguments_for,
    compare_logprob,
    compare_policy_loss,
    compare_policy_loss_of_logprobs,
    forced,
    head_case,
    linear_policy_loss,
    use_device_chunks,
)
from nonfinite_cases import FEW, check_given_logprobs
from policy_cases import OBJECTIVES
from test_head import *  # noqa: F403
from test_head import BF16, FP16, FP32, Tier

from marsrl.kernels import PolicyObjective, linear_logprob, raise_bad_values
from marsrl.kernels.linear_policy_loss.quack_head import machine_lacks_quack
from marsrl.kernels.triton_machine import machine_lacks_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(machine_lacks_triton() is not None, reason=str(machine_lacks_triton())),
]


# Shapes from other projects' tests; odd vocabularies; one row; around a block; more rows than a grid axis has programs.
SHAPES = (
    *((1937, 3584, 152064), (2169, 896, 151936), (1530, 2048, 32256), (769, 2048, 151936), (80, 125, 64)),
    *((1, 64, 152063), (15, 64, 151936), (513, 256, 152063), (129, 896, 32257), (769, 64, 32768), (65537, 32, 37)),
)


@pytest.fixture(autouse=True)
def _by_name():
    with forced("triton"):
        yield
    torch.cuda.empty_cache()  # a shape takes 60 GiB, and other processes test on the same GPU


@pytest.fixture(params=[FP32, BF16], ids=str)
def tier(request):
    return Tier("triton", request.param, (200, 64, 1021), SHAPES, use_device_chunks, "cuda")


@pytest.mark.parametrize("name", ["clip", "strong gate", "k3", "cispo"])
@pytest.mark.parametrize("shape", [(769, 2048, 151936), (4500, 256, 32256), (129, 896, 1024), (1, 64, 128)])
def test_by_quack(shape, name):
    """The last of several chunks is partial. The second comparison has few active rows, which are packed."""
    with forced("quack"):
        reason = machine_lacks_quack() or (torch.cuda.get_device_capability() != (9, 0) and "it is for Hopper")
        if reason:
            pytest.skip(reason)
        case = head_case(*shape, device="cuda")
        arguments = arguments_for(case, name)
        compare_policy_loss(case, arguments, BF16, "cuda")
        arguments["advantages"][1:] = 0
        compare_policy_loss(case, arguments, BF16, "cuda")


def test_float16():
    case = head_case(200, 64, 1021, "cuda")
    compare_policy_loss(case, arguments_for(case, "k3, entropy bonus, tis"), FP16, "cuda")
    compare_logprob(case, dtype=FP16, device="cuda")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_of_given_logprobs_equals_its_definition(name):
    compare_policy_loss_of_logprobs(name, 5000, "cuda")


@pytest.mark.parametrize("setting", FEW)
def test_only_values_read_by_trained_tokens_spoil_the_loss(setting):
    check_given_logprobs(setting, "triton", "cuda")


def large(**changes):
    """Return a batch that needs three chunks of rows and two backward GEMMs, all on the device."""
    num_tokens = 2000
    hidden = torch.randn(num_tokens, 256, device="cuda", dtype=BF16, requires_grad=True)
    weight = (torch.randn(151936, 256, device="cuda") * 0.05).bfloat16().requires_grad_()
    arguments = {
        "objective": PolicyObjective(entropy_coef=0.01),
        "token_advantages": torch.randn(num_tokens, device="cuda"),
        "mask": torch.rand(num_tokens, device="cuda") < 0.9,
        "cu_seqlens": torch.tensor([0, 700, num_tokens], device="cuda"),
        "old_logprobs": torch.full((num_tokens,), -11.0, device="cuda"),
        "normaliser": torch.tensor(1800.0, device="cuda"),
        **changes,
    }
    return hidden, weight, torch.randint(0, 151936, (num_tokens,), device="cuda"), arguments


@pytest.mark.parametrize("has_main_grad", [True, False])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_host_never_waits_for_a_drained_stream(ratio, has_main_grad):
    hidden, weight, targets, arguments = large(objective=PolicyObjective(ratio=ratio))
    arguments["main_grad"] = torch.zeros(weight.shape, device="cuda") if has_main_grad else None

    def step():
        (3.0 * linear_policy_loss(hidden, weight, targets, **arguments).loss).backward()
        out = linear_logprob(hidden, weight, targets)
        (out.logprobs.sum() + out.entropy.sum()).backward()

    step()  # the first call compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("target", [-1, 151936])
def test_raise_bad_values_names_a_target_out_of_range(target):
    hidden, weight, targets, arguments = large(mask=None)
    targets[1234] = target
    result = linear_policy_loss(hidden, weight, targets, **arguments)
    with pytest.raises(ValueError, match=rf"linear_policy_loss: targets\[1234\] is {target}, expected 0..151935"):
        raise_bad_values()
    assert result.logprobs[1234].isnan() and result.logprobs[:1234].isfinite().all()
    raise_bad_values()


def test_extra_memory_at_65536_tokens_is_dw_and_the_two_buffers():
    hidden = torch.randn(65536, 2048, device="cuda", dtype=BF16, requires_grad=True)
    weight = (torch.randn(151936, 2048, device="cuda") * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, 151936, (65536,), device="cuda")
    main_grad = torch.zeros(weight.shape, device="cuda")

    def step(tokens):
        return linear_policy_loss(
            hidden[:tokens],
            weight,
            targets[:tokens],
            objective=PolicyObjective(),
            token_advantages=torch.ones(tokens, device="cuda"),
            cu_seqlens=torch.tensor([0, tokens], device="cuda"),
            normaliser=1.0,
            main_grad=main_grad,
        ).loss

    step(128).backward()  # this call makes cuBLAS allocate its workspace, which it keeps
    hidden.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = step(65536)
    results = hidden.numel() * 2 + weight.numel() * 4  # dX is bfloat16, dW float32
    assert torch.cuda.max_memory_allocated() - before - results < 1.85e9
    loss.backward()
