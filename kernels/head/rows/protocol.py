"""What an implementation does to rows of logits. The chunks, routes, GEMMs and autograd around it are shared.

    for each chunk of tokens                                      who
        logits [R, V] float32 = hidden @ weight.T                 gemms.py
        statistics (or partials and an all-gather, shards.py)     RowKernels
        terms.evaluate: coefficients and sums of the loss         RowKernels
        gradients: rows with a coefficient to dz, side by side    RowKernels
        (on the CPU these three in one: terms.in_one_walk)
        dX, dW from dz when enough rows are together              gemms.py, chunked_head.py

A bfloat16 model on the CPU takes a tile of the vocabulary at a time (tiles.py), with TileKernels.

Arrays named [T] belong to all packed tokens; a kernel reads and writes them at the tokens of its rows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from marsrl.kernels.head.objective import PolicyTokens
from marsrl.kernels.head.rows.subset import LateCount, Rows

if TYPE_CHECKING:
    from marsrl.kernels.head.vocabulary import Head


@dataclass(frozen=True)
class Statistics:
    """Per token [T] float32: log-prob of the target, entropy (nats), largest raw logit, log of the sum of exp.

    With d = (z - maximum) / tau:  log_sum = log sum e^d,  log p_y = d_y - log_sum,  H = log_sum - sum d e^d / sum e^d.
    """

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    log_sum: Tensor

    @staticmethod
    def zeros(num_tokens: int, device: torch.device) -> "Statistics":
        return Statistics(*torch.zeros(4, num_tokens, device=device).unbind())


class RowsInOneWalk(Protocol):
    """Statistics, evaluation and gradients of a chunk in one call: each row while it is in the cache."""

    def __call__(
        self, logits: Tensor, rows: Rows, head: "Head", statistics: Statistics, out: Tensor, active: Tensor
    ) -> LateCount:
        """What RowKernels.statistics, PolicyTerms.evaluate and RowKernels.gradients do one after the other.

        For a vocabulary on one rank; statistics.logprobs and .entropy are the arrays of RowKernels.policy_terms.
        """


class PolicyTerms(Protocol):
    """The objective evaluated at tokens as they come. coefficient, entropy_coefficient: [T] float32, dL/dlogp, dL/dH,
    0 where nothing was evaluated."""

    coefficient: Tensor
    entropy_coefficient: Tensor

    @property
    def in_one_walk(self) -> RowsInOneWalk | None:
        """None where the three steps stay separate calls, as on a device."""

    def evaluate(self, rows: Rows) -> None:
        """Evaluate these tokens, each token once; those outside the mask may be listed and are skipped."""

    def sums(self) -> Tensor:
        """[A, 6] float64 per agent, in the order of objective.METRICS, of the tokens evaluated so far; same bits in
        every run."""


class TileKernels(Protocol):
    """Logits of a tile of the vocabulary, which leave bfloat16 exponentials behind, and the gradients from those."""

    def exponentials(
        self, logits: Tensor, head: "Head", targets: Tensor, inverse_temperature: Tensor, partials: Tensor, out: Tensor
    ) -> None:
        """partials [4, R] as RowKernels.partials gives them, and out [R, columns] bfloat16 = e^d, 0 in padding.

        logits [R, columns] float32, row-major; head: Head.tile of these columns; targets, inverse_temperature [R].
        """

    def gradients(
        self,
        exponentials: Tensor,
        maxima: Tensor,
        kept: Tensor,
        tokens: Tensor,
        head: "Head",
        statistics: Statistics,
        coefficient: Tensor,
        entropy_coefficient: Tensor,
        out: Tensor,
    ) -> None:
        """out [n, columns] float32 = dz of the rows kept [n] int64 of exponentials [R, columns], whose tokens are given.

        maxima [R] float64: the first line of their partials. dz as RowKernels.gradients has it, that of the target from
        the float32 statistics.
        """


class FirstGemm(Protocol):
    """Logits of a chunk by a product of our own, which takes the statistics from its accumulators.

        pieces = first_gemm.logits(hidden, rows, head, out)     # in place of gemms.py
        first_gemm.statistics(pieces, rows, head, statistics)   # in place of RowKernels.statistics

    pieces: [4, n, R] float32: maximum, sum e^d, sum d e^d relative to it, and target logit, of n parts of the columns.
    """

    def logits(self, hidden: Tensor, rows: Rows, head: "Head", out: Tensor | None) -> Tensor:
        """Write hidden [R, H] @ head.weight.T to out [R, V] float32, but for padding; None: to nowhere. Returns pieces."""

    def statistics(self, pieces: Tensor, rows: Rows, head: "Head", out: Statistics) -> None:
        """As RowKernels.statistics; rows: those that were multiplied or, once their count is known, the first of them."""

    def partials(self, pieces: Tensor, rows: Rows, head: "Head") -> Tensor:
        """As RowKernels.partials."""

    def row_bytes(self, width: int) -> int:
        """Of the pieces of one row over so many columns; ranks with a shard of this width cut the same chunks by it."""


class RowKernels(Protocol):
    """One implementation.

    is_host: results are complete when a call returns, and `gradients` overwrites the logits; else calls queue work on
    the current stream, never wait for it, and `gradients` writes to a second buffer.
    """

    is_host: bool

    @property
    def tiles(self) -> TileKernels | None:
        """None on a device."""

    @property
    def first_gemm(self) -> FirstGemm | None:
        """None where the logits come from gemms.py and the statistics from the logits."""

    def statistics(self, logits: Tensor, rows: Rows, head: "Head", out: Statistics) -> None:
        """Fill `out` at these rows from their raw logits [R, V] float32, row-major, before the temperature.

        Columns from head.num_columns on are padding, and those up to the stride of the logits too: they may hold anything. A
        target outside the vocabulary gives NaN where
        not is_host; check_targets reports it.
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
