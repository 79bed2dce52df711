"""grouped_linear: each expert's linear layer on its own rows."""

from collections.abc import Sequence

from torch import Tensor

from ..checks import FLOATS, INTEGERS, check
from ..dispatch import Implementation, Op
from .cpu import grouped_linear_cpu
from .reference import grouped_linear_reference


def grouped_linear(x: Tensor, weights: Tensor, tokens_per_expert: Tensor | Sequence[int]) -> Tensor:
    """Rows of x, sorted by expert, times the transposed weight of their expert; differentiable.

    Args:
        x: [T, K] float.
        weights: [E, N, K], same dtype.
        tokens_per_expert: [E] int tensor on the CPU, or a list: how many rows each expert has; they add up to T.

    Returns:
        [T, N] in the dtype of x.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("grouped_linear", "x", x, (None, None), FLOATS)
    check("grouped_linear", "weights", weights, (None, None, x.shape[1]), (x.dtype,), x.device)
    if isinstance(tokens_per_expert, Tensor):
        check("grouped_linear", "tokens_per_expert", tokens_per_expert, (weights.shape[0],), INTEGERS)
        counts = tokens_per_expert.tolist()
    else:
        counts = list(tokens_per_expert)
    if len(counts) != weights.shape[0] or sum(counts) != x.shape[0] or any(count < 0 for count in counts):
        raise ValueError(
            f"grouped_linear: tokens_per_expert is {counts}, "
            f"expected {weights.shape[0]} counts that add up to {x.shape[0]} rows"
        )
    return _OP(x, weights, counts)


def _why_not_cpu(x: Tensor, *_: object) -> str | None:
    return None if x.device.type == "cpu" else f"x is on {x.device}, this one is for the CPU"


_OP = Op(
    "grouped_linear",
    (
        Implementation("cpu", grouped_linear_cpu, _why_not_cpu),
        Implementation("reference", grouped_linear_reference),
    ),
)
