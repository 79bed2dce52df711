"""What loss.correction does with samples of an older policy: each token's weight worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from marsrl.kernels import LossInputs, PolicyObjective, policy_loss
from marsrl.trainer.config import LossConfig

MASK: dict[str, Any] = {"correction": "sequence_mask"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"correction": "tis"}, [0.25, 1.1, 2.0, 2.0, 0.6, 0.9]),  # cut off at two
        ({"correction": "icepop"}, [0, 1, 1, 0, 1, 1]),  # masks tokens outside a half and five
        # of a sample the geometric mean: (0.25 x 1.1 x 3 x 6)^(1/4) = 1.49 and (0.6 x 0.9)^(1/2) = 0.73
        (MASK, [1] * 6),
        (MASK | {"correction_low": 0.75}, [1, 1, 1, 1, 0, 0]),
        (MASK | {"correction_high": 1.4}, [0, 0, 0, 0, 1, 1]),
    ],
)
def test_a_token_weighs_what_its_policy_s_distance_earns(settings: dict[str, Any], expected: list[float]) -> None:
    """Of two samples, of advantage 1 and -1. A weight of 1 is the plain policy gradient."""
    loss, logprobs = LossConfig(**settings), torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    drift = torch.tensor([0.25, 1.1, 3.0, 6.0, 0.6, 0.9], dtype=torch.float64)  # p_trainer / p_rollout
    bounds = loss.model_dump(include={"correction", "correction_low"}) | {"correction_high": loss.upper_bound}
    inputs = LossInputs(
        objective=PolicyObjective(**bounds, mpt_probability=None),
        advantages=torch.tensor([1.0, -1.0]),
        cu_seqlens=torch.tensor([0, 4, 6]),
        rollout_logprobs=logprobs.detach() - drift.log(),
        normaliser=6.0,
    )
    found = policy_loss(logprobs, torch.zeros_like(drift), inputs)
    weights = -found.coefficient * 6 * torch.tensor([1, 1, 1, 1, -1, -1])
    assert weights.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert float(found.agent_sums["masked_tokens"].sum()) == expected.count(0)
    assert float(found.agent_sums["tokens"].sum()) == 6  # masked ones stay in the count
