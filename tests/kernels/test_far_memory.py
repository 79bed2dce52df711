"""Elements beyond 2^31 are reached on the CPU: tensors that far apart against the same numbers side by side, and a head with so
many logits."""

from functools import partial

import pytest
import torch
from every_op import TIERS, force
from fused_head import forced, head_case, run_policy_loss
from layout_cases import OPS, check_every_layout, far_apart

from marsrl.kernels import PolicyObjective
from marsrl.kernels.testing import assert_accurate


@pytest.mark.parametrize("name, tier", [each for each in TIERS if each[0] in OPS])
def test_every_tensor_is_read_however_far_apart_its_elements_lie(name, tier, monkeypatch):
    force(monkeypatch, name, tier)
    dims = (0, 2) if name.startswith("grouped_linear") else range(4)  # BLAS cannot reach columns of x so far apart
    check_every_layout(name, {f"far apart, {dim}": partial(far_apart, dim=dim) for dim in dims})


@pytest.mark.slow  # 2.2 billion logits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_behind_2_to_the_31_logits_has_the_values_of_its_own(dtype):
    """All rows have statistics; those at both ends, and around logit 2^31, also gradients, into which no others enter."""
    num_tokens, vocab = 14_208, 151_936
    crossing = 2**31 // vocab
    rows = torch.tensor([0, 1, crossing - 1, crossing, crossing + 1, num_tokens - 2, num_tokens - 1])
    hidden, weight, targets = head_case(num_tokens, 8, vocab)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    targets[-1] = vocab - 1
    advantages = torch.zeros(num_tokens).index_fill_(0, rows, -2.0)

    def results(kept: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        arguments = {"objective": PolicyObjective(mpt_probability=None), "normaliser": 7.0}
        arguments |= {"token_advantages": advantages[kept], "cu_seqlens": torch.tensor([0, len(kept)])}
        found, gradients = run_policy_loss((hidden[kept], weight, targets[kept]), arguments, dtype)
        return [found.logprobs, found.entropy, *gradients]

    whole = results(torch.arange(num_tokens), dtype)
    assert torch.equal(whole[2].any(1).nonzero()[:, 0], rows) and whole[1].isfinite().all()
    with forced("reference"):
        exact, plain = results(rows, torch.float64), results(rows, dtype)
    names, found = ("logprobs", "entropy", "hidden.grad", "weight.grad"), [each[rows] for each in whole[:3]]
    for name, *values in zip(names, [*found, whole[3]], exact, plain, strict=True):
        assert_accurate(name, *values)
