"""The part of DeepEP's and HybridEP's interface that megatron-core uses, over gloo, for any dtype.

A token is sent once to each rank that has one of its experts, and the ranks' results are summed in float32.

    install()       # before a learner with the dispatcher is built
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CALLS: list[str] = []
"""Methods that were called, in order."""


@dataclass(frozen=True)
class Sent:
    """Exchange of one micro-batch.

    tokens: [S] indices of this rank's tokens, sorted by receiving rank. sent, received: number of rows to and from each rank.
    num_tokens: number of this rank's tokens.
    """

    group: Any
    tokens: Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int

    @classmethod
    def of(cls, group: Any, is_in_rank: Tensor) -> Sent:
        """Exchange the numbers of rows. is_in_rank: [T, ranks] bool, True where a rank needs the token."""
        sent = is_in_rank.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return cls(group, is_in_rank.t().nonzero()[:, 1], sent.tolist(), received.tolist(), len(is_in_rank))

    def there(self, rows: Tensor) -> Tensor:
        """Send the rows [S, ...] of `tokens`, and return the rows that this rank receives."""
        out = rows.new_empty(sum(self.received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), self.received, self.sent, group=self.group)
        return out

    def back(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows over the ranks that received it."""
        out = rows.new_empty(len(self.tokens), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), self.sent, self.received, group=self.group)
        sums = torch.zeros(self.num_tokens, *rows.shape[1:])
        return sums.index_add_(0, self.tokens, out.float()).to(rows.dtype)


class Event:
    """Stands in for EventHandle and EventOverlap."""

    def __init__(self, event: Any = None) -> None: ...

    def current_stream_wait(self) -> None: ...


class Sizes:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(num_sms: int) -> None: ...

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Sizes:
        assert num_ranks in (2, 4, 8, 16), f"Unsupported number of EP ranks: {num_ranks}"
        return Sizes()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **others: Any) -> tuple[Any, ...]:
        ranks = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.group.size()))
        is_in_rank = torch.stack([(ranks == rank).any(1) for rank in range(self.group.size())], 1)
        of_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts)
        return is_in_rank.sum(0), None, of_expert, is_in_rank, Event()

    def dispatch(
        self,
        x: Tensor,
        handle: Sent | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        CALLS.append("dispatch")
        if handle is not None:  # this call computes the gradient of a combine
            return handle.there(x[handle.tokens]), None, None, None, None, Event()
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype == torch.float32
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        sent = Sent.of(self.group, is_token_in_rank)
        num_local = len(num_tokens_per_expert) // self.group.size()
        chosen = sent.there(topk_idx[sent.tokens]) - num_local * self.group.rank()
        is_here = (chosen >= 0) & (chosen < num_local)
        weights = sent.there(topk_weights[sent.tokens]) * is_here
        counts = chosen[is_here].bincount(minlength=num_local).tolist()
        return sent.there(x[sent.tokens]), chosen.where(is_here, -1), weights, counts, sent, Event()

    def combine(
        self, x: Tensor, handle: Sent, topk_weights: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Tensor | None, Event]:
        CALLS.append("combine")
        return handle.back(x), None if topk_weights is None else handle.back(topk_weights), Event()


class HybridEPBuffer:
    """Like Buffer, but dispatched rows are sorted by this rank's experts."""

    def __init__(self, group: Any, **sizes: Any) -> None:
        self.group = group

    def dispatch_with_permute(
        self,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_of_experts_per_rank: int = 0,
        handle: tuple[Sent, Tensor, Tensor, int] | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        CALLS.append("dispatch_with_permute")
        if handle is not None:  # this call computes the gradient of a combine
            sent, token_of, _, _ = handle
            return sent.there(hidden[sent.tokens])[token_of], None, None, None, handle
        assert routing_map is not None and probs is not None and probs.dtype == torch.float32
        sent = Sent.of(self.group, routing_map.unflatten(1, (self.group.size(), -1)).any(-1))
        first = num_of_experts_per_rank * self.group.rank()
        own = slice(first, first + num_of_experts_per_rank)
        here = sent.there(routing_map[sent.tokens].byte())[:, own].bool()
        expert_of, token_of = here.t().nonzero().unbind(1)
        weights = sent.there(probs[sent.tokens])[token_of, first + expert_of]
        rows = sent.there(hidden[sent.tokens])[token_of]
        return rows, weights, None, here.sum(0), (sent, token_of, first + expert_of, routing_map.shape[1])

    def combine_with_unpermute(
        self, hidden: Tensor, handle: tuple[Sent, Tensor, Tensor, int], probs: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        CALLS.append("combine_with_unpermute")
        sent, token_of, expert_of, num_experts = handle
        sums = torch.zeros(sum(sent.received), hidden.shape[1]).index_add_(0, token_of, hidden.float())
        of_experts = None
        if probs is not None:
            of_experts = torch.zeros(len(sums), num_experts)
            of_experts[token_of, expert_of] = probs
        return sent.back(sums.to(hidden.dtype)), None if of_experts is None else sent.back(of_experts)


def install() -> None:
    """Make megatron import this module as deep_ep, also in modules that have tried the import before."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.Buffer, package.HybridEPBuffer = Buffer, HybridEPBuffer  # type: ignore[attr-defined]
    utils.EventHandle = utils.EventOverlap = Event  # type: ignore[attr-defined]
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    importlib.reload(fused_a2a)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
