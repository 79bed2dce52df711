"""Fast tensor operations for multi-agent RL. Depends only on torch, not on the rest of marsrl.

Importing the package has one side effect: it registers some operations with torch, as torch.ops.marsrl.*.
"""

from marsrl.kernels.attention_decode import attention_decode
from marsrl.kernels.attention_varlen import attention_varlen
from marsrl.kernels.dispatch import Explanation, explain
from marsrl.kernels.group_advantage import group_advantage
from marsrl.kernels.grouped_linear import grouped_linear
from marsrl.kernels.head.bad_values import raise_bad_values
from marsrl.kernels.head.objective import LossInputs, PolicyLoss, PolicyObjective
from marsrl.kernels.head.support import Support
from marsrl.kernels.linear_logprob import LogProb, linear_logprob
from marsrl.kernels.linear_policy_loss import linear_policy_loss
from marsrl.kernels.moe_permute import RowOrder, moe_permute, moe_unpermute
from marsrl.kernels.mpt_gate import mpt_gate
from marsrl.kernels.packing import Packed, kept_rows, pack
from marsrl.kernels.policy_loss import policy_loss
from marsrl.kernels.policy_loss.marks import TokenMarks, token_marks
from marsrl.kernels.rms_norm import rms_norm
from marsrl.kernels.swiglu import swiglu

__all__ = [
    "Explanation",
    "LogProb",
    "LossInputs",
    "Packed",
    "PolicyLoss",
    "PolicyObjective",
    "RowOrder",
    "Support",
    "TokenMarks",
    "attention_decode",
    "attention_varlen",
    "explain",
    "group_advantage",
    "grouped_linear",
    "kept_rows",
    "linear_logprob",
    "linear_policy_loss",
    "moe_permute",
    "moe_unpermute",
    "mpt_gate",
    "pack",
    "policy_loss",
    "raise_bad_values",
    "rms_norm",
    "swiglu",
    "token_marks",
]
