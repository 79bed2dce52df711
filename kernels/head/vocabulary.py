"""Arguments of an output head: this rank's vocabulary shard, the targets, temperature and support."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.kernels.checks import FLOATS, INTEGERS, check
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.support import Support, check_support


@dataclass(frozen=True)
class Head:
    """Weight shard, targets, temperature and support of one call of a fused op.

    weight: [V, H], one row per column of the logits. This shard has V columns, beginning with first_column of the whole
        vocabulary.
    num_columns: number of real columns of this shard; the other columns, at its end, are padding.
    vocab_size: number of real columns of the whole vocabulary.
    targets: [T] int64, columns of the whole vocabulary.
    inverse_temperature: [T] float32; None: all tokens have inverse_temperature_of_all.
    """

    op: str
    weight: Tensor
    targets: Tensor
    inverse_temperature: Tensor | None
    inverse_temperature_of_all: float
    first_column: int
    num_columns: int
    vocab_size: int
    tp_group: Any
    support: Support | None = None

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    @cached_property
    def is_sharded(self) -> bool:
        return self.tp_group is not None and dist.get_world_size(self.tp_group) > 1

    def tile(self, columns: slice) -> "Head":
        """Return a Head of only these columns of the shard."""
        real = max(0, min(columns.stop, self.num_columns) - columns.start)
        first = self.first_column + columns.start
        return replace(self, weight=self.weight[columns], first_column=first, num_columns=real)

    def restrict_(self, logits: Tensor, rows: Rows) -> None:
        """Set raw logits [R, width] to -inf outside of each row's support, in place."""
        if self.support is not None:
            self.support.restrict_(logits, rows, self.first_column, self.num_columns)

    def inverse_temperature_at(self, rows: Rows) -> Tensor:
        """Return the rows' inverse temperatures, [R] float32."""
        if self.inverse_temperature is None:
            of_all = self.inverse_temperature_of_all
            return torch.full((rows.count,), of_all, dtype=torch.float32, device=self.weight.device)
        return rows.take(self.inverse_temperature)


def make_head(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    tp_group: Any = None,
    real_vocab_size: int | None = None,
    support: Support | None = None,
) -> Head:
    """Check the arguments that fused heads have in common, and return them as a Head.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check(op, "hidden", hidden, (None, None), FLOATS)
    check(op, "weight", weight, (None, hidden.shape[1]), FLOATS, hidden.device)
    check(op, "targets", targets, (hidden.shape[0],), INTEGERS, hidden.device)
    if support is not None:
        check_support(op, support, hidden.shape[0], hidden.device)
    world, rank = 1, 0
    if tp_group is not None:
        world, rank = dist.get_world_size(tp_group), dist.get_rank(tp_group)
    width = weight.shape[0]
    vocab_size = width * world if real_vocab_size is None else real_vocab_size
    if not 0 < vocab_size <= width * world:
        raise ValueError(f"{op}: real_vocab_size is {vocab_size}, expected 1..{width * world} (weight rows x ranks)")
    inverse, inverse_of_all = None, 1.0
    if isinstance(temperature, Tensor):
        check(op, "temperature", temperature, (hidden.shape[0],), FLOATS, hidden.device)
        if temperature.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: temperature requires a gradient, which this op does not compute; detach it")
        inverse = temperature.detach().float().reciprocal().contiguous()
    elif not 0 < temperature < inf:
        raise ValueError(f"{op}: temperature is {temperature}, expected a positive, finite number or a tensor [T]")
    else:
        inverse_of_all = 1.0 / temperature
    return Head(
        op=op,
        weight=weight.detach(),
        targets=targets.long().contiguous(),
        inverse_temperature=inverse,
        inverse_temperature_of_all=inverse_of_all,
        first_column=rank * width,
        num_columns=max(0, min(width, vocab_size - rank * width)),
        vocab_size=vocab_size,
        tp_group=tp_group,
        support=support,
    )


def why_not_reference_head(head: Head) -> str | None:
    """Return None if the whole vocabulary is on one rank, as the reference requires; else the reason."""
    return "tp_group has several ranks, but the reference needs the whole vocabulary" if head.is_sharded else None
