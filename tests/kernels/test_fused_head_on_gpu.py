"""The fused head on a GPU, at real sizes: against float64 on the same device."""

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
    run_policy_loss,
)
from nonfinite_cases import FEW, check_given_logprobs

from marsrl.kernels import PolicyObjective, linear_logprob, raise_bad_values
from marsrl.kernels.head import chunked_head
from marsrl.kernels.testing import OBJECTIVES

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def implementation():
    return "policy_loss=triton,linear_policy_loss=triton,linear_logprob=triton"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_equals_its_definition(name, dtype, implementation):
    case = head_case(200, 64, 1021)
    compare_policy_loss(case, arguments_for(case, name), dtype, implementation, "cuda")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_of_given_logprobs_equals_its_definition(name, implementation):
    compare_policy_loss_of_logprobs(name, 5000, implementation, "cuda")


@pytest.mark.parametrize("setting", FEW, ids=str)
def test_what_a_trained_token_reads_makes_the_loss_not_finite_and_nothing_else_does(setting):
    check_given_logprobs(setting, "triton", "cuda")


# Shapes of other projects' suites; odd vocabularies; one row; a block and its neighbours; more rows than a grid axis has
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (1937, 3584, 152064),
        (2169, 896, 151936),
        (1530, 2048, 32256),
        (80, 125, 64),
        (1, 64, 152063),
        (15, 64, 151936),
        (26, 64, 152063),
        (513, 256, 152063),
        (769, 64, 32768),
        (65537, 32, 37),
    ],
)
def test_shapes(shape, dtype, implementation):
    case = head_case(*shape, device="cuda")
    arguments = arguments_for(case, "k3, entropy bonus, tis")
    arguments["mask"][0] = True
    compare_policy_loss(case, arguments, dtype, implementation, "cuda")


@pytest.mark.parametrize("temperature", [1.5, "per token"])
def test_temperature_and_padded_vocabulary(temperature, implementation):
    if temperature == "per token":
        temperature = torch.rand(40) + 0.5
    hidden, weight, targets = head_case(40, 64, 151936)
    weight[151669:] = 50.0
    found = compare_logprob(
        (hidden, weight, targets % 151669), temperature, real=151669, implementation=implementation, device="cuda"
    )
    assert (found[3][151669:] == 0).all()


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_large_logits(scale, implementation):
    hidden, weight, targets = head_case(60, 16, 5003)
    case = torch.randn_like(hidden) * scale, weight, targets
    compare_logprob(case, implementation=implementation, device="cuda")


def test_peaked_rows_and_the_last_column_and_probability_one(implementation):
    hidden, weight = torch.randn(12, 16), torch.randn(152063, 16) * 0.1
    weight[-1] = 3 * hidden[0]
    hidden[1:6] = hidden[0] * torch.linspace(0.2, 4, 5)[:, None]
    case = hidden, weight, torch.full((12,), 152062)
    found = compare_logprob(case, implementation=implementation, device="cuda")
    assert found[0][5] == 0


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("name", ["clip", "sequence ratio", "entropy bonus"])
def test_the_chunk_size_is_not_seen_in_the_result(rows, name, implementation, monkeypatch):
    monkeypatch.setattr(chunked_head, "DEVICE_ROW_MULTIPLE", 1)
    monkeypatch.setattr(chunked_head, "DEVICE_LOGITS_BYTES", rows * 4 * 131)
    monkeypatch.setattr(chunked_head, "DEVICE_GRADIENT_BYTES", 2 * rows * 4 * 131)
    case = head_case(60, 16)
    compare_policy_loss(case, arguments_for(case, name), torch.bfloat16, implementation, "cuda")


def large(**changes):
    """Three chunks of rows and two backward GEMMs; everything on the device."""
    hidden = torch.randn(2000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(151936, 256, device="cuda") * 0.05).bfloat16().requires_grad_()
    arguments = {
        "objective": PolicyObjective(entropy_coef=0.01),
        "token_advantages": torch.randn(2000, device="cuda"),
        "mask": torch.rand(2000, device="cuda") < 0.9,
        "cu_seqlens": torch.tensor([0, 700, 2000], device="cuda"),
        "old_logprobs": torch.full((2000,), -11.0, device="cuda"),
        "normaliser": torch.tensor(1800.0, device="cuda"),
        **changes,
    }
    return hidden, weight, torch.randint(0, 151936, (2000,), device="cuda"), arguments


