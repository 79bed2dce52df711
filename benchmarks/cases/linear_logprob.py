"""linear_logprob: log-prob and entropy of each token, with gradients through both, and without gradients as in evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import head_problem as head
import torch
from case import Bench, Case, Missing, Results, Shape, Variant
from head_problem import HeadInputs, LogprobFunction, Objective, Rows
from peers import LogprobPeer, fused_peers
from torch import Tensor

from marsrl.kernels import linear_logprob

NO_GRADIENT = "no gradient wanted"


def _build(shape: Shape) -> Bench:
    inputs, objective = head.make_inputs(shape), _objective(shape)
    peers = [
        LogprobPeer("ours", _ours),
        LogprobPeer("torch eager", head.eager_logprob),
        LogprobPeer("torch.compile", head.compiled(head.eager_logprob)),
        *fused_peers(shape.device),
    ]
    run = _evaluate if shape.note == NO_GRADIENT else _run
    variants: list[Variant | Missing] = []
    for peer in peers:
        if isinstance(peer, LogprobPeer):
            variants.append(Variant(peer.name, partial(run, inputs, objective, peer.call), peer.does, inputs.clear))
        elif isinstance(peer, Missing):
            variants.append(peer)
    flops = 2 * shape.tokens * shape.hidden * shape.vocab
    judge_them = partial(head.judge, inputs, objective)
    if shape.note == NO_GRADIENT:
        return Bench(variants, judge_them, flops, head.head_bytes(inputs) - head.result_bytes(inputs), 0)
    # Besides the products for dX and dW, logits are computed twice, because their gradient is known only after the forward.
    return Bench(variants, judge_them, 4 * flops, head.head_bytes(inputs), head.result_bytes(inputs))


def _shapes(device: str, quick: bool) -> list[Shape]:
    shapes = head.head_shapes(device, quick, with_masks=False)
    largest = max(
        (shape for shape in shapes if not shape.note), key=lambda shape: (shape.tokens <= 16384, shape.tokens)
    )
    return [*shapes, replace(largest, note=NO_GRADIENT)]


def _objective(shape: Shape) -> Objective:
    generator = torch.Generator(shape.device).manual_seed(1)
    # Gradients of the loss in each token's log-prob and entropy; `objective` scales the latter down, as an entropy bonus would.
    of_logprobs, of_entropy = torch.randn(2, shape.tokens, generator=generator, device=shape.device)

    def objective(logprobs: Tensor, entropy: Tensor | None, rows: Rows) -> Tensor:
        value = (logprobs * of_logprobs[rows]).sum()
        return value if entropy is None else value + (entropy * 0.01 * of_entropy[rows]).sum()

    return objective


def _ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_prob = linear_logprob(hidden, weight, targets)
    return log_prob.logprobs, log_prob.entropy


def _run(inputs: HeadInputs, objective: Objective, call: LogprobFunction) -> Results:
    results = head.through_logprobs(inputs, objective, call)
    del results["value"]
    # A peer without entropy differentiates another scalar, so its dX and dW cannot be compared.
    return results if "entropy" in results else {"logprobs": results["logprobs"]}


def _evaluate(inputs: HeadInputs, _: Objective, call: LogprobFunction) -> Results:
    with torch.no_grad():
        logprobs, entropy = call(inputs.hidden, inputs.weight, inputs.targets)
    return {"logprobs": logprobs} if entropy is None else {"logprobs": logprobs, "entropy": entropy}


CASE = Case("linear_logprob", _shapes, _build)
