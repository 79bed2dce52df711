"""What an implementation does to rows of logits. The chunks, routes, GEMMs and autograd around it are shared.

    for each chunk of tokens                                      who
        logits [R, V] float32 = hidden @ weight.T                 gemms.py
        statistics (or partials and an all-gather, shards.py)     RowKernels
        terms.evaluate: coefficients and sums of the loss         RowKernels
        gradients: rows with a coefficient to dz, side by side    RowKernels
        (on the CPU these three in one: terms.in_one_walk)
        dX, dW from dz when enough rows are together              gemms.py, chunked_head.py

A bfloat16 model on the CPU takes a tile of the vocabulary at a time (tiles.py), with CpuTileKernels. TritonFirstGemm takes the
place of gemms.py and of RowKernels for logits that never leave the product (first_gemm/).

Arrays named [T] belong to all packed tokens; a kernel reads and writes them at the tokens of its rows.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from marsrl.kernels.head.objective import PolicyTokens
from marsrl.kernels.head.rows.statistics import Statistics
from marsrl.kernels.head.rows.subset import LateCount, Rows

if TYPE_CHECKING:
    from marsrl.kernels.head.first_gemm.triton_impl import TritonFirstGemm
    from marsrl.kernels.head.rows.cpu_tiles import CpuTileKernels
    from marsrl.kernels.head.vocabulary import Head


class PolicyTerms(Protocol):
    """The objective evaluated at tokens as they come. coefficient, entropy_coefficient: [T] float32, dL/dlogp, dL/dH,
    0 where nothing was evaluated."""

    coefficient: Tensor
    entropy_coefficient: Tensor

    @property
    def in_one_walk(self) -> Callable[[Tensor, Rows, "Head", Statistics, Tensor, Tensor], LateCount] | None:
        """What RowKernels.statistics, this evaluation and RowKernels.gradients do one after the other, each row while it is
        in the cache: of logits, rows, head, statistics, out and active. None: they stay separate calls, as on a device."""

    def evaluate(self, rows: Rows) -> None:
        """Evaluate these tokens, each token once; those outside the mask may be listed and are skipped."""

    def sums(self) -> Tensor:
        """[A, len(METRICS)] float64 per agent, in the order of objective.METRICS, of the tokens evaluated so far; same bits in
        every run."""


class RowKernels(Protocol):
    """One implementation.

    is_host: results are complete when a call returns, and `gradients` overwrites the logits; else calls queue work on
    the current stream, never wait for it, and `gradients` writes to a second buffer.
    """

    is_host: bool

    @property
    def tiles(self) -> "CpuTileKernels | None":
        """None on a device."""

    @property
    def first_gemm(self) -> "TritonFirstGemm | None":
        """None where the logits come from gemms.py and the statistics from the logits."""

    def statistics(self, logits: Tensor, rows: Rows, head: "Head", out: Statistics) -> None:
        """Fill `out` at these rows from their raw logits [R, V] float32, row-major, before the temperature.

        Columns from head.num_columns on are padding, and those up to the stride of the logits too: they may hold anything. A
        target outside the vocabulary gives NaN where not is_host; check_targets reports it.
        """

    def partials(self, logits: Tensor, rows: Rows, head: "Head") -> Tensor:
        """[4, R] float64 of this vocabulary shard: maximum, sum e^d, sum d e^d, raw logit of the target (0 where
        another shard owns it); d relative to the shard's own maximum, which is -inf without real columns."""

    def policy_terms(self, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor) -> PolicyTerms:
        """An evaluator for one call. All arrays are contiguous, floats float32; logprobs, entropy [T]: complete at a token
        when it is evaluated."""

    def gradients(
        self,
        logits: Tensor,
        rows: Rows,
        head: "Head",
        statistics: Statistics,
        coefficient: Tensor,
        entropy_coefficient: Tensor,
        out: Tensor,
        active: Tensor | None,
    ) -> LateCount:
        """The n rows whose coefficient or entropy_coefficient [T] is not 0, as dz to out[:n], their tokens to active[:n].
        active None, where not is_host: all R rows in their places, 0 where both are, and n = R is known at once.

            dz_v = [c (1[v = target] - p_v) - e p_v (log p_v + H)] / tau

        and 0 in padding. 1 - p of the target through expm1. out [>= R, V] has the GEMM's dtype (bfloat16 or float32): a
        second buffer, but where is_host `logits` itself, float32. active: [>= R] int64. Returns n.
        """
