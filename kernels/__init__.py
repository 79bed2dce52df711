"""Fast tensor operations for multi-agent RL. Knows torch and nothing else of marsrl."""

from .attention_decode import attention_decode
from .attention_varlen import attention_varlen
from .bad_targets import raise_bad_targets
from .dispatch import Explanation, explain
from .group_advantage import group_advantage
from .grouped_linear import grouped_linear
from .linear_logprob import LogProb, linear_logprob
from .linear_policy_loss import linear_policy_loss
from .mpt_gate import mpt_gate
from .objective import PolicyLoss, PolicyObjective
from .packing import Compacted, Packed, compact, pack, uncompact, unpack
from .policy_loss import policy_loss

__all__ = [
    "Compacted",
    "Explanation",
    "LogProb",
    "Packed",
    "PolicyLoss",
    "PolicyObjective",
    "attention_decode",
    "attention_varlen",
    "compact",
    "explain",
    "group_advantage",
    "grouped_linear",
    "linear_logprob",
    "linear_policy_loss",
    "mpt_gate",
    "pack",
    "policy_loss",
    "raise_bad_targets",
    "uncompact",
    "unpack",
]
