"""The policy objective through csrc/cpu: coefficients and sums of listed tokens, without autograd."""

import ctypes

import torch
from torch import Tensor

from .. import library
from ..library import address
from ..objective import METRICS, PolicyObjective, PolicyTokens
from .reference import mean_of_sequence

_KINDS = {"clip": 0, "cispo": 1}
_CORRECTIONS = {"none": 0, "tis": 1, "icepop": 2, "sequence_mask": 0}  # sequence_mask arrives as `dropped`
_KLS = {"none": 0, "k1": 1, "k2": 2, "k3": 3}


def needs_whole_sequences(objective: PolicyObjective, tokens: PolicyTokens) -> bool:
    """True where a token's coefficient depends on current log-probs of other tokens of its sequence."""
    if tokens.old_logprobs is None:
        return objective.correction == "sequence_mask"
    return objective.ratio == "sequence"


class PolicyTermsOnCpu:
    """Evaluates the objective for lists of tokens; the results collect in coefficient, entropy_coefficient and sums.

    Args:
        logprobs, entropy: [T] float32, contiguous; read when `evaluate` names a token. Where needs_whole_sequences
            holds they must be complete before this object is made.
        kept: [n] int64 the tokens of the mask; None: all.
    """

    def __init__(
        self,
        objective: PolicyObjective,
        tokens: PolicyTokens,
        logprobs: Tensor,
        entropy: Tensor,
        kept: Tensor | None,
    ):
        num_tokens = logprobs.numel()
        self.coefficient = torch.zeros(num_tokens)
        self.entropy_coefficient = torch.zeros(num_tokens)
        self.sums = torch.zeros(tokens.num_agents, len(METRICS), dtype=torch.float64)
        log_ratio, dropped = _sequence_constants(objective, tokens, logprobs, kept)
        arrays = {
            "advantage": _float32(tokens.advantages),
            "log_ratio": log_ratio,
            "old_logprobs": _float32(tokens.old_logprobs),
            "rollout_logprobs": _float32(tokens.rollout_logprobs),
            "reference_logprobs": _float32(tokens.reference_logprobs),
            "gate": tokens.gate,
            "dropped": dropped,
            "agent": None if tokens.agent_of is None else tokens.agent_of.long(),
            "logprobs": logprobs,
            "entropy": entropy,
            "coefficient": self.coefficient,
            "entropy_coefficient": self.entropy_coefficient,
            "sums": self.sums,
        }
        self._keep_alive = arrays
        self._tokens = library.Tokens(**{name: address(array) for name, array in arrays.items()})
        self._objective = library.Objective(
            objective.clip_low,
            objective.clip_high,
            objective.dual_clip or 0.0,
            objective.correction_low,
            objective.correction_high,
            objective.kl_coef,
            objective.entropy_coef,
            2.0 if objective.mpt_probability is None else objective.mpt_probability,
            1.0 / float(tokens.normaliser),
            _KINDS[objective.kind],
            _CORRECTIONS[objective.correction],
            _KLS[objective.kl],
        )
        self._evaluate = library.cpu_library().marsrl_policy_terms

    def evaluate(self, token_ids: Tensor | None, first_token: int, count: int) -> None:
        """Evaluate the tokens listed, or `count` from first_token where token_ids is None. Each token once."""
        self._evaluate(
            ctypes.byref(self._objective), ctypes.byref(self._tokens), address(token_ids), first_token, count
        )

    def agent_sums(self) -> dict[str, Tensor]:
        """{metric: [A] float32} of the tokens evaluated so far."""
        return dict(zip(METRICS, self.sums.t().float()))

    def loss(self) -> Tensor:
        """[] float32: the sum of the tokens evaluated so far."""
        return self.sums[:, 0].sum().float()


def _float32(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.detach().float().contiguous()


def _sequence_constants(
    objective: PolicyObjective, tokens: PolicyTokens, logprobs: Tensor, kept: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(log_ratio [T] float32 | None, dropped [T] bool | None): what depends on a sequence as a whole."""
    log_ratio = dropped = None
    if objective.ratio == "sequence" and tokens.old_logprobs is not None:
        log_ratio = _spread_mean(logprobs - tokens.old_logprobs, tokens, kept)
    if objective.correction == "sequence_mask":
        assert tokens.rollout_logprobs is not None
        trainer = logprobs if tokens.old_logprobs is None else tokens.old_logprobs
        drift = _spread_mean(trainer - tokens.rollout_logprobs, tokens, kept).exp()
        dropped = ~((drift >= objective.correction_low) & (drift <= objective.correction_high))
    return log_ratio, dropped


def _spread_mean(values: Tensor, tokens: PolicyTokens, kept: Tensor | None) -> Tensor:
    """[T] float32 the mean over the kept tokens of the sequence, at the kept tokens; 0 elsewhere."""
    if kept is None:
        return mean_of_sequence(values.double(), tokens.sequence_of, tokens.num_sequences).float()
    mean = mean_of_sequence(values[kept].double(), tokens.sequence_of[kept], tokens.num_sequences)
    return torch.zeros(values.numel()).index_copy_(0, kept, mean.float())
