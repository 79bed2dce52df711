"""linear_policy_loss: hidden states and head to the clipped loss, dX and dW. The headline."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from case import Bench, Case, Judgement, Missing, Results, Shape, Variant
from head_problem import (
    HeadInputs,
    floors,
    head_bytes,
    head_flops,
    head_shapes,
    judge,
    make_inputs,
    result_bytes,
)
from peers import CrossEntropyPeer, LogprobFunction, LogprobPeer, PolicyLossPeer, PolicyProblem
from peers.fused import fused_peers
from peers.plain import compiled, eager_logprob_detached, torch_linear_cross_entropy
from torch import Tensor

from marsrl.kernels import LossInputs, PolicyObjective, linear_policy_loss
from marsrl.kernels.dispatch import ENVIRONMENT
from marsrl.kernels.linear_policy_loss import served_by

CLIP = 0.2
KEPT_ROWS = ", unmasked rows only"


def _build(shape: Shape) -> Bench:
    inputs = make_inputs(shape)
    bare, sentence = floors(inputs, shape)
    name = served_by(inputs.hidden, inputs.weight, inputs.targets, _loss_inputs(inputs))
    variants, missing = [Variant("ours", partial(_ours, inputs), f"by {name}"), *bare], list[Missing]()
    if name == "quack":
        variants.append(Variant("ours, triton", partial(_by_triton, inputs), "cuBLAS and row kernels"))
    kept = None if inputs.mask is None else inputs.mask.nonzero()[:, 0]
    baselines = {"torch eager": _eager_loss, "torch.compile": compiled(_eager_loss)}
    for name, loss in baselines.items():
        variants.append(Variant(name, partial(_plain, inputs, loss, None)))
        if kept is not None:
            variants.append(Variant(name + KEPT_ROWS, partial(_plain, inputs, loss, kept)))
    for peer in [torch_linear_cross_entropy(), *fused_peers(shape.device)]:
        match peer:
            case Missing():
                missing.append(peer)
            case LogprobPeer():
                does = "" if peer.has_entropy_gradient else "no entropy"
                run = partial(_of_logprobs, inputs, peer.call, kept)
                variants.append(Variant(peer.name + ("" if kept is None else KEPT_ROWS), run, does))
            case PolicyLossPeer():
                run = partial(_of_loss, inputs, peer.prepared(_problem(inputs)))
                variants.append(Variant(peer.name, run, "no entropy"))
            case CrossEntropyPeer():
                run = partial(_of_cross_entropy, inputs, peer.call)
                variants.append(Variant(peer.name, run, "cross-entropy of all rows: no weights, ratio, entropy"))
    variants = [replace(variant, prepare=inputs.clear) for variant in variants]
    return Bench(
        variants, missing, partial(_judge, inputs), head_flops(shape), head_bytes(inputs), result_bytes(inputs),
        [sentence],
    )  # fmt: skip


def _ours(inputs: HeadInputs) -> Results:
    out = linear_policy_loss(inputs.hidden, inputs.weight, inputs.targets, _loss_inputs(inputs))
    out.loss.backward()
    return {
        "loss": out.loss.detach(),
        "logprobs": out.logprobs,
        "entropy": out.entropy,
        **inputs.gradients(),
    }


def _by_triton(inputs: HeadInputs) -> Results:
    os.environ[ENVIRONMENT] = "linear_policy_loss=triton"
    try:
        return _ours(inputs)
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


def _clipped(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """[R], arXiv:1707.06347, eq. 7, negated."""
    ratio = torch.exp(logprobs - old)
    return -torch.minimum(ratio * advantages, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantages)


def _eager_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, total: float
) -> tuple[Tensor, Tensor, Tensor]:
    logp, entropy = eager_logprob_detached(hidden, weight, targets)
    return (_clipped(logp, old, advantages) * mask).sum() / total, logp, entropy


def _plain(inputs: HeadInputs, loss_of: Callable[..., tuple[Tensor, Tensor, Tensor]], kept: Tensor | None) -> Results:
    hidden, rest = inputs.hidden, [inputs.targets, inputs.old_logprobs, inputs.token_advantages, _mask(inputs)]
    if kept is not None:
        hidden, rest = hidden[kept], [each[kept] for each in rest]
    targets, old, advantages, mask = rest
    loss, logp, entropy = loss_of(hidden, inputs.weight, targets, old, advantages, mask, float(inputs.num_trained))
    loss.backward()
    results = {"loss": loss.detach(), **inputs.gradients()}
    if kept is None:
        return {**results, "logprobs": logp.detach() * mask, "entropy": entropy * mask}
    zeros = torch.zeros_like(inputs.old_logprobs)
    logprobs, entropies = zeros.index_copy(0, kept, logp.detach()), zeros.index_copy(0, kept, entropy)
    return {**results, "logprobs": logprobs, "entropy": entropies}


def _of_logprobs(inputs: HeadInputs, call: LogprobFunction, kept: Tensor | None) -> Results:
    hidden, rest = inputs.hidden, [inputs.targets, inputs.old_logprobs, inputs.token_advantages]
    if kept is not None:
        hidden, rest = hidden[kept], [each[kept] for each in rest]
    targets, old, advantages = rest
    logp, entropy = call(hidden, inputs.weight, targets)
    loss = _clipped(logp, old, advantages).sum() / inputs.num_trained
    loss.backward()
    results = {"loss": loss.detach(), **inputs.gradients()}
    per_row = {"logprobs": logp} if entropy is None else {"logprobs": logp, "entropy": entropy}
    for name, values in per_row.items():
        values = values.detach().float()
        results[name] = values if kept is None else torch.zeros_like(inputs.old_logprobs).index_copy(0, kept, values)
    return results


def _of_loss(inputs: HeadInputs, call: Callable[[], Tensor]) -> Results:
    loss = call()
    loss.backward()
    return {"loss": loss.detach(), **inputs.gradients()}


def _of_cross_entropy(inputs: HeadInputs, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Results:
    """Results of cross entropy: none, as it is another loss."""
    call(inputs.hidden, inputs.weight, inputs.targets).backward()
    return {}


def _mask(inputs: HeadInputs) -> Tensor:
    """[T] float32."""
    return torch.ones_like(inputs.old_logprobs) if inputs.mask is None else inputs.mask.float()


def _problem(inputs: HeadInputs) -> PolicyProblem:
    return PolicyProblem(
        inputs.hidden, inputs.weight, inputs.targets, inputs.mask, inputs.old_logprobs, inputs.advantages, CLIP,
        inputs.num_trained,
    )  # fmt: skip


def _judge(inputs: HeadInputs) -> Judgement:
    advantages, mask = inputs.token_advantages, _mask(inputs)

    def objective(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        old = inputs.old_logprobs[rows].to(logprobs.dtype)
        return (_clipped(logprobs, old, advantages[rows]) * mask[rows]).sum() / inputs.num_trained

    found = judge(inputs, objective)
    for results in (found.exact, found.plain):
        results["loss"] = results.pop("value")
        results["logprobs"], results["entropy"] = results["logprobs"] * mask, results["entropy"] * mask
    # the loss is a sum whose terms cancel: its size is that of the terms
    return replace(found, scales={"loss": float(advantages.abs().mean())})


CASE = Case("linear_policy_loss", partial(head_shapes, with_masks=True), _build)
