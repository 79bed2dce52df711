"""Router replay: record the experts chosen in a forward pass, and force these experts in a later pass.

    with record_experts(model) as choices:                     # R2: with the step's initial weights
        ...forward passes...                                   # or, R3: [experts_of_rank(model, batch.routed_experts), ...]
    with replay_experts(model, choices) as counts:
        ...forward and backward of the same micro-batches, in order...
    found = counts()

R2 and R3: arXiv:2510.11370. Forced experts get the weights of the trainer's own router, normalised over these experts as the
model does, so that gradients reach the router. This module uses megatron's hook for router replay (`router.router_replay`), but
without megatron's global list, which would mix the models of several policies. It detects by itself which call is an activation
recomputation.

Memory: the record of this rank's part of a micro-batch takes one or two bytes per chosen expert on the CPU
(rollout/routed_experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from marsrl.rollout.routed_experts import expert_dtype
from marsrl.trainer.learner.megatron.head import PolicyModel

Choices = dict[int, Tensor]
"""{MoE layer, from 0 in the whole model: [T, K]} of one micro-batch on this rank.

Where a value is not the index of an expert, the router chooses.
"""

_TopK = Callable[..., tuple[Tensor, Tensor]]


class ReplayCounts(NamedTuple):
    """Counts over all ranks. A token differs if the trainer's own choice is a different set in at least one MoE layer.

    tokens: number of tokens with forced experts. choices: tokens times MoE layers.
    """

    tokens: int
    tokens_differ: int
    choices: int
    choices_differ: int


def experts_of_rank(model: PolicyModel, routed_experts: Tensor) -> Choices:
    """Return this rank's layers and tokens of a micro-batch's [T, L, K] record.

    Raises ValueError if the recorded model has other layers or another top_k.
    """
    record, config = routed_experts, model.config
    if config.sequence_parallel:
        record = record.chunk(config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]
    if tuple(record.shape[1:]) != (config.num_layers, config.moe_router_topk):
        raise ValueError(
            f"router replay: the samples record {record.shape[1]} layers x {record.shape[2]} experts per token, but the policy "
            f"has {config.num_layers} x {config.moe_router_topk}; they come from another model"
        )
    return {layer: record[:, layer].contiguous() for layer in _routers(model)}


@contextmanager
def record_experts(model: PolicyModel) -> Iterator[list[Choices]]:
    """Record the choices of every forward pass in the body, in order; complete once the body is left."""
    dtype = torch.uint8 if expert_dtype(model.config.num_moe_experts) == np.uint8 else torch.int16
    recorders = {layer: _Recorder(dtype) for layer in _routers(model)}
    choices: list[Choices] = []
    with _installed(model, recorders):
        yield choices
    calls = zip(*(recorder.calls for recorder in recorders.values()), strict=True)
    choices += [dict(zip(recorders, of_layers, strict=True)) for of_layers in calls]


@contextmanager
def replay_experts(model: PolicyModel, choices: Sequence[Choices | None]) -> Iterator[Callable[[], ReplayCounts]]:
    """Force choices[i] in the body's i-th micro-batch, and in its recomputation; None leaves a micro-batch to the router.

    Yields a function that returns, after the body, how far the forced choices agree with the trainer's own.
    """
    num_experts = model.config.num_moe_experts
    replayers = {
        layer: _Replayer([chosen[layer] if chosen else None for chosen in choices], num_experts)
        for layer in _routers(model)
    }
    with _installed(model, replayers):
        yield partial(_counts, list(replayers.values()))


def _counts(layers: Sequence[_Replayer]) -> ReplayCounts:
    """Count agreement over all ranks. Collective."""
    differ = torch.stack([torch.cat(replayer.differ) for replayer in layers])  # [layers of this stage, tokens]
    anywhere = differ.any(0).to(torch.uint8)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if dist.get_world_size(pipeline) > 1:
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=pipeline)
    forced = torch.cat(layers[0].is_forced).sum()
    counted = int(parallel_state.is_pipeline_last_stage())  # All stages see all tokens, so one stage counts.
    sums = torch.stack([forced * counted, anywhere.sum() * counted, forced * len(layers), differ.sum()])
    dist.all_reduce(sums)
    return ReplayCounts(*(int(value) for value in sums))


class _Recorder:
    """Replacement of a router's `router_replay` that records the router's choice."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.calls: list[Tensor] = []  # [T, K] on the CPU, one per micro-batch

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: _TopK
    ) -> tuple[Tensor, Tensor]:
        values, experts = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.calls.append(experts.to(self.dtype).cpu())
        return values, experts


class _Replayer:
    """Replacement of a router's `router_replay` that forces recorded experts, with the router's own scores for them."""

    def __init__(self, choices: list[Tensor | None], num_experts: int) -> None:
        self.choices, self.num_experts = choices, num_experts
        # Numbers of passes so far: first forward passes, those of them without gradients (in checkpointed layers), and
        # recomputations.
        self.num_first = self.num_without_gradients = self.num_again = 0
        self.differ: list[Tensor] = []  # [T] bool per micro-batch
        self.is_forced: list[Tensor] = []

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: _TopK
    ) -> tuple[Tensor, Tensor]:
        is_again = torch.is_grad_enabled() and self.num_again < self.num_without_gradients
        choice = self.choices[self.num_again if is_again else self.num_first]
        with torch.no_grad():
            _, own_choice = choose(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)
            recorded = (
                torch.full_like(own_choice, self.num_experts) if choice is None else choice.to(scores.device).long()
            )
            is_forced = (recorded < self.num_experts).all(-1)
            experts = torch.where(is_forced[:, None], recorded, own_choice)
        if is_again:
            self.num_again += 1
        else:
            self.num_first += 1
            self.num_without_gradients += not torch.is_grad_enabled()
            self.differ.append((own_choice.sort(-1).values != experts.sort(-1).values).any(-1))
            self.is_forced.append(is_forced)
        return scores.gather(1, experts), experts


def _routers(model: PolicyModel) -> dict[int, TopKRouter]:
    return {module.layer_number - 1: module for module in model.modules() if isinstance(module, TopKRouter)}


@contextmanager
def _installed(model: PolicyModel, instead: dict[int, Any]) -> Iterator[None]:
    routers = _routers(model)
    assert not any(router.config.moe_router_fusion for router in routers.values()), "a fused router has no replay hook"
    try:
        for layer, router in routers.items():
            router.router_replay = instead[layer]
        yield
    finally:
        for router in routers.values():
            router.router_replay = None
