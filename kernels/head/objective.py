"""The policy objective: its options, its inputs, and the results of a loss."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

# Names of the sums per agent, in the order in which the kernels write the sums.
METRICS = ("loss", "clipped_tokens", "masked_tokens", "clamped_tokens", "entropy", "kl", "tokens")
# Log-ratios are clamped to +-20 nats before they are exponentiated (e^20 = 4.9e8), so that an infinite ratio times an advantage
# of 0 does not become NaN. verl clamps the same quantities: the ratio, k3 and the rollout correction (compute_policy_loss,
# kl_penalty, SAFETY_BOUND).
LOG_RATIO_BOUND = 20.0
NUM_OPTIONS = 8  # length of PolicyObjective.options


@dataclass(frozen=True)
class PolicyObjective:
    """Options of the token loss.

    The defaults are GRPO/DAPO's clipped surrogate with DMMPT (masking of well-mastered tokens).

    Each trained token adds the following to the loss, times its sequence's weight and divided by the normaliser:

        -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  +  kl_coef KL  -  entropy_coef H

    (arXiv:1707.06347, eq. 7; arXiv:2503.14476, eq. 8 for the two clip ends.) r is the probability ratio of the policy to the old
    policy, A the advantage, and H the token's entropy; `correction` defines w (default 1), and `kl` defines KL.

    Fields:
        dual_clip: for A < 0, the surrogate is at least dual_clip * A (arXiv:1912.09729, eq. 5). A number above 1 + clip_high;
            None: off.
        ratio: "token", or "sequence" = geometric mean of the sequence's token ratios; the gradient reaches each token
            through its own log-prob (GSPO-token, arXiv:2507.18071, eq. 14).
        kind: "clip", or "cispo" = clip(r) held constant, times A log p (arXiv:2506.13585, eq. 4).
        correction: treatment of the mismatch d = exp(trainer's log-prob - rollout_logprobs). The trainer's log-prob is
            old_logprobs, or the current one if that is None. "tis": w = min(d, correction_high), a constant. "icepop": tokens
            with d outside [correction_low, correction_high] are masked. "sequence_mask": samples whose geometric mean of d is
            outside are masked.
        kl: estimator of KL(policy || reference) from x = log p - reference_logprobs: k1 = x, k2 = x^2 / 2, k3 = exp(-x) + x - 1.
            Its value is multiplied by the token's importance i = p / p_rollout, which is p / p_old without rollout_logprobs and 1
            without both. With "tis", i is at most correction_high. The gradient with respect to log p is i x for all three, the
            score-function gradient of KL(policy || reference). It is the derivative of i k3 if i is differentiated too
            (arXiv:2512.02556), and of i k2 if i is held constant.
        mpt_probability: in samples whose gate is set, mask tokens of at least this probability (arXiv:2507.19766); None: off.

    A masked token adds nothing to the loss, but still counts in the normaliser.

    Clamping: the logarithms of r, d and i, and the x in k3's value, are clamped to +-LOG_RATIO_BOUND. Beyond the bound no
    gradient passes through r, as in torch.clamp. This does not affect the gradients of the KL term and of "cispo", where r is a
    constant.

    NaN and infinity: if an input of a trained token is not finite, neither are the loss and the token's coefficient. The inputs
    are the token's log-prob, advantage, weight and, if given, old log-prob. A correction or a KL term also reads
    rollout_logprobs, a KL term reference_logprobs, and an entropy bonus the entropy. Tokens that are outside the mask, dropped,
    or masked by the gate or a correction add 0 to loss and gradient, whatever their values. Only finite numbers mask a token: a d
    that is not finite counts as inside the bounds, and a log-prob that is not finite as below mpt_probability. The means over a
    sequence (ratio "sequence", "sequence_mask") read all of the sequence's tokens in the mask.
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
        """The options as numbers, in the order of struct Objective in csrc/include/policy_objective.h."""
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
        normaliser: number or one-element tensor by which the sum over tokens is divided.
        advantages: [S] float, one per sequence. token_advantages: [T] float, one per token. Pass exactly one of the two.
        mask: [T] bool, True = the token is trained; None = all are. Other inputs are not read where it is False.
        agent_of: [S] int in [0, num_agents), the agent of each sequence; None = one agent.
        gate: [S] bool from mpt_gate; None = no well-mastered token is masked.
        old_logprobs: [T] float, nats, log-probs of the policy before the update. None = pseudo on-policy: the ratio is 1, and
            the gradient is that of A log p.
        rollout_logprobs: [T] float, nats, log-probs of the policy that drew the tokens; required by `correction`, and used in the
            importance of `kl`.
        reference_logprobs: [T] float, nats, log-probs of the reference policy; required by `kl`.
        weights: [S] float, factor on every term of a sequence's tokens, including KL and entropy bonus; None = 1.
        dropped: [T] bool, tokens that are masked in addition to those masked by gate and correction; None = none.
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
    """Checked LossInputs, expanded to one element per packed token.

    Fields have the same meaning as in LossInputs, and are None if not given or not needed. All are [T], except cu_seqlens [S+1]
    and normaliser, a number or a one-element tensor. Floats have any dtype for the reference; for row kernels they are contiguous
    float32. Values outside the mask are never read, and may be anything, NaN included.

    sequence_of: [T] int64, the sequence of each token.
    log_ratio: [T] float32, mean of logprobs - old_logprobs over the token's sequence; None: use the token's own.
    log_drift: [T] float32, mean of log d over the token's sequence; None: use the token's own.
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

    loss: [] float32, the weighted sum over this rank's tokens divided by the normaliser, to be minimised. Only this field has a
    gradient.
    logprobs, entropy: [T] float32, nats; 0 where the mask is off.
    coefficient: [T] float32, dloss/dlogprobs; 0 where the mask is off.
    agent_sums: {metric: [A] float32}, sums over each agent's tokens. "loss" adds up to `loss` over the agents. "tokens",
        "clipped_tokens", "masked_tokens" (by the gate or a correction, or dropped) and "clamped_tokens" are counts. A clamped
        token is not masked, and has a value beyond LOG_RATIO_BOUND (PolicyObjective, Clamping). "entropy" and "kl" (times the
        importance) are sums in nats over all tokens in the mask.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    coefficient: Tensor
    agent_sums: dict[str, Tensor]
