"""linear_policy_loss: clipped loss, dX and dW from hidden states and head weight; the headline case."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import head_problem as head
import torch
from case import Bench, Case, Judgement, Missing, Results, Shape, Variant
from head_problem import HeadInputs, LogprobFunction, Objective, Rows
from peers import LogprobPeer, LossPeer, fused_peers
from torch import Tensor

from marsrl.kernels import LossInputs, PolicyObjective, linear_policy_loss
from marsrl.kernels.dispatch import ENVIRONMENT
from marsrl.kernels.linear_policy_loss import served_by

CLIP = 0.2


def _build(shape: Shape) -> Bench:
    inputs = head.make_inputs(shape)
    objective, loss_inputs = _objective(inputs), _loss_inputs(inputs)
    name = served_by(inputs.hidden, inputs.weight, inputs.targets, loss_inputs)
    bare, sentence = head.floors(inputs, shape)
    variants: list[Variant | Missing] = [Variant("ours", partial(_ours, inputs, loss_inputs), f"by {name}"), *bare]
    if name == "quack":
        variants.append(Variant("ours, triton", partial(_by_triton, inputs, loss_inputs), "cuBLAS and row kernels"))
    trained_rows = None if inputs.mask is None else inputs.mask.nonzero()[:, 0]

    def add(name: str, call: LogprobFunction, rows: Tensor | None, does: str = "") -> None:
        name += "" if rows is None else ", unmasked rows only"
        variants.append(Variant(name, partial(head.through_logprobs, inputs, objective, call, rows), does))

    eager = head.eager_logprob_detached
    for name, call in (("torch eager", eager), ("torch.compile", head.compiled(eager))):
        add(name, call, None)
        if trained_rows is not None:
            add(name, call, trained_rows)
    for peer in fused_peers(shape.device):
        match peer:
            case Missing():
                variants.append(peer)
            case LogprobPeer():
                add(peer.name, peer.call, trained_rows, peer.does)
            case LossPeer():
                does = "no entropy" if peer.is_ours else "cross-entropy of all rows: no weights, ratio, entropy"
                run = partial(_of_loss, inputs, peer.prepared(inputs, CLIP), peer.is_ours)
                variants.append(Variant(peer.name, run, does))
    variants = [
        replace(variant, prepare=inputs.clear) if isinstance(variant, Variant) else variant for variant in variants
    ]
    flops, num_bytes = head.head_flops(shape), head.head_bytes(inputs)
    return Bench(variants, partial(_judge, inputs, objective), flops, num_bytes, head.result_bytes(inputs), [sentence])


def _ours(inputs: HeadInputs, loss_inputs: LossInputs) -> Results:
    out = linear_policy_loss(inputs.hidden, inputs.weight, inputs.targets, loss_inputs)
    out.loss.backward()
    return {"value": out.loss.detach(), "logprobs": out.logprobs, "entropy": out.entropy, **inputs.gradients()}


def _by_triton(inputs: HeadInputs, loss_inputs: LossInputs) -> Results:
    os.environ[ENVIRONMENT] = "linear_policy_loss=triton"
    try:
        return _ours(inputs, loss_inputs)
    finally:
        del os.environ[ENVIRONMENT]


def _loss_inputs(inputs: HeadInputs) -> LossInputs:
    return LossInputs(
        objective=PolicyObjective(clip_low=CLIP, clip_high=CLIP, mpt_probability=None),
        advantages=inputs.advantages,
        mask=inputs.mask,
        cu_seqlens=inputs.cu_seqlens,
        old_logprobs=inputs.old_logprobs,
        normaliser=float(inputs.num_trained),
    )


def _objective(inputs: HeadInputs) -> Objective:
    """Return the loss over the mask: the negated objective of arXiv:1707.06347, eq. 7."""
    total = inputs.num_trained

    def objective(logprobs: Tensor, entropy: Tensor | None, rows: Rows) -> Tensor:
        old, advantages = inputs.old_logprobs[rows], inputs.token_advantages[rows]
        ratio = torch.exp(logprobs - old)
        terms = -torch.minimum(ratio * advantages, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        return (terms if inputs.mask is None else terms * inputs.mask[rows]).sum() / total

    return objective


def _of_loss(inputs: HeadInputs, call: Callable[[], Tensor], is_ours: bool) -> Results:
    loss = call()
    loss.backward()
    return {"value": loss.detach(), **inputs.gradients()} if is_ours else {}


def _judge(inputs: HeadInputs, objective: Objective) -> Judgement:
    # The terms of the loss nearly cancel, so errors are judged relative to the size of the terms.
    return replace(head.judge(inputs, objective), scales={"value": float(inputs.token_advantages.abs().mean())})


CASE = Case("linear_policy_loss", partial(head.head_shapes, with_masks=True), _build)
