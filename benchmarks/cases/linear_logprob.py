"""linear_logprob: log-prob and entropy of each token with gradients into both, and without, as in evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from case import Bench, Case, Judgement, Missing, Results, Shape, Variant
from head_problem import (
    HeadInputs,
    head_bytes,
    head_shapes,
    judge,
    make_inputs,
    result_bytes,
)
from peers import LogprobFunction, LogprobPeer
from peers.fused import fused_peers
from peers.plain import compiled, eager_logprob, torch_linear_cross_entropy
from torch import Tensor

from marsrl.kernels import linear_logprob

NO_GRADIENT = "no gradient wanted"


def _build(shape: Shape) -> Bench:
    inputs = make_inputs(shape)
    generator = torch.Generator(shape.device).manual_seed(1)
    # dL/dlogp and dL/dH of each token; the entropy's is small, as an entropy bonus is
    gradients = torch.randn(2, shape.tokens, generator=generator, device=shape.device) * torch.tensor(
        [[1.0], [0.01]], device=shape.device
    )
    peers = [
        LogprobPeer("ours", _ours, has_entropy_gradient=True),
        LogprobPeer("torch eager", eager_logprob, has_entropy_gradient=True),
        LogprobPeer("torch.compile", compiled(eager_logprob), has_entropy_gradient=True),
        torch_linear_cross_entropy(),
        *fused_peers(shape.device),
    ]
    run_peer = _evaluate if shape.note == NO_GRADIENT else _run
    variants, missing = list[Variant](), list[Missing]()
    for peer in peers:
        if isinstance(peer, Missing):
            missing.append(peer)
        elif isinstance(peer, LogprobPeer):
            does = "" if peer.has_entropy_gradient else "no entropy"
            variants.append(Variant(peer.name, partial(run_peer, inputs, gradients, peer.call), does, inputs.clear))
    judge_them = partial(_judge, inputs, gradients)
    flops = 2 * shape.tokens * shape.hidden * shape.vocab
    if shape.note == NO_GRADIENT:
        return Bench(variants, missing, judge_them, flops, head_bytes(inputs) - result_bytes(inputs), 0)
    # logits twice, dX, dW: their gradient is known after the forward
    return Bench(variants, missing, judge_them, 4 * flops, head_bytes(inputs), result_bytes(inputs))


def _shapes(device: str, quick: bool) -> list[Shape]:
    shapes = head_shapes(device, quick, with_masks=False)
    largest = max(
        (shape for shape in shapes if not shape.note), key=lambda shape: (shape.tokens <= 16384, shape.tokens)
    )
    return [*shapes, replace(largest, note=NO_GRADIENT)]


def _ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    found = linear_logprob(hidden, weight, targets)
    return found.logprobs, found.entropy


def _run(inputs: HeadInputs, gradients: Tensor, call: LogprobFunction) -> Results:
    logprobs, entropy = call(inputs.hidden, inputs.weight, inputs.targets)
    scalar = (logprobs * gradients[0]).sum()
    if entropy is None:  # its dX and dW are of another scalar
        scalar.backward()
        return {"logprobs": logprobs.detach()}
    (scalar + (entropy * gradients[1]).sum()).backward()
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), **inputs.gradients()}


def _evaluate(inputs: HeadInputs, gradients: Tensor, call: LogprobFunction) -> Results:
    with torch.no_grad():
        logprobs, entropy = call(inputs.hidden, inputs.weight, inputs.targets)
    return {"logprobs": logprobs} if entropy is None else {"logprobs": logprobs, "entropy": entropy}


def _judge(inputs: HeadInputs, gradients: Tensor) -> Judgement:
    def objective(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return (logprobs * gradients[0, rows] + entropy * gradients[1, rows]).sum()

    found = judge(inputs, objective)
    for results in (found.exact, found.plain):
        del results["value"]
    return found


CASE = Case("linear_logprob", _shapes, _build)
