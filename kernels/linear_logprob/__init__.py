"""Log-prob of the target and entropy of a linear head, without storing the logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.differentiable import Gradient
from marsrl.kernels.dispatch import Implementation, Op
from marsrl.kernels.head.bad_values import check_values
from marsrl.kernels.head.chunked_head import head_gradients, head_statistics
from marsrl.kernels.head.gradients import Wanted
from marsrl.kernels.head.rows.protocol import RowKernels, Slopes, Statistics
from marsrl.kernels.head.rows.providers import ROW_PROVIDERS, RowProvider
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.support import Support
from marsrl.kernels.head.vocabulary import Head, make_head, why_not_reference_head
from marsrl.kernels.linear_logprob.reference import linear_logprob_reference
from marsrl.kernels.traced_op import register


@dataclass(frozen=True)
class LogProb:
    """Log-prob of the target and entropy of each token, [T] float32, nats; both are differentiable."""

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
) -> LogProb:
    """Compute log p(target) and entropy of softmax(hidden @ weight.T / temperature).

    Forward and backward together take 8THV FLOPs.

    Args:
        hidden: [T, H] float32, bfloat16 or float16; float64 is served by the reference.
        weight: [V, H]; with tp_group, this rank's shard. Shards have equal sizes and are in rank order.
        targets: [T] int, token ids of the whole vocabulary.
        temperature: a positive, finite number, or [T] float of such numbers. It gets no gradient.
        tp_group: process group over which the vocabulary is sharded; its ranks have the same hidden and targets. The gradient of
            hidden is then only this shard's part; the caller must sum it over the group, as Megatron's copy_to and gather_from
            regions do.
        real_vocab_size: number of real columns of the whole vocabulary; those after them are padding, with p = 0 and gradient 0.
            None: no padding.
        support: the columns from which each token was drawn, including its target; all others have p = 0 and gradient 0. None:
            all columns.

    Raises:
        ValueError: names the argument, what was found and what was expected. For a target out of range or an invalid temperature
            it also names the token; on a device, such values are reported later, by raise_bad_values.
    """
    if torch.compiler.is_compiling():
        if tp_group is None:
            per_token, of_all = (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)
            ids, starts, counts, most = (None, None, None, 0) if support is None else vars(support).values()
            logprobs, entropy, *_ = torch.ops.marsrl.linear_logprob(
                hidden, weight, targets, per_token, ids, starts, counts, of_all, real_vocab_size, most
            )
            return LogProb(logprobs, entropy)
        torch._dynamo.graph_break(msg="linear_logprob has a tp_group, which a torch.library op cannot take")
    return LogProb(*_OP(*_checked(hidden, weight, targets, temperature, tp_group, real_vocab_size, support)))


def _checked(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, *of_head: Any
) -> tuple[Any, ...]:
    head = make_head("linear_logprob", hidden, weight, targets, temperature, *of_head)
    return hidden, weight, head, check_values(head, temperature, None)


def _from_schema(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    per_token: Tensor | None,
    ids: Tensor | None,
    starts: Tensor | None,
    counts: Tensor | None,
    of_all: float,
    real_vocab_size: int | None,
    most: int,
) -> tuple[Any, ...]:
    """Convert the arguments of the traced op to those of the op.

    The temperature is per_token [T], or of_all if that is None.
    """
    temperature = of_all if per_token is None else per_token
    support = None if ids is None or starts is None or counts is None else Support(ids, starts, counts, most)
    return _checked(hidden, weight, targets, temperature, None, real_vocab_size, support)


def _results(hidden: Tensor, *_: object) -> tuple[Tensor, ...]:
    """Allocate the four statistics of each token, two of which are the op's outputs."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return tuple(hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(4))


class _Kernels:
    """Kernels of linear_logprob, which save four numbers per token; the backward recomputes the logits."""

    def __init__(self, rows: RowKernels):
        self._rows = rows

    def forward(self, hidden: Tensor, weight: Tensor, head: Head, temperature: float | Tensor) -> tuple[Tensor, ...]:
        return head_statistics(self._rows, head, hidden, Rows.of(None, hidden.shape[0])).arrays

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight, head, _ = args
        wants_hidden, wants_weight = needs
        of_logprobs, of_entropy = (grad.float().contiguous() for grad in grads)
        slopes = Slopes(Statistics(*saved), of_logprobs, of_entropy)
        wanted = Wanted(wants_hidden, wants_weight, weight.dtype)
        gradients = head_gradients(self._rows, head, hidden.detach(), slopes, wanted)
        grad_weight = gradients.grad_weight
        if wants_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return gradients.grad_hidden, grad_weight


_GRADIENT = Gradient("linear_logprob", num_tensors=2, num_outputs=2, saves_outputs=True)


def _on_rows(provider: RowProvider) -> Implementation:
    def why_not(hidden: Tensor, weight: Tensor, *_: object) -> str | None:
        return provider.why_not(hidden=hidden, weight=weight)

    def load() -> _Kernels:
        return _Kernels(provider.load())

    return _GRADIENT.implementation(provider.name, load, why_not, provider.machine_lacks)


def _reference(hidden: Tensor, weight: Tensor, head: Head, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    return linear_logprob_reference(hidden, weight, head.targets, temperature, head.num_columns, head.support)


_OP = Op(
    "linear_logprob",
    (
        *map(_on_rows, ROW_PROVIDERS),
        _GRADIENT.reference(_reference, lambda hidden, weight, head, *_: why_not_reference_head(head)),
    ),
)
register(
    _OP,
    _GRADIENT,
    "Tensor hidden, Tensor weight, Tensor targets, Tensor? per_token, Tensor? ids, Tensor? starts, Tensor? counts, "
    "float of_all, SymInt? real_vocab_size, int most",
    _results,
    4,
    _from_schema,
)
