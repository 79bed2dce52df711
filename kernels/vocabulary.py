"""The output head as the fused ops see it: this rank's shard of the vocabulary, swept in chunks of rows.

A chunk of logits is float32 [R, V], V being the columns of this rank. It lives in one buffer that is used again and
again; the full [T, V] never exists. csrc/cpu/softmax_rows.cpp turns it into statistics, then into its gradient.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import library
from .checks import FLOATS, INTEGERS, check
from .library import address

# The buffer for logits. A GEMM reads the whole weight, or reads and writes its whole gradient, which takes as long as
# computing some 12 rows: at V = 151936 chunks of 16 MiB (27 rows) cost 15% more than chunks of 80 MiB (137 rows).
CHUNK_BYTES = 80 * 2**20
# Rows of a bf16 weight that are converted to float32 at a time.
TILE_ROWS = 4096


@dataclass(frozen=True)
class Rows:
    """Some of the packed tokens: `ids` [R] int64 ascending, or first, first + 1, ... where ids is None."""

    ids: Tensor | None
    first: int
    count: int

    @staticmethod
    def of(mask: Tensor | None, num_tokens: int) -> "Rows":
        """The tokens of a [T] bool mask; None: all."""
        if mask is None:
            return Rows(None, 0, num_tokens)
        ids = mask.nonzero()[:, 0]
        return Rows(None, 0, num_tokens) if ids.numel() == num_tokens else Rows(ids, 0, ids.numel())

    def chunks(self, at_most: int) -> "list[Rows]":
        """These rows in order, cut into chunks of nearly equal size: a GEMM of few rows reads the weight as long."""
        if self.count == 0:
            return []
        size = ceil(self.count / ceil(self.count / at_most))
        spans = [(begin, min(size, self.count - begin)) for begin in range(0, self.count, size)]
        if self.ids is None:
            return [Rows(None, self.first + begin, count) for begin, count in spans]
        return [Rows(self.ids[begin : begin + count], 0, count) for begin, count in spans]

    def take(self, values: Tensor) -> Tensor:
        """values [T, ...] at these tokens; a view where they are contiguous."""
        return values[self.first : self.first + self.count] if self.ids is None else values.index_select(0, self.ids)

    def put(self, target: Tensor, values: Tensor) -> None:
        """Write values [R, ...] to these tokens of target [T, ...]."""
        if self.ids is None:
            target[self.first : self.first + self.count] = values
        else:
            target.index_copy_(0, self.ids, values)


@dataclass(frozen=True)
class Statistics:
    """Per token [T] float32: log-prob of the target, entropy (nats), largest raw logit, log of the sum of exp."""

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    log_sum: Tensor

    @staticmethod
    def zeros(num_tokens: int) -> "Statistics":
        return Statistics(*torch.zeros(4, num_tokens).unbind())


@dataclass(frozen=True)
class Head:
    """Weight shard, targets and temperature of one call.

    weight [V, H]: columns first_column .. first_column + V of the vocabulary, of which the first num_columns are real.
    targets [T] int64, global. inverse_temperature [T] float32, None: inverse_temperature_of_all.
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

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    @cached_property
    def chunk_rows(self) -> int:
        return max(1, CHUNK_BYTES // (4 * self.width))

    @cached_property
    def is_sharded(self) -> bool:
        return self.tp_group is not None and dist.get_world_size(self.tp_group) > 1

    @cached_property
    def _tile(self) -> Tensor:
        return torch.empty(min(TILE_ROWS, self.width), self.weight.shape[1])

    def _tiles(self) -> list[slice]:
        if self.weight.dtype == torch.float32:
            return [slice(0, self.width)]
        return [slice(begin, min(begin + TILE_ROWS, self.width)) for begin in range(0, self.width, TILE_ROWS)]

    def _weight(self, tile: slice) -> Tensor:
        weight = self.weight[tile]
        return weight if weight.dtype == torch.float32 else self._tile[: weight.shape[0]].copy_(weight)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """out [R, V] = hidden [R, H] @ weight.T in float32, before the temperature. Untouched by autocast: out= is."""
        hidden = hidden.float()
        for tile in self._tiles():
            torch.mm(hidden, self._weight(tile).t(), out=out[:, tile])

    def hidden_gradient(self, dz: Tensor) -> Tensor:
        """[R, H] float32 = dz [R, V] @ weight."""
        gradient = torch.empty(dz.shape[0], self.weight.shape[1])
        for tile in self._tiles():
            if tile.start == 0:
                torch.mm(dz[:, tile], self._weight(tile), out=gradient)
            else:
                gradient.addmm_(dz[:, tile], self._weight(tile))
        return gradient

    def statistics(self, logits: Tensor, rows: Rows, out: Statistics) -> None:
        """Fill `out` at these rows from their logits [R, V]; sums over the shards where there are several."""
        if self.is_sharded:
            self._sharded_statistics(logits, rows, out)
            return
        bad = library.cpu_library().marsrl_row_logprobs(
            logits.data_ptr(),
            self.width,
            rows.count,
            self.num_columns,
            address(rows.ids),
            rows.first,
            self.targets.data_ptr(),
            address(self.inverse_temperature),
            self.inverse_temperature_of_all,
            out.logprobs.data_ptr(),
            out.entropy.data_ptr(),
            out.maximum.data_ptr(),
            out.log_sum.data_ptr(),
            torch.get_num_threads(),
        )
        if bad >= 0:
            self._raise_bad_target(bad)

    def _sharded_statistics(self, logits: Tensor, rows: Rows, out: Statistics) -> None:
        targets = rows.take(self.targets)
        is_bad = (targets < 0) | (targets >= self.vocab_size)  # the same on every rank: all of them raise
        if is_bad.any():
            index = int(is_bad.nonzero()[0])
            self._raise_bad_target(rows.first + index if rows.ids is None else int(rows.ids[index]))
        if self.inverse_temperature is None:
            inverse = torch.full((rows.count,), self.inverse_temperature_of_all)
        else:
            inverse = rows.take(self.inverse_temperature)
        local = targets - self.first_column
        partials = torch.empty(4, rows.count, dtype=torch.float64)
        library.cpu_library().marsrl_row_partials(
            logits.data_ptr(),
            self.width,
            rows.count,
            self.num_columns,
            local.data_ptr(),
            inverse.data_ptr(),
            partials.data_ptr(),
            torch.get_num_threads(),
        )
        maximum = partials[0].clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self.tp_group)
        # e^(d + shift) for sums that were taken relative to this shard's own maximum; -1e4 stands for "nothing here"
        shift = ((partials[0] - maximum) * inverse).clamp_(min=-1e4)
        scale = shift.exp()
        is_mine = (local >= 0) & (local < self.num_columns)
        centred = torch.where(is_mine, (partials[3] - maximum) * inverse, 0.0)
        sums = torch.stack((partials[1] * scale, (partials[2] + shift * partials[1]) * scale, centred))
        dist.all_reduce(sums, group=self.tp_group)
        log_sum = sums[0].log()
        rows.put(out.logprobs, (sums[2] - log_sum).float())
        rows.put(out.entropy, (log_sum - sums[1] / sums[0]).float())
        rows.put(out.maximum, maximum.float())
        rows.put(out.log_sum, log_sum.float())

    def gradients_(
        self,
        logits: Tensor,
        rows: Rows,
        statistics: Statistics,
        coefficient: Tensor,
        entropy_coefficient: Tensor,
        active: Tensor,
    ) -> int:
        """Turn logits into dz in place; rows with a coefficient move to the front, their tokens into `active` [R].

        Returns how many these are. coefficient, entropy_coefficient: [T] float32, dL/dlogp and dL/dH.
        """
        return library.cpu_library().marsrl_row_gradients(
            logits.data_ptr(),
            self.width,
            rows.count,
            self.num_columns,
            address(rows.ids),
            rows.first,
            self.targets.data_ptr(),
            self.first_column,
            address(self.inverse_temperature),
            self.inverse_temperature_of_all,
            statistics.logprobs.data_ptr(),
            statistics.entropy.data_ptr(),
            statistics.maximum.data_ptr(),
            statistics.log_sum.data_ptr(),
            coefficient.data_ptr(),
            entropy_coefficient.data_ptr(),
            active.data_ptr(),
            torch.get_num_threads(),
        )

    def _raise_bad_target(self, token: int) -> None:
        raise ValueError(
            f"{self.op}: targets[{token}] is {int(self.targets[token])}, expected 0..{self.vocab_size - 1}; "
            "mask the tokens that have no target"
        )


