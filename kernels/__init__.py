"""Fast tensor operations for multi-agent RL. Knows torch and nothing else of marsrl."""

from .attention_decode import attention_decode
from .attention_varlen import attention_varlen
from .dispatch import Explanation, explain
from .group_advantage import group_advantage
from .grouped_linear import grouped_linear
from .linear_logprob import LogProb, linear_logprob
from .linear_policy_loss import linear_policy_loss
from .mpt_gate import mpt_gate
from .objective import PolicyLoss, PolicyObjective
from .policy_loss import policy_loss

__all__ = [
    "Explanation",
    "LogProb",
    "PolicyLoss",
    "PolicyObjective",
    "attention_decode",
    "attention_varlen",
    "explain",
    "group_advantage",
    "grouped_linear",
    "linear_logprob",
    "linear_policy_loss",
    "mpt_gate",
    "policy_loss",
]
