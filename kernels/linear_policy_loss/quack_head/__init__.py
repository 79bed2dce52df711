"""Head that uses QuACK's GEMM for Hopper (github.com/Dao-AILab/quack).

The GEMM's epilogue writes exponentials instead of logits. This moves 6 bytes per logit through memory; cuBLAS and the row kernels
move 18.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from marsrl.kernels.head.gradients import Wanted
from marsrl.kernels.head.objective import PolicyTokens
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.policy_loss.terms import needs_whole_sequences
from marsrl.kernels.triton_machine import machine_lacks_cuda, why_not_triton

ROWS = 128  # rows per tile of a product, and columns per tile of the vocabulary


class UnlikelyTarget(ArithmeticError):
    """A target has a log-prob below -69, so exponentials relative to its logit may overflow bfloat16."""


@cache
def machine_lacks_quack() -> str | None:
    """Return None if there is a GPU and QuACK can be imported, else the reason."""
    if reason := machine_lacks_cuda():
        return reason
    if find_spec("quack") is None:
        return "quack is not installed"
    try:
        import_module("marsrl.kernels.linear_policy_loss.quack_head.gemms")
    except (ImportError, OSError, AttributeError, TypeError) as error:  # another release, or a missing library
        return f"quack is installed but cannot be imported: {error}"
    return None


def why_not_quack(head: Head, hidden: Tensor, tokens: PolicyTokens, wanted: Wanted) -> str | None:
    """Return None if QuACK's head can serve this call, else the reason. Call it after machine_lacks_quack."""
    weight = head.weight
    if reason := why_not_triton("hidden", hidden):
        return reason
    if not hidden.dtype == weight.dtype == torch.bfloat16:
        return f"hidden is {hidden.dtype} and weight {weight.dtype}, but quack computes in bfloat16".replace(
            "torch.", ""
        )
    major, minor = torch.cuda.get_device_capability(hidden.device)
    if (major, minor) != (9, 0):
        return f"the GPU has compute capability {major}.{minor}, quack supports 9.0"
    if weight.shape[0] % ROWS or weight.shape[1] % 8:
        return f"weight is {list(weight.shape)}, expected multiples of {ROWS} and 8"
    if not weight.is_contiguous() or weight.data_ptr() % 16 or hidden.data_ptr() % 16:
        return "weight is not contiguous, or weight or hidden is not aligned to 16 bytes"
    if not wanted.any:
        return "no gradient is needed"
    if head.is_sharded or head.num_columns != head.width:
        return "the vocabulary is sharded or padded"
    if head.support is not None:
        return "support is given"
    if needs_whole_sequences(tokens):
        return "the objective first needs the log-probs of whole sequences"
    if tokens.objective.entropy_coef:
        return "the objective has an entropy bonus, whose gradient needs the logits"
    return None
