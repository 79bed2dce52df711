"""The fused heads in csrc/cpu; interpreter/test_head_interpreted.py and test_head_on_gpu.py use these tests too.

For float32 models, csrc/cpu overwrites the logits with their gradient dz; for bfloat16 models, it computes tile by tile.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from every_op import IS_INTERPRETED
from fused_head import (
    Arguments,
    arguments_for,
    chunks_of,
    compare_logprob,
    compare_policy_loss,
    forced,
    head_case,
    in_double,
    linear_policy_loss,
    run_policy_loss,
    support_of,
    to_device,
    use_device_chunks,
    with_exact_logits,
)
from policy_cases import OBJECTIVES
from torch import Tensor

from marsrl.kernels import PolicyObjective, linear_logprob
from marsrl.kernels.head import gemms

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PLAIN = PolicyObjective(mpt_probability=None)


@dataclass(frozen=True)
class Tier:
    """An implementation, by its name in MARSRL_KERNELS, and the sizes that it is tested with.

    case: (tokens, hidden size, vocabulary) for most tests. shapes: the same for test_shapes. chunks: function (rows, monkeypatch,
    vocabulary) that limits the head to `rows` rows of logits at a time.
    """

    implementation: str
    dtype: torch.dtype
    case: tuple[int, int, int]
    shapes: tuple[tuple[int, int, int], ...]
    chunks: Callable[[int, pytest.MonkeyPatch, int], None]
    device: str = "cpu"


@pytest.fixture(params=[FP32, BF16], ids=["float32", "bfloat16"])
def tier(request, monkeypatch):
    monkeypatch.setattr(gemms, "HOST_TILE_ROWS", 50)
    if IS_INTERPRETED:
        # One block with spare columns; an odd vocabulary of several pieces; whole blocks; one column more.
        shapes = ((2, 8, 5), (7, 19, 333), (8, 16, 64), (9, 32, 65))
        return Tier("triton", request.param, (8, 8, 131), shapes, use_device_chunks)
    # One row; around a chunk; odd vocabularies; two blocks of 4096 columns; more rows than a grid axis has programs.
    shapes = ((1, 9, 5), (15, 9, 33), (26, 12, 4099), (513, 8, 64), (3, 4, 152063), (3, 4, 151936), (65537, 2, 5))
    return Tier("cpu", request.param, (60, 16, 131), shapes, lambda rows, patch, vocab: chunks_of(rows, patch))


@pytest.fixture(autouse=True)
def _by_name(tier):
    with forced(tier.implementation):
        yield


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_equals_its_definition(name, tier):
    case = head_case(*tier.case)
    compare_policy_loss(case, arguments_for(case, name), tier.dtype, tier.device)


def test_shapes(tier):
    for shape in tier.shapes:
        case = head_case(*shape, device=tier.device)
        arguments = arguments_for(case, "k3, entropy bonus, tis")
        arguments["mask"][0] = True
        compare_policy_loss(case, arguments, tier.dtype, tier.device)
        if shape[0] * shape[2] < 10**6:
            compare_logprob(case, dtype=tier.dtype, device=tier.device)


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("name", ["clip", "sequence ratio", "entropy bonus"])
def test_the_chunk_size_does_not_change_the_result(rows, name, tier, monkeypatch):
    """Uses logits without rounding errors, because a sequence's ratio would contain them.

    Libraries round a product of one row differently from a product of many rows.
    """
    tier.chunks(rows, monkeypatch, tier.case[2])
    case = with_exact_logits(head_case(*tier.case))
    compare_policy_loss(case, arguments_for(case, name), tier.dtype, tier.device)
    compare_logprob(case, dtype=tier.dtype, device=tier.device)


@pytest.mark.parametrize("name", ["k3, entropy bonus, tis", "sequence ratio", "strong gate", "icepop on-policy"])
def test_columns_that_were_not_drawn_from_are_left_out(name, tier):
    case = with_exact_logits(head_case(*tier.case[:2], 333))
    support = support_of(case[2], 333, most=4, device=tier.device)
    arguments = arguments_for(case, name, support=support)
    compare_policy_loss(case, arguments, tier.dtype, tier.device)
    compare_logprob(case, dtype=tier.dtype, device=tier.device, support=support)


@pytest.mark.parametrize("temperature", [pytest.param(1.5, marks=pytest.mark.smoke), "per token"])
def test_temperature_and_padded_vocabulary(temperature, tier):
    hidden, weight, targets = head_case(*tier.case[:2], 128)
    weight[100:] = 50.0
    case = hidden, weight, targets % 100
    if temperature == "per token":
        temperature = torch.rand(tier.case[0]) + 0.5
    arguments = arguments_for(case, "entropy bonus", temperature=temperature, real_vocab_size=100)
    compare_policy_loss(case, arguments, tier.dtype, tier.device)
    found = compare_logprob(case, temperature, 100, tier.dtype, tier.device)
    assert (found[3][100:] == 0).all()


# One column; less than one block of csrc/cpu; several blocks and an odd remainder (a block has 64 columns when interpreted).
@pytest.mark.parametrize("columns", [1, 131, 331 if IS_INTERPRETED else 1283])
def test_rows_that_are_hard_for_a_softmax(columns, tier):
    z, targets = hard_rows(columns)
    case = torch.eye(len(z)), z.t(), targets
    found = compare_logprob(case, torch.rand(len(z)) + 0.5, None, tier.dtype, tier.device)
    assert found[0][3] == 0 and found[1][3] < 1e-6  # p = 1
    advantages = torch.tensor([1.5, 0.0, -2.0, 3.0, 0.0, 0.5, 1.0, -1.0, 2.0])
    for bonus in (0.0, 0.05):
        arguments = {
            "objective": PolicyObjective(mpt_probability=None, entropy_coef=bonus),
            "token_advantages": advantages,
            "mask": torch.arange(len(z)) != 7,
            "cu_seqlens": torch.tensor([0, 1, 2, len(z)]),
            "agent_of": torch.tensor([1, 0, 1]),  # a row of one agent between rows of another
            "num_agents": 2,
            "normaliser": 1.0,
        }
        compare_policy_loss(case, arguments, tier.dtype, tier.device)


def test_minus_infinity_logits_have_probability_0_and_nan_stays(tier):
    hidden = torch.ones(2, 1, dtype=tier.dtype, device=tier.device)
    weight = torch.randn(70, 1).to(tier.device, tier.dtype)
    weight[30:] = -torch.inf
    hidden[1] = torch.nan
    out = linear_logprob(hidden, weight.requires_grad_(), torch.tensor([3, 4], device=tier.device))
    expected = torch.log_softmax(weight[:30, 0].detach().float(), 0)
    torch.testing.assert_close(out.logprobs[0], expected[3])
    torch.testing.assert_close(out.entropy[0], -(expected.exp() * expected).sum())
    assert out.logprobs[1].isnan() and out.entropy[1].isnan()


@pytest.mark.parametrize("which", ["no tokens", "all masked", "no advantage"])
def test_an_empty_mask_gives_zero_loss_and_zero_gradients(which, tier):
    hidden, weight, targets, arguments = simple(
        0 if which == "no tokens" else 7, *tier.case[1:], tier.dtype, tier.device
    )
    if which == "all masked":
        arguments["mask"] = torch.zeros(7, dtype=torch.bool, device=tier.device)
    if which == "no advantage":
        arguments["token_advantages"].zero_()
    result = linear_policy_loss(hidden, weight, targets, **arguments)
    result.loss.backward()
    assert result.loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()
    assert all(values.shape == (1,) and values.isfinite().all() for values in result.agent_sums.values())


@pytest.mark.parametrize("name", ["pseudo on-policy", "sequence ratio"])
def test_only_the_backward_writes_main_grad_and_only_once(name, tier):
    case = with_exact_logits(head_case(*tier.case))
    hidden, weight, targets = (each.to(tier.device) for each in case)
    hidden, weight = hidden.to(tier.dtype), weight.to(tier.dtype)
    arguments = to_device(arguments_for(case, name), tier.device)
    exact = weight_gradient(hidden, weight, targets, arguments)
    hidden.requires_grad_(), weight.requires_grad_()
    main_grad = torch.ones(weight.shape, device=tier.device)
    first = linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad)
    linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad)  # result discarded
    with torch.no_grad():
        linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad)
    assert (main_grad == 1).all()
    (2.5 * first.loss).backward()
    error = 1e-5 if tier.dtype == FP32 else 1e-2
    size = 2.5 * exact.abs().max().item()
    torch.testing.assert_close(main_grad.double() - 1, 2.5 * exact, rtol=0, atol=error * size + 1e-6)
    assert weight.grad is None and not first.logprobs.requires_grad and not first.coefficient.requires_grad
    with pytest.raises(RuntimeError, match="second backward pass through one forward pass"):
        (2.5 * first.loss).backward()


def test_results_are_bitwise_repeatable_and_rows_independent(tier, monkeypatch):
    case = with_exact_logits(head_case(*tier.case))  # exact logits, since libraries promise no order of addition
    hidden, weight, targets = (each.to(tier.device) for each in case)
    arguments = to_device(arguments_for(case, "k3, entropy bonus, tis"), tier.device)
    found = [run_policy_loss((hidden, weight, targets), arguments, tier.dtype) for _ in range(2)]
    (first, gradients), (again, same) = found
    assert torch.equal(first.loss, again.loss) and all(map(torch.equal, gradients, same))
    assert all(torch.equal(first.agent_sums[name], again.agent_sums[name]) for name in first.agent_sums)
    tier.chunks(3, monkeypatch, tier.case[2])
    other, *_ = run_policy_loss((hidden, weight, targets), arguments, tier.dtype)
    assert torch.equal(first.logprobs, other.logprobs) and torch.equal(first.entropy, other.entropy)


def hard_rows(columns: int) -> tuple[Tensor, Tensor]:
    """Return logits [9, columns] and targets.

    Row by row: ordinary; large; a peak at the first column; one at the last column; flat; a column of probability zero; a maximum
    that rises with every block, one that falls, and one that jumps.
    """
    z = torch.randn(9, columns)
    z[1] *= 100
    z[2, 0] += 60
    z[3, -1] += 200
    z[4] = 88.0
    if columns > 1:
        z[5, columns // 2] = -1e30
    z[6] += torch.arange(columns) * 0.02  # rises by 10 per block
    z[7] = z[6].flip(0)
    z[8, columns // 3] = 300.0  # this logit makes the earlier sums vanish
    return z, torch.tensor([0, columns - 1, 0, columns - 1, 0, 0, columns - 1, 0, columns // 3])


def simple(
    num_tokens: int = 20, size: int = 16, vocab: int = 131, dtype: torch.dtype = FP32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Arguments]:
    """Return a batch of one sequence without a mask, with the objective of supervised training."""
    hidden, weight, targets = (each.to(device) for each in head_case(num_tokens, size, vocab))
    arguments = {
        "objective": PLAIN,
        "token_advantages": torch.randn(num_tokens).to(device),
        "cu_seqlens": torch.tensor([0, num_tokens], device=device),
        "normaliser": 5.0,
    }
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, arguments


def weight_gradient(hidden: Tensor, weight: Tensor, targets: Tensor, arguments: Arguments) -> Tensor:
    """Return dW of the loss in float64."""
    leaf = weight.detach().double().requires_grad_()
    with forced("reference"):
        linear_policy_loss(hidden.detach().double(), leaf, targets, **in_double(arguments)).loss.backward()
    assert leaf.grad is not None
    return leaf.grad
