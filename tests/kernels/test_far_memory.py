"""Elements beyond 2^31 are reached on the CPU: tensors that far apart against the same numbers side by side, and a head with so
many logits.

Of a tensor that lies far apart only the pages are there that hold its numbers: between its rows is memory that nobody touches.
"""

import mmap
from collections.abc import Callable, Sequence
from math import prod

import fused_head
import pytest
import torch
from fused_head import arguments_for, head_case
from torch import Tensor

from marsrl.kernels import (
    LossInputs,
    PolicyObjective,
    attention_decode,
    attention_varlen,
    grouped_linear,
    linear_logprob,
    linear_policy_loss,
    rms_norm,
)
from marsrl.kernels.testing import assert_accurate

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux
LIMIT = 2**31


def far_apart(values: Tensor, dim: int = 0) -> Tensor:
    """The values, those beside each other along `dim` so far apart that the last of these begins behind 2^31 elements."""
    length = values.shape[dim]
    distance = LIMIT // (length - 1) // 16 * 16 + 16
    others = [size for place, size in enumerate(values.shape) if place != dim]
    strides = [prod(others[place + 1 :]) for place in range(len(others))]
    strides.insert(dim, distance)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, length * distance * values.element_size(), flags=flags)
    found = torch.frombuffer(memory, dtype=values.dtype).as_strided(values.shape, strides).copy_(values)
    assert found[(slice(None),) * dim + (-1,)].storage_offset() >= LIMIT
    return found


def _same_with_gradients(function: Callable[..., Tensor], near: Sequence[Tensor], far: Sequence[Tensor]) -> None:
    results = []
    for given in (near, far):
        leaves = [each.detach().requires_grad_() for each in given]
        out = function(*leaves)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        assert one is not None and one.any() and other is not None
        torch.testing.assert_close(other, one, rtol=2e-2 if one.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_and_weights(dim: int, dtype: torch.dtype) -> None:
    """dim 0: rows of the hidden states and of the weight are far apart; 1: their units, of which a step takes up to 64."""
    case = head_case(9, 12, 40) if dim == 0 else head_case(3, 65, 40)
    arguments = arguments_for(case, "k3")
    targets = case[2]
    near = [each.to(dtype) for each in case[:2]]
    far = [far_apart(each, dim) for each in near]
    _same_with_gradients(
        lambda hidden, weight: fused_head.linear_policy_loss(hidden, weight, targets, **arguments).loss * 3, near, far
    )
    _same_with_gradients(lambda hidden, weight: linear_logprob(hidden, weight, targets).logprobs, near, far)


def test_attention() -> None:
    """Tokens of queries, keys and values, and then their heads."""
    near = [torch.randn(9, 2, 16) for _ in range(3)]
    bounds = torch.tensor([0, 3, 9], dtype=torch.int32)
    for dim in (0, 1):
        far = [far_apart(each, dim) for each in near]
        _same_with_gradients(lambda q, k, v: attention_varlen(q, k, v, bounds), near, far)


def test_decoding() -> None:
    """Sequences, tokens and heads of the caches."""
    q, k, v = torch.randn(2, 2, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    lengths = torch.tensor([4, 9])
    near = attention_decode(q, k, v, lengths)
    for dim in range(3):
        torch.testing.assert_close(attention_decode(q, far_apart(k, dim), far_apart(v, dim), lengths), near)


def test_experts() -> None:
    """Rows, and the experts and inputs of the weights."""
    x, weights, counts = torch.randn(6, 65), torch.randn(2, 5, 65), torch.tensor([2, 4])
    for dim in (0, 2):
        far = far_apart(x), far_apart(weights, dim)
        _same_with_gradients(lambda x, weights: grouped_linear(x, weights, counts), (x, weights), far)


def test_norm() -> None:
    x, weight = torch.randn(5, 16), torch.randn(16)
    _same_with_gradients(lambda x, weight: rms_norm(x, weight, eps=1e-6), (x, weight), (far_apart(x), weight))


@pytest.mark.slow  # 2.2 billion logits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_behind_2_to_the_31_logits_has_the_values_of_its_own(dtype):
    """All rows have statistics; those at both ends, and around logit 2^31, also gradients, into which no others enter."""
    num_tokens, size, vocab = 14_208, 8, 151_936
    crossing = 2**31 // vocab
    rows = torch.tensor([0, 1, crossing - 1, crossing, crossing + 1, num_tokens - 2, num_tokens - 1])
    hidden, weight = torch.randn(num_tokens, size).to(dtype), torch.randn(vocab, size).to(dtype)
    targets = torch.randint(0, vocab, (num_tokens,))
    targets[-1] = vocab - 1
    advantages = torch.zeros(num_tokens).index_fill_(0, rows, -2.0)
    bounds = torch.tensor([0, num_tokens])
    inputs = LossInputs(PolicyObjective(mpt_probability=None), bounds, 7.0, token_advantages=advantages)
    hidden.requires_grad_()
    weight.requires_grad_()
    found = linear_policy_loss(hidden, weight, targets, inputs)
    found.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert torch.equal(hidden.grad.any(1).nonzero()[:, 0], rows) and found.entropy.isfinite().all()

    def plain(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        own, head = (each.detach().to(dtype).requires_grad_() for each in (hidden[rows], weight))
        logp = torch.log_softmax(own @ head.t(), dim=-1)
        taken, entropy = logp.gather(1, targets[rows, None])[:, 0], -(logp.exp() * logp).sum(-1)
        (2 * taken / 7).sum().backward()
        assert own.grad is not None and head.grad is not None
        return taken.detach(), entropy.detach(), own.grad, head.grad

    results = found.logprobs[rows], found.entropy[rows], hidden.grad[rows], weight.grad
    names = ("logprobs", "entropy", "hidden.grad", "weight.grad")
    for name, *values in zip(names, results, plain(torch.float64), plain(dtype), strict=True):
        assert_accurate(name, *values)
