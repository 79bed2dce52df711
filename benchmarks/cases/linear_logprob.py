"""linear_logprob: log-prob and entropy of each token with gradients into both."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from marsrl.benchmarks.case import Bench, Case, Judgement, Missing, Results, Shape, Variant
from marsrl.benchmarks.head_problem import (
    HeadInputs,
    head_bytes,
    head_shapes,
    judge,
    make_inputs,
    result_bytes,
)
from marsrl.benchmarks.peers import LogprobFunction, LogprobPeer
from marsrl.benchmarks.peers.fused import fused_peers
from marsrl.benchmarks.peers.plain import compiled, eager_logprob, torch_linear_cross_entropy
from marsrl.kernels import linear_logprob


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
    variants, missing = [], []
    for peer in peers:
        if isinstance(peer, Missing):
            missing.append(peer)
        elif isinstance(peer, LogprobPeer):
            does = "" if peer.has_entropy_gradient else "no entropy"
            variants.append(Variant(peer.name, partial(_run, inputs, gradients, peer.call), does, inputs.clear))
    flops = 8 * shape.tokens * shape.hidden * shape.vocab  # logits twice: their gradient is known after the forward
    return Bench(
        variants, missing, partial(_judge, inputs, gradients), flops, head_bytes(inputs), result_bytes(inputs)
    )  # fmt: skip


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


def _judge(inputs: HeadInputs, gradients: Tensor) -> Judgement:
    def objective(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return (logprobs * gradients[0, rows] + entropy * gradients[1, rows]).sum()

    found = judge(inputs, objective)
    for results in (found.exact, found.plain):
        del results["value"]
    return found


CASE = Case("linear_logprob", partial(head_shapes, with_masks=False), _build)