class HeadGradients:
    """Collects dX [T, H] and dW [V, H] float32 of a head while chunks come by; what is not wanted stays None.

    of_weight is also None where no row had a coefficient.
    """

    def __init__(self, head: Head, hidden: Tensor, wants_hidden: bool, wants_weight: bool):
        self.head = head
        self.hidden = hidden
        self.wants_hidden = wants_hidden
        self.wants_weight = wants_weight
        self._of_hidden: Tensor | None = None
        self.of_weight: Tensor | None = None

    @property
    def of_hidden(self) -> Tensor | None:
        """[T, H] in the dtype of hidden; rows that no chunk brought have gradient 0."""
        if self._of_hidden is None and self.wants_hidden:
            self._of_hidden = torch.zeros(self.hidden.shape, dtype=self.hidden.dtype)
        return self._of_hidden

    def add(self, dz: Tensor, tokens: Tensor) -> None:
        """Add the rows dz [n, V] of the tokens [n] int64, ascending."""
        count = tokens.numel()
        if count == 0:
            return
        first, last = int(tokens[0]), int(tokens[-1])
        rows = Rows(None, first, count) if last - first + 1 == count else Rows(tokens, 0, count)
        if self.wants_hidden:
            gradient = self.head.hidden_gradient(dz)
            if count == self.hidden.shape[0]:  # all rows at once, as with a small vocabulary
                self._of_hidden = gradient.to(self.hidden.dtype)
            else:
                assert self.of_hidden is not None
                rows.put(self.of_hidden, gradient.to(self.hidden.dtype))
        if self.wants_weight:
            hidden = rows.take(self.hidden).float()
            if self.of_weight is None:
                self.of_weight = torch.mm(dz.t(), hidden, out=torch.empty(self.head.weight.shape))
            else:
                self.of_weight.addmm_(dz.t(), hidden)


def make_head(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    tp_group: Any,
    real_vocab_size: int | None,
) -> Head:
    """Checks the arguments that every fused head takes; ValueError names the argument, what was found and expected."""
    check(op, "hidden", hidden, (None, None), FLOATS)
    check(op, "weight", weight, (None, hidden.shape[1]), FLOATS, hidden.device)
    check(op, "targets", targets, (hidden.shape[0],), INTEGERS, hidden.device)
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
        inverse = temperature.detach().float().reciprocal().contiguous()
    elif not temperature > 0:
        raise ValueError(f"{op}: temperature is {temperature}, expected a positive number or a tensor [T]")
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
    )


def why_not_cpu_head(hidden: Tensor, head: Head) -> str | None:
    """None where csrc/cpu can sweep this head, else the reason."""
    if hidden.device.type != "cpu":
        return f"hidden is on {hidden.device}, csrc/cpu reads host memory"
    if torch.float64 in (hidden.dtype, head.weight.dtype):
        return "float64 input, csrc/cpu computes in float32"
    return None


def why_not_reference_head(head: Head) -> str | None:
    """None where a reference can serve: it holds the whole vocabulary on one rank."""
    return "tp_group has several ranks, the reference holds the whole vocabulary" if head.is_sharded else None
