"""Interface of the row kernels. All implementations share chunks, GEMMs and autograd.

    for each chunk of tokens                                      who
        logits [R, V] float32 = hidden @ weight.T                 RowKernels, by default gemms.py
        statistics (or partials and an all-gather, shards.py)     RowKernels
        terms.evaluate: coefficients and sums of the loss         PolicyTerms
        gradients: dz of the active rows, side by side            RowKernels
        (on the CPU these three are one pass: terms.in_one_walk)
        dX, dW from dz when enough rows are buffered              gemms.py, chunked_head.py

dz is the gradient of the loss with respect to the logits. A row is active if its token's coefficient or entropy_coefficient is
not 0; dz of other rows is 0 and never computed.

For a bfloat16 model on the CPU, tiles.py runs these steps one vocabulary tile at a time.

Arrays [T] have one element per packed token; a kernel reads and writes only the elements of its rows.
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
    """Softmax statistics per token, [T] float32.

    logprobs: log-prob of the target. entropy: in nats. maximum: largest raw logit z. log_sum: log of the sum below.

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
    """Inputs from which dz of a token is computed: its statistics, dL/dlogp and dL/dH, each [T] float32."""

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
        """Function that computes statistics, objective and gradients in one pass, or None.

        It does RowKernels.statistics, `evaluate` and RowKernels.gradients for one row after the other, while the row is in the
        cache. Its arguments are logits, rows, head, statistics, out and active. None: there is no such function, as on a device.
        """

    def evaluate(self, rows: Rows) -> None:
        """Evaluate the objective at these tokens, except those outside the mask.

        Each token may be evaluated only once.
        """

    def sums(self) -> Tensor:
        """Return sums over the tokens evaluated so far, [A, len(METRICS)] float64.

        Row a has the sums of agent a, in the order of objective.METRICS. The sums are bitwise reproducible.
        """


class RowKernels:
    """Operations on rows of logits, by one implementation.

    is_host: if True, results are complete when a call returns, and `gradients` overwrites the logits. If False, calls queue work
    on the current stream without waiting, and `gradients` writes to a second buffer.

    The argument `product` is what `multiply` returned, by default the raw logits [R, V] float32, row-major, before the
    temperature.
    """

    is_host: bool

    def multiply(self, gemms: "HeadGemms", hidden: Tensor, rows: Rows, head: "Head", out: Tensor) -> Any:
        """Compute the logits of hidden states [R, H] into out [R, V] float32.

        Logits outside of a row's support (support.py) are -inf.
        """
        gemms.logits(hidden, out)
        head.restrict_(out, rows)
        return out

    def statistics(self, product: Any, rows: Rows, head: "Head", out: Statistics) -> None:
        """Fill `out` at these rows.

        Columns from head.num_columns to the stride of the logits are padding, and are not read. If is_host is False, a target
        outside the vocabulary makes the log-prob NaN; bad_values.py reports such targets.
        """
        raise NotImplementedError

    def partials(self, product: Any, rows: Rows, head: "Head") -> Tensor:
        """Return this shard's partial statistics, [4, R] float64.

        The four are the maximum, sum e^d, sum d e^d, and the target's raw logit. The target's logit is 0 if another shard owns
        the target. d is relative to the maximum of this shard, which is -inf if the shard is all padding.
        """
        raise NotImplementedError

    def policy_terms(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor) -> PolicyTerms:
        """Create the evaluator of the objective for one call of a loss.

        logprobs, entropy: [T] float32; a token's elements must be set before the token is evaluated. All arrays, including those
        of `tokens`, are contiguous, and floats are float32.
        """
        raise NotImplementedError

    def gradients(
        self, product: Any, rows: Rows, head: "Head", slopes: Slopes, out: Tensor, active: Tensor
    ) -> LateCount:
        """Write dz of the n active rows to out[:n] and their tokens to active[:n]; return n.

            dz_v = [c (1[v = target] - p_v) - e p_v (log p_v + H)] / tau

        with c = dL/dlogp, e = dL/dH and temperature tau; 0 in padding columns. 1 - p of the target is computed by expm1.

        out: [>= R, V] in the GEMM's dtype (bfloat16 or float32), a second buffer; if is_host, the float32 logits themselves.
        active: [>= R] int64.
        """
        raise NotImplementedError
