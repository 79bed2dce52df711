"""Load-balancing loss of the router over a whole update, and the load of the experts.

    with count_experts(model) as counts:               # unless an update has one micro-batch
        ...forward passes without gradients...
    with balance_experts(model, 0.01, num_tokens, counts()) as load:
        ...forward and backward of the same micro-batches...
    found = load()

The loss of a layer is coefficient * E * sum_e f_e P_e (arXiv:2101.03961, eq. 4 to 6): f_e is the share of expert e in the choices
of all tokens of the update on all ranks, and has no gradient; P_e is the expert's mean probability over these tokens. Padding
is excluded. P_e is a sum over micro-batches, but f_e must be known before the first backward pass. megatron's own loss takes
f_e from the micro-batch ("aux_loss"), or from earlier ones ("global_aux_loss"), so its gradient depends on the split
(NVIDIA/Megatron-LM#1498).

Choices are the router's own, even if other experts are forced (router_replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from marsrl.trainer.learner.megatron.head import PolicyModel

Counts = dict[int, Tensor]
"""{MoE layer, from 0 in the whole model: [E] int64 choices of each expert over all ranks}, for this rank's layers."""


class ExpertLoad(NamedTuple):
    """Spread of an update's tokens over the experts; the same on all ranks.

    aux_loss: E * sum_e f_e P_e, mean over layers; 1 if all experts have equal shares.
    largest, smallest: number of tokens of the most and least used expert of any layer, divided by an equal share.
    """

    aux_loss: float
    largest: float
    smallest: float


@dataclass(slots=True)
class _Tally:
    """Settings and results of one router in the passes of an update.

    has_gradients: True: tally only passes with gradients; False: only passes without.
    coefficient: weight of the loss; 0: no loss.
    num_tokens: number of the update's tokens over all ranks.
    counts: [E], choices of each expert in the update; None: the forward pass of the only micro-batch counts them.
    sums: [2, E], choices and sums of probabilities over this rank's tokens.
    """

    has_gradients: bool
    coefficient: float = 0.0
    num_tokens: int = 0
    counts: Tensor | None = None
    sums: list[Tensor] = field(default_factory=list)


class BalancedRouter(TopKRouter):
    """Megatron's router with the balancing loss of a whole update."""

    tally: _Tally | None = None
    padding_mask: Tensor | None = None  # Mask of the next forward pass, where megatron passes none (head.py: plan).

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route as megatron does. logits: [T, 1, E]; padding_mask: [T, 1] bool, True for padding."""
        padding_mask = self.padding_mask if padding_mask is None else padding_mask
        probs, routing_map = super().routing(logits, padding_mask=padding_mask)
        tally = self.tally
        # A layer with recomputation runs its first forward pass without gradients.
        if tally is None or tally.has_gradients != torch.is_grad_enabled():
            return probs, routing_map
        own_choice, scores = compute_routing_scores_for_aux_loss(
            (logits if tally.coefficient else logits.detach()).flatten(0, -2),
            self.topk,
            self.score_function,
            padding_mask=None if padding_mask is None else padding_mask.flatten(),
        )
        counts = own_choice.sum(0)
        tally.sums.append(torch.stack([counts.double(), scores.detach().sum(0, dtype=torch.float64)]))
        if not tally.coefficient:
            return probs, routing_map
        if tally.counts is None:
            dist.all_reduce(counts, group=self.tp_dp_cp_group)
            tally.counts = counts
        loss = switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=tally.counts,
            total_num_tokens=tally.num_tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=tally.coefficient / tally.num_tokens,
        )
        return MoEAuxLossAutoScaler.apply(probs, loss * tally.num_tokens), routing_map


@contextmanager
def count_experts(model: PolicyModel) -> Iterator[Callable[[], Counts | None]]:
    """Count the router's choices in the body's forward passes without gradients; every token passes once.

    Yields a function that returns the counts over all ranks after the body; None if there was no pass. Collective.
    """
    with _installed(model, lambda layer: _Tally(has_gradients=False)) as tallies:
        yield partial(_counts, model, tallies)


@contextmanager
def balance_experts(
    model: PolicyModel, coefficient: float, num_tokens: int, counts: Counts | None
) -> Iterator[Callable[[], ExpertLoad | None]]:
    """Add the gradient of the balancing loss in the body's backward passes, one per micro-batch of the update.

    counts: choices of the whole update; None only with a single micro-batch or a coefficient of 0. num_tokens: tokens of the
    update over all ranks, without padding.

    Yields a function that returns the load after the body; None for a model without experts. Collective over all ranks.
    """

    def tally(layer: int) -> _Tally:
        return _Tally(True, coefficient, num_tokens, counts[layer] if counts is not None else None)

    with _installed(model, tally) as tallies:
        yield partial(_load, model, tallies, num_tokens)


def _counts(model: PolicyModel, tallies: dict[int, _Tally]) -> Counts | None:
    if not any(tally.sums for tally in tallies.values()):
        return None
    sums = _sums(model, tallies)
    return {layer: sums[layer, 0].long() for layer in tallies}


def _load(model: PolicyModel, tallies: dict[int, _Tally], num_tokens: int) -> ExpertLoad | None:
    if not tallies:
        return None
    choices, probabilities = _sums(model, tallies).unbind(1)
    loads = choices.shape[1] * choices / choices.sum(1, keepdim=True)
    loss = (loads * probabilities / num_tokens).sum(1).mean()
    return ExpertLoad(*torch.stack([loss, loads.max(), loads.min()]).tolist())


def _sums(model: PolicyModel, tallies: dict[int, _Tally]) -> Tensor:
    """Return the sums over all ranks, [layers of the whole model, 2, E] float64. Each pipeline stage contributes its layers."""
    config = model.config
    device = next(iter(tallies.values())).sums[0].device
    sums = torch.zeros(config.num_layers, 2, config.num_moe_experts, dtype=torch.float64, device=device)
    for layer, tally in tallies.items():
        sums[layer] = torch.stack(tally.sums).sum(0)
    dist.all_reduce(sums)
    return sums


@contextmanager
def _installed(model: PolicyModel, tally: Callable[[int], _Tally]) -> Iterator[dict[int, _Tally]]:
    routers = {module.layer_number - 1: module for module in model.modules() if isinstance(module, BalancedRouter)}
    tallies = {layer: tally(layer) for layer in routers}
    try:
        for layer, router in routers.items():
            router.tally = tallies[layer]
        yield tallies
    finally:
        for router in routers.values():
            router.tally = None
