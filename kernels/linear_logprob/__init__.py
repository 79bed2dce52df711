"""linear_logprob: log-prob of the target and entropy of a linear head, without ever holding the logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.dispatch import Implementation, Op
from marsrl.kernels.first_derivative import first_derivative_only
from marsrl.kernels.head.bad_targets import check_targets
from marsrl.kernels.head.chunked_head import head_gradients, head_statistics
from marsrl.kernels.head.gemms import products_in_full_float32
from marsrl.kernels.head.gradients import Wanted
from marsrl.kernels.head.rows.protocol import RowKernels
from marsrl.kernels.head.rows.providers import HEAD_PROVIDERS, RowProvider
from marsrl.kernels.head.rows.statistics import Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.support import Support
from marsrl.kernels.head.vocabulary import Head, make_head, why_not_reference_head
from marsrl.kernels.linear_logprob.reference import linear_logprob_reference


@dataclass(frozen=True)
class LogProb:
    """logprobs, entropy: [T] float32, nats; both carry a gradient."""

    logprobs: Tensor
    entropy: Tensor


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    tp_group: Any = None,
    real_vocab_size: int | None = None,
    support: Support | None = None,
    compacts: bool = True,
) -> LogProb:
    """log p(target) and entropy of softmax(hidden @ weight.T / temperature), 8THV FLOPs with the backward.

    Args:
        hidden: [T, H] float32, bfloat16 or float16; float64 is served by the reference.
        weight: [V, H]; under tp_group this rank's shard of equal size, in rank order.
        targets: [T] int, ids in the whole vocabulary.
        temperature: positive number, or [T] float. It gets no gradient.
        tp_group: process group over which the vocabulary is cut; hidden and targets are the same on its ranks. The
            gradient of hidden is then this shard's part: the caller sums it over the group, as Megatron's
            copy_to / gather_from regions do.
        real_vocab_size: columns from here on, in the whole vocabulary, are padding: p = 0, gradient 0. None: none are.
        support: the columns that each token was drawn from: elsewhere p = 0, gradient 0; its target among them. None: all.
        compacts: False: on a device the backward computes the rows without an upstream gradient too, and the host waits for
            nothing: a CUDA graph can capture it.

    Raises:
        ValueError: names the argument, what was found and what was expected; a target out of range by its token.
    """
    head = make_head("linear_logprob", hidden, weight, targets, temperature, tp_group, real_vocab_size, support)
    check_targets(head.op, head.targets, None, head.vocab_size)
    return _OP(hidden, weight, head, temperature, compacts)


class _LinearLogProb(torch.autograd.Function):
    """Keeps four numbers a token; the backward computes the logits again."""

    @staticmethod
    @products_in_full_float32()
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, kernels: RowKernels, head: Head, compacts: bool
    ) -> tuple[Tensor, Tensor]:
        statistics = head_statistics(kernels, head, hidden, Rows.of(None, hidden.shape[0]))
        ctx.save_for_backward(hidden, weight, *vars(statistics).values())
        ctx.kernels, ctx.head, ctx.compacts = kernels, head, compacts
        return statistics.logprobs, statistics.entropy

    @staticmethod
    @first_derivative_only("linear_logprob")
    @products_in_full_float32()
    def backward(
        ctx: Any, logprobs_gradient: Tensor, entropy_gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, *statistics = ctx.saved_tensors
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        gradients = head_gradients(
            ctx.kernels,
            ctx.head,
            hidden.detach(),
            Statistics(*statistics),
            logprobs_gradient.float().contiguous(),
            entropy_gradient.float().contiguous(),
            Wanted(wants_hidden, wants_weight, weight.dtype),
            ctx.compacts,
        )
        of_weight = gradients.of_weight
        if wants_weight:
            of_weight = torch.zeros_like(weight) if of_weight is None else of_weight.to(weight.dtype)
        return gradients.of_hidden, of_weight, None, None, None


def _on_rows(provider: RowProvider) -> Implementation:
    def run(hidden: Tensor, weight: Tensor, head: Head, temperature: float | Tensor, compacts: bool) -> LogProb:
        return LogProb(*_LinearLogProb.apply(hidden, weight, provider.load(), head, compacts))

    def why_not(hidden: Tensor, weight: Tensor, head: Head, temperature: float | Tensor, compacts: bool) -> str | None:
        return provider.why_not_head(hidden, weight, head, has_entropy=True)

    return Implementation(provider.name, run, why_not, provider.machine_lacks)


def _reference(hidden: Tensor, weight: Tensor, head: Head, temperature: float | Tensor, _: bool) -> LogProb:
    return LogProb(*linear_logprob_reference(hidden, weight, head.targets, temperature, head.num_columns, head.support))


_OP = Op(
    "linear_logprob",
    (
        *map(_on_rows, HEAD_PROVIDERS),
        Implementation("reference", _reference, lambda hidden, weight, head, *_: why_not_reference_head(head)),
    ),
)
