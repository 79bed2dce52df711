"""Interface of the row kernels. All implementations share chunks, GEMMs and autograd.

    for each chunk of tokens                                      who
        logits [R, V] float32 = hidden @ weight.T                 RowKernels, by default gemms.py
        statistics (or partials and an all-gather, shards.py)     RowKernels
        terms.evaluate: coefficients and sums of the loss         PolicyTerms
        gradients: rows with a coefficient to dz, side by side    RowKernels
        (on the CPU these three are one pass: terms.in_one_walk)
        dX, dW from dz when enough rows are together              gemms.py, chunked_head.py

A bfloat16 model on the CPU takes a tile of the vocabulary at a time (tiles.py).

Arrays named [T] belong to all packed tokens; a kernel reads and writes them at the tokens of its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from marsrl.kernels.head.objective import PolicyTokens
from marsrl.kernels.head.rows.subset import LateCount, Rows

if TYPE_CHECKING:
    from marsrl.kernels.head.gemms import HeadGemms
    from marsrl.kernels.head.vocabulary import Head


@dataclass(frozen=True)
class Statistics:
    """Softmax statistics per token [T] float32: log-prob of the target, entropy (nats), largest raw logit, log of the sum.

    With d = (z - maximum) / tau:  log_sum = log sum e^d,  log p_y = d_y - log_sum,  H = log_sum - sum d e^d / sum e^d.
    """

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    log_sum: Tensor

    @staticmethod
    def zeros(num_tokens: int, device: torch.device) -> "Statistics":
        return Statistics(*torch.zeros(4, num_tokens, dtype=torch.float32, device=device).unbind())

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """Arrays in the order of the kernels' arguments."""
        return self.logprobs, self.entropy, self.maximum, self.log_sum


@dataclass(frozen=True)
class Slopes:
    """Inputs of a token's dz: its statistics, dL/dlogp and dL/dH [T] float32."""

    statistics: Statistics
    coefficient: Tensor
    entropy_coefficient: Tensor

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """Arrays in the order of the kernels' arguments."""
        return *self.statistics.arrays, self.coefficient, self.entropy_coefficient


class PolicyTerms(Protocol):
    """The objective, evaluated token by token.

    coefficient, entropy_coefficient: [T] float32, dL/dlogp and dL/dH, 0 for tokens not evaluated.
    """

    coefficient: Tensor
    entropy_coefficient: Tensor

    @property
    def in_one_walk(self) -> "Callable[[Tensor, Rows, Head, Statistics, Tensor, Tensor], LateCount] | None":
        """Function that does RowKernels.statistics, `evaluate` and RowKernels.gradients in one pass, while a row is cached.

        Its arguments are logits, rows, head, statistics, out and active. None: these are separate calls, as on a device.
        """

    def evaluate(self, rows: Rows) -> None:
        """Evaluate these tokens, each once; tokens outside the mask are skipped."""

    def sums(self) -> Tensor:
        """Return sums over the tokens evaluated so far, with the same bits in every run.

        [A, len(METRICS)] float64 per agent, in the order of objective.METRICS.
        """


class RowKernels:
    """Operations on rows of logits, by one implementation.

    is_host: results are complete when a call returns, and `gradients` overwrites the logits; otherwise calls queue work on
    the current stream without waiting, and `gradients` writes to a second buffer.

    product: raw logits [R, V] float32, row-major, before the temperature, or the result of an overridden `multiply`.
    """

    is_host: bool

    def multiply(self, gemms: "HeadGemms", hidden: Tensor, rows: Rows, head: "Head", out: Tensor) -> Any:
        """Multiply these rows' hidden [R, H] into out [R, V] float32; -inf outside of each row's support."""
        gemms.logits(hidden, out)
        head.restrict_(out, rows)
        return out

    def statistics(self, product: Any, rows: Rows, head: "Head", out: Statistics) -> None:
        """Fill `out` at these rows.

        Columns from head.num_columns to the stride of the logits are padding and may hold anything. A target outside the
        vocabulary gives NaN if not is_host; check_values reports it.
        """
        raise NotImplementedError

    def partials(self, product: Any, rows: Rows, head: "Head") -> Tensor:
        """Return [4, R] float64 of this vocabulary shard: maximum, sum e^d, sum d e^d, raw logit of the target.

        The target's logit is 0 where another shard owns it. d is relative to the shard's own maximum, which is -inf without
        real columns.
        """
        raise NotImplementedError

    def policy_terms(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor) -> PolicyTerms:
        """Create an evaluator for one call.

        All arrays are contiguous, floats float32. logprobs, entropy [T] must be complete at a token when it is evaluated.
        """
        raise NotImplementedError

    def gradients(
        self, product: Any, rows: Rows, head: "Head", slopes: Slopes, out: Tensor, active: Tensor
    ) -> LateCount:
        """Write dz of the n rows with a coefficient or entropy_coefficient to out[:n], and their tokens to active[:n].

            dz_v = [c (1[v = target] - p_v) - e p_v (log p_v + H)] / tau

        and 0 in padding; 1 - p of the target is computed by expm1. out [>= R, V] has the GEMM's dtype (bfloat16 or float32).
        It is a second buffer, or if is_host the logits themselves, float32. active: [>= R] int64. Returns n.
        """
        raise NotImplementedError
