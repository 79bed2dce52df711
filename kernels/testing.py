"""For tests and benchmarks: how a kernel's result is judged, and the cases that every policy loss must pass."""

from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.head.objective import PolicyObjective


def off_by_an_ulp(values: Tensor) -> Tensor:
    """The values in float64, each an ulp of float32 up or down: the same ones for the same shape, on every machine."""
    signs = torch.randint(0, 2, values.shape, generator=torch.Generator().manual_seed(0)).to(values.device) * 2 - 1
    return values.double() * (1 + torch.finfo(torch.float32).eps * signs)


def assert_accurate(
    name: str,
    found: Tensor,
    exact: Tensor,
    plain: Tensor,
    scale: float = 0.0,
    moved: Tensor | None = None,
    terms: int = 1,
) -> None:
    """Fail unless the largest error of `found` is at most twice that of plain PyTorch, or 4 ulp of its dtype.

    exact: float64; plain: PyTorch's result at the dtype of the input. An ulp is taken at the largest
    exact value, or at `scale` if that is larger: a sum whose terms cancel passes the size of its terms. A NaN fails.

    moved, terms: where a library forms the products, in an order that it chooses by the processor and by the shape, so
    that neither its error nor plain PyTorch's is known. moved: the exact result for inputs that are off_by_an_ulp; a sum
    of n products of such numbers is off by what n roundings to float32 make of it where they strike its terms at random,
    and adding one after the other strikes sums of up to n terms. So sqrt(terms), the number of the longest sum, times
    |moved - exact| is allowed too: 2 sqrt(n) u for a sum, as in doi:10.1137/18M1226312 with lambda = 2.
    """
    assert found.shape == exact.shape, f"{name}: shape {list(found.shape)}, expected {list(exact.shape)}"
    if found.numel() == 0:
        return
    assert exact.dtype == torch.float64, f"{name}: the judge is {exact.dtype}"
    error = (found.double() - exact).abs().max().item()
    baseline = (plain.double() - exact).abs().max().item()
    ulps = 4 * torch.finfo(found.dtype).eps * max(exact.abs().max().item(), scale)
    allowed = max(2 * baseline, ulps, torch.finfo(found.dtype).tiny)  # below `tiny` numbers are denormal
    if moved is not None:
        allowed = max(allowed, terms**0.5 * (moved - exact).abs().max().item())
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e} (plain PyTorch: {baseline:.3e})"


# name -> (objective, has old log-probs)
OBJECTIVES: dict[str, tuple[PolicyObjective, bool]] = {
    "pseudo on-policy": (PolicyObjective(), False),
    "clip": (PolicyObjective(), True),
    "clip higher, dual clip": (PolicyObjective(clip_high=0.28, dual_clip=1.4), True),
    "no gate": (PolicyObjective(mpt_probability=None), True),
    "strong gate": (PolicyObjective(mpt_probability=0.3), True),
    "cispo": (PolicyObjective(kind="cispo"), True),
    "cispo on-policy": (PolicyObjective(kind="cispo"), False),
    "tis": (PolicyObjective(correction="tis", correction_high=1.1), True),
    "tis on-policy": (PolicyObjective(correction="tis", correction_high=1.1), False),
    "icepop": (PolicyObjective(correction="icepop", correction_low=0.8, correction_high=1.3), True),
    "icepop on-policy": (PolicyObjective(correction="icepop", correction_low=0.8, correction_high=1.3), False),
    "sequence mask": (PolicyObjective(correction="sequence_mask", correction_low=0.95, correction_high=1.1), True),
    "sequence mask on-policy": (
        PolicyObjective(correction="sequence_mask", correction_low=0.95, correction_high=1.1),
        False,
    ),
    "sequence ratio": (PolicyObjective(ratio="sequence", clip_low=0.05, clip_high=0.05), True),
    "sequence ratio on-policy": (PolicyObjective(ratio="sequence"), False),
    "sequence ratio, cispo": (PolicyObjective(ratio="sequence", kind="cispo", clip_low=0.05, clip_high=0.05), True),
    "k1": (PolicyObjective(kl="k1", kl_coef=0.1), True),
    "k2": (PolicyObjective(kl="k2", kl_coef=0.1), True),
    "k3": (PolicyObjective(kl="k3", kl_coef=0.1), True),
    "k3, entropy bonus, tis": (
        PolicyObjective(kl="k3", kl_coef=0.1, entropy_coef=0.05, correction="tis", correction_high=1.2),
        True,
    ),
    "k3, entropy bonus, strong gate": (
        PolicyObjective(kl="k3", kl_coef=0.1, entropy_coef=0.05, mpt_probability=0.3),
        True,
    ),
    "entropy bonus": (PolicyObjective(entropy_coef=0.05), False),
}

WEIGHTED = ("cispo", "sequence mask", "strong gate", "k3, entropy bonus, tis")
"""Objectives that are tried with a weight of each sequence and with dropped tokens; the others are tried without."""


def policy_case(num_tokens: int = 60, noise: float = 0.3, name: str = "") -> tuple[dict[str, Any], Tensor]:
    """(arguments of policy_loss, log-probs [T]); one sequence is empty, agent 1 is absent. name: of OBJECTIVES."""
    cuts = torch.randint(0, num_tokens + 1, (4,)).sort().values.tolist()
    logprobs = -torch.rand(num_tokens) * 3

    def near() -> Tensor:
        return logprobs + noise * torch.randn(num_tokens)

    arguments = {
        "advantages": torch.randn(6),
        "mask": torch.rand(num_tokens) < 0.7,
        "cu_seqlens": torch.tensor(sorted([0, *cuts, cuts[1], num_tokens])),
        "agent_of": torch.tensor([0, 2, 2, 0, 2, 0]),
        "num_agents": 3,
        "gate": torch.arange(6) % 2 == 0,
        "old_logprobs": near(),
        "rollout_logprobs": near(),
        "reference_logprobs": near(),
        "normaliser": 37.0,
    }
    if name in WEIGHTED:
        arguments["weights"] = torch.linspace(0.3, 1.8, 6)
        arguments["dropped"] = torch.arange(num_tokens) % 9 == 4
    return arguments, logprobs


def poison_masked(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with NaN at the masked tokens, which nobody may read."""
    names = ("old_logprobs", "rollout_logprobs", "reference_logprobs")
    given = {name: arguments[name] for name in names if arguments[name] is not None}
    return {**arguments, **{name: values.masked_fill(~arguments["mask"], torch.nan) for name, values in given.items()}}