@pytest.mark.parametrize("has_main_grad", [True, False])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_host_never_waits_for_a_drained_stream(ratio, has_main_grad, implementation):
    hidden, weight, targets, arguments = large(objective=PolicyObjective(ratio=ratio))
    arguments["main_grad"] = torch.zeros(weight.shape, device="cuda") if has_main_grad else None
    with forced(implementation):
        linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            (3.0 * linear_policy_loss(hidden, weight, targets, **arguments).loss).backward()
            out = linear_logprob(hidden, weight, targets)
            (out.logprobs.sum() + out.entropy.sum()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_captures_forward_and_backward(implementation):
    hidden, weight, targets, arguments = large(compacts=False)

    def step():
        hidden.grad = weight.grad = None
        result = linear_policy_loss(hidden, weight, targets, **arguments)
        result.loss.backward()
        return result.loss.detach(), hidden.grad, weight.grad

    with forced(implementation):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            expected = [each.clone() for each in step()]
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected))


def test_two_runs_give_the_same_bits(implementation):
    hidden, weight, targets, arguments = large()
    with forced(implementation):
        first, dx, dw = run_policy_loss((hidden, weight, targets), arguments, torch.bfloat16)
        again, dx_again, dw_again = run_policy_loss((hidden, weight, targets), arguments, torch.bfloat16)
    assert torch.equal(first.loss, again.loss) and torch.equal(dx, dx_again) and torch.equal(dw, dw_again)
    assert all(torch.equal(first.agent_sums[name], again.agent_sums[name]) for name in first.agent_sums)


def test_main_grad_is_written_once_a_backward_and_never_by_a_forward(implementation):
    hidden, weight, targets, arguments = large()
    with forced(implementation):
        main_grad = torch.ones(weight.shape, device="cuda")
        first = linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad)
        with torch.no_grad():
            linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad)
        assert (main_grad == 1).all()
        (2.5 * first.loss).backward()
        assert weight.grad is None
        _, _, dw = run_policy_loss((hidden, weight, targets), arguments, torch.bfloat16, factor=2.5)
    torch.testing.assert_close((main_grad - 1).bfloat16(), dw, atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen, implementation):
    hidden, weight, targets, arguments = large()
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    with forced(implementation):
        linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    assert (hidden.grad is None) == (frozen == "hidden") and (weight.grad is None) == (frozen == "weight")


@pytest.mark.parametrize("case", ["no tokens", "all masked", "no advantage"])
def test_nothing_to_train_is_a_loss_of_zero_with_gradients_of_zero(case, implementation):
    hidden, weight, targets, arguments = large(objective=PolicyObjective())
    if case == "no tokens":
        hidden, targets = hidden[:0].detach().requires_grad_(), targets[:0]
        arguments.update(token_advantages=torch.zeros(0, device="cuda"), mask=None, old_logprobs=None)
        arguments["cu_seqlens"] = torch.tensor([0, 0], device="cuda")
    if case == "all masked":
        arguments["mask"].zero_()
    if case == "no advantage":
        arguments["token_advantages"].zero_()
    with forced(implementation):
        result = linear_policy_loss(hidden, weight, targets, **arguments)
        result.loss.backward()
    assert result.loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("target", [-1, 151936])
def test_a_target_out_of_range_is_named_when_it_is_asked_for(target, implementation):
    hidden, weight, targets, arguments = large(mask=None)
    targets[1234] = target
    with forced(implementation):
        result = linear_policy_loss(hidden, weight, targets, **arguments)
    with pytest.raises(ValueError, match=rf"linear_policy_loss: targets\[1234\] is {target}, expected 0..151935"):
        raise_bad_values()
    assert result.logprobs[1234].isnan() and result.logprobs[:1234].isfinite().all()
    raise_bad_values()


def test_extra_memory_at_65536_tokens_is_dw_768_rows_of_logits_and_4224_of_their_gradients(implementation):
    hidden = torch.randn(65536, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
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

    with forced(implementation):
        step(128).backward()  # cuBLAS's workspace is there from now on
        hidden.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = step(65536)
        results = hidden.numel() * 2 + weight.numel() * 4  # dX bfloat16, dW float32
        assert torch.cuda.max_memory_allocated() - before - results < 1.85e9
        loss.backward()


def test_autocast_and_compiled_callers_get_the_same(implementation):
    hidden, weight, targets, arguments = large()

    def step(hidden):
        return linear_policy_loss(hidden, weight, targets, **arguments).logprobs

    with forced(implementation):
        expected = step(hidden)
        with torch.autocast("cuda", dtype=torch.float16):
            assert torch.equal(step(hidden), expected)
        assert torch.equal(torch.compile(step, backend="eager")(hidden), expected)
