"""Values of rows of logits that kernels hand each other: statistics, slopes of the loss, and the objective's terms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from marsrl.kernels.head.rows.subset import LateCount, Rows

if TYPE_CHECKING:
    from marsrl.kernels.head.gemms import HeadGemms
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
        return Statistics(*torch.zeros(4, num_tokens, dtype=torch.float32, device=device).unbind())

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """In the order of the kernels."""
        return self.logprobs, self.entropy, self.maximum, self.log_sum


@dataclass(frozen=True)
class Slopes:
    """The numbers that dz of a token is made of: its statistics, dL/dlogp and dL/dH [T] float32.

    has_entropy: False where the host knows that dL/dH is 0 everywhere.
    """

    statistics: Statistics
    coefficient: Tensor
    entropy_coefficient: Tensor
    has_entropy: bool = True

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """In the order of the kernels."""
        return *self.statistics.arrays, self.coefficient, self.entropy_coefficient


class PolicyTerms(Protocol):
    """The objective evaluated at tokens as they come. coefficient, entropy_coefficient: [T] float32, dL/dlogp, dL/dH,
    0 where nothing was evaluated."""

    coefficient: Tensor
    entropy_coefficient: Tensor

    @property
    def in_one_walk(self) -> Callable[[Tensor, Rows, "Head", Statistics, Tensor, Tensor], LateCount] | None:
        """RowKernels.statistics, this evaluation and RowKernels.gradients in one, each row while it is in the cache: of
        logits, rows, head, statistics, out and active. None: they stay separate calls, as on a device."""

    def evaluate(self, rows: Rows) -> None:
        """Evaluate these tokens, each token once; those outside the mask may be listed and are skipped."""

    def sums(self) -> Tensor:
        """[A, len(METRICS)] float64 per agent, in the order of objective.METRICS, of the tokens evaluated so far; same bits in
        every run."""


def multiply(gemms: "HeadGemms", hidden: Tensor, rows: Rows, head: "Head", out: Tensor) -> Tensor:
    """RowKernels.multiply by the library's product: raw logits, -inf outside of what the rows were drawn from."""
    gemms.logits(hidden, out)
    head.restrict_(out, rows)
    return out
