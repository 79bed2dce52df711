"""The policy objective: options, inputs and results of a loss."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

# Sums per agent, in the order in which the kernels write them.
METRICS = ("loss", "clipped_tokens", "masked_tokens", "clamped_tokens", "entropy", "kl", "tokens")
# Log-ratios are clamped to +-20 nats before they are exponentiated, so that an infinite ratio times an advantage of 0 makes
# no NaN; e^20 = 4.9e8. verl clamps the ratio, k3 and the rollout correction alike (compute_policy_loss, kl_penalty,
# SAFETY_BOUND).
LOG_RATIO_BOUND = 20.0
NUM_OPTIONS = 8  # length of PolicyObjective.options


@dataclass(frozen=True)
class PolicyObjective:
    """Options of the token loss; the defaults are GRPO/DAPO's clipped surrogate with DMMPT.

    A trained token adds, times its sequence's weight and divided by the normaliser,

        -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  +  kl_coef KL  -  entropy_coef H

    (arXiv:1707.06347, eq. 7; arXiv:2503.14476, eq. 8 for the two clip ends.)

    Fields:
        dual_clip: for A < 0 the surrogate is at least dual_clip * A (arXiv:1912.09729, eq. 5); above 1, None: off.
        ratio: "token", or "sequence" = geometric mean of the sequence's token ratios; the gradient reaches each token
            through its own log-prob (GSPO-token, arXiv:2507.18071, eq. 14).
        kind: "clip", or "cispo" = clip(r) held constant, times A log p (arXiv:2506.13585, eq. 4).
        correction: for the mismatch d = exp(trainer's log-prob - rollout_logprobs). The trainer's log-prob is old_logprobs,
            or the current one if that is None. "tis": w = min(d, correction_high), a constant.
            "icepop": tokens with d outside [correction_low, correction_high] are masked. "sequence_mask": samples
            whose geometric mean of d is outside are masked.
        kl: estimate of KL(policy || reference) by x = log p - reference_logprobs: k1 = x, k2 = x^2 / 2,
            k3 = exp(-x) + x - 1, times the token's importance i = p / p_rollout (without rollout_logprobs
            p / p_old; without both, i = 1). The gradient is i x for all three: the gradient of KL(policy || reference) by
            the score function, which i k3 has if i is differentiated (arXiv:2512.02556), and i k2 if i is constant.
            With "tis", i is at most correction_high.
        mpt_probability: in samples whose gate is set, tokens with p >= this are masked (arXiv:2507.19766); None: off.

    A masked token loses every term and stays in the normaliser.

    Clamping: the log of r, of d and of i, and the x of k3's value, are clamped to +-LOG_RATIO_BOUND. Beyond it, as through
    torch.clamp, no gradient passes through r. The gradients of "cispo", where r is a constant, and of the KL term are unchanged.

    Numbers that are not finite: NaN or infinity in anything that a trained token reads makes the loss not finite, and that
    token's coefficient too. A token reads its log-prob, advantage, weight and, if given, old log-prob, its rollout_logprobs with
    a correction or a KL term, its reference_logprobs with a KL term, its entropy with a bonus. Values of tokens that are outside
    the mask, dropped, or masked by the gate or a correction are not read: they add 0 to loss and gradient. Only finite numbers
    mask a token: a d that is not finite is never out of bounds, a log-prob that is not finite is not above mpt_probability. The
    means over a sequence (ratio "sequence", "sequence_mask") read all of its tokens in the mask.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio: Literal["token", "sequence"] = "token"
    kind: Literal["clip", "cispo"] = "clip"
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    correction_low: float = 0.5
    correction_high: float = 2.0
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    mpt_probability: float | None = 0.99

    @property
    def options(self) -> tuple[float, ...]:
        """Options as numbers, in the order of struct Objective (csrc/include/policy_objective.h)."""
        return (
            *(self.clip_low, self.clip_high, self.dual_clip or 0.0),
            *(self.correction_low, self.correction_high, self.kl_coef, self.entropy_coef),
            2.0 if self.mpt_probability is None else self.mpt_probability,
        )

    def __post_init__(self) -> None:
        for name in ("ratio", "kind", "correction", "kl"):
            allowed = get_args(type(self).__annotations__[name])
            if getattr(self, name) not in allowed:
                raise ValueError(f"PolicyObjective: {name} is {getattr(self, name)!r}, expected {' or '.join(allowed)}")
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                f"PolicyObjective: clip_low={self.clip_low}, clip_high={self.clip_high}; "
                "expected 0 <= clip_low <= 1 and 0 <= clip_high"
            )
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"PolicyObjective: dual_clip is {self.dual_clip}, expected above 1 + clip_high = {1 + self.clip_high}"
            )
        if not 0 <= self.correction_low <= self.correction_high:
            raise ValueError(
                f"PolicyObjective: correction_low={self.correction_low}, correction_high={self.correction_high}; "
                "expected 0 <= correction_low <= correction_high"
            )


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a policy loss for a packed micro-batch: T tokens, S sequences.

    Fields:
        cu_seqlens: [S+1] int, boundaries of the packed sequences; empty ones are allowed.
        normaliser: number or one-element tensor; the loss is divided by it, once.
        advantages | token_advantages: [S] or [T] float, exactly one.
        mask: [T] bool, True = the token is trained; None = all. Nothing is read where it is False.
        agent_of: [S] int in [0, num_agents); None = one agent.
        gate: [S] bool from mpt_gate; None = no well-mastered token is masked.
        old_logprobs: [T] float, nats, of the policy before the update; None = pseudo on-policy: ratio 1, gradient of
            A log p.
        rollout_logprobs: [T] float, nats, of the policy that drew the token; needed by correction, and weights kl.
        reference_logprobs: [T] float; needed by kl.
        weights: [S] float, factor on every term of a sequence's tokens, KL and entropy bonus included; None = 1.
        dropped: [T] bool, tokens that are masked whatever the gate and the correction say; None = none.
    """

    objective: PolicyObjective
    cu_seqlens: Tensor
    normaliser: float | Tensor
    advantages: Tensor | None = None
    token_advantages: Tensor | None = None
    mask: Tensor | None = None
    agent_of: Tensor | None = None
    num_agents: int = 1
    gate: Tensor | None = None
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    weights: Tensor | None = None
    dropped: Tensor | None = None


@dataclass(frozen=True)
class PolicyTokens:
    """LossInputs, checked, with one element per packed token.

    advantages [T]; weights [T], None: 1; mask [T] bool, None: all trained; cu_seqlens [S+1] int; sequence_of, agent_of
    [T] int64; gate [T] bool; dropped [T] bool; old_logprobs, rollout_logprobs, reference_logprobs [T], nats: any float
    for the reference, float32 and contiguous for row kernels. log_ratio, log_drift [T] float32: means over the sequence,
    which replace logprobs - old_logprobs and the log of the token's d. normaliser: number, or one element on the device.
    None: not given, or not needed.
    Values of masked tokens are never read, and may be anything, NaN included.
    """

    objective: PolicyObjective
    advantages: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor
    sequence_of: Tensor
    agent_of: Tensor | None
    num_agents: int
    gate: Tensor | None
    old_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    normaliser: float | Tensor
    weights: Tensor | None = None
    dropped: Tensor | None = None
    log_ratio: Tensor | None = None
    log_drift: Tensor | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """Result of linear_policy_loss and policy_loss.

    loss: [] float32, the weighted sum over this rank's tokens / normaliser, to be minimised; the one field with a gradient.
    logprobs, entropy: [T] float32, nats; 0 where the mask is off.
    coefficient: [T] float32, dloss/dlogprobs; 0 where the mask is off.
    agent_sums: {metric: [A] float32} per agent. "loss" adds up to the loss; "clipped_tokens", "masked_tokens" (by the
        gate, a correction, or dropped; they lost every term), "clamped_tokens" (not masked, with a log of r, of d or of i, or an
        x of k3 beyond LOG_RATIO_BOUND) and "tokens" are counts; "entropy" and "kl" (times i) are sums in nats over all tokens
        of the mask.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    coefficient: Tensor
    agent_sums: dict[str, Tensor]
