"""How sure each token's choice of experts is: what a comparison with another program may rely on.

Two correct float32 programs differ in their router's logits by some 1e-6. Where two experts stand closer than that, they
may choose differently, and then every later position of the sequence differs in earnest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


@dataclass
class RouterMargins:
    """Collects, while a model runs forward, the router's margin of every token and MoE layer of this rank."""

    sequence_parallel: bool
    calls: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer, one [T] (or this rank's part) a batch

    def of_batches(self, lengths: list[int]) -> list[Tensor]:
        """Smallest margin over all MoE layers, [T] float32 CPU per batch; infinite in a dense model. Collective."""
        return [self._of_batch(index, length) for index, length in enumerate(lengths)]

    def _of_batch(self, index: int, length: int) -> Tensor:
        device = "cuda" if torch.cuda.is_available() else "cpu"  # NCCL reduces on the device only
        margins = torch.full((length,), torch.inf, device=device)
        mine = slice(0, length)
        if self.sequence_parallel:
            part = length // parallel_state.get_tensor_model_parallel_world_size()
            mine = slice(part * parallel_state.get_tensor_model_parallel_rank(), None)
        for calls in self.calls.values():
            margin = calls[index]
            view = margins[mine][: len(margin)]
            torch.minimum(view, margin.to(device), out=view)
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            if dist.get_world_size(group) > 1:
                dist.all_reduce(margins, op=dist.ReduceOp.MIN, group=group)
        return margins.cpu()


@contextmanager
def watch_router_margins(model: torch.nn.Module, *, sequence_parallel: bool) -> Iterator[RouterMargins]:
    """Record the margins of every forward pass in the body: logit of the last expert chosen minus the next one's."""
    margins = RouterMargins(sequence_parallel)

    def note(router: TopKRouter, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        logits = router.gating(inputs[0]).float().flatten(0, -2)
        best = logits.topk(min(router.topk + 1, logits.shape[-1]), dim=-1).values
        margin = torch.full_like(best[:, 0], torch.inf)
        if best.shape[-1] > router.topk:
            margin = best[:, router.topk - 1] - best[:, router.topk]
        margins.calls.setdefault(id(router), []).append(margin)

    hooks = [
        module.register_forward_hook(note, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, TopKRouter)
    ]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()
