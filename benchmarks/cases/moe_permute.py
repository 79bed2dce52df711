"""moe_permute and moe_unpermute: copy tokens to rows sorted by expert, and sum each token's rows; forward and backward.

The time includes reading the router's map. The router's weights are permuted too, but their gradient, which is small compared
with that of the tokens, is left out.
"""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Compared, Missing, Shape, Variant, normal
from peers import why_not_imported
from torch import Tensor

from marsrl.kernels import RowOrder, moe_permute, moe_unpermute

TOP_K = 8


def _shapes(device: str, quick: bool) -> list[Shape]:
    """Return the shapes; each token goes to 8 experts."""
    if quick:
        return [Shape(device, tokens=32, hidden=16, experts=16)]
    if device == "cpu":
        return [
            Shape(device, tokens=1024, hidden=256, experts=32),
            Shape(device, tokens=4096, hidden=512, experts=64),
            Shape(device, "bfloat16", tokens=4096, hidden=512, experts=64),
        ]
    return [Shape(device, "bfloat16", tokens=tokens, hidden=2048, experts=128) for tokens in (4096, 16384)]


def _ours(hidden: Tensor, weights: Tensor, routing_map: Tensor) -> Tensor:
    order = RowOrder.of_map(routing_map, TOP_K * hidden.shape[0])
    rows, _ = moe_permute(hidden, weights, order)
    return moe_unpermute(rows, order)


def _eager(hidden: Tensor, weights: Tensor, routing_map: Tensor) -> Tensor:
    expert_of, token_of = routing_map.t().nonzero().unbind(1)
    weights[token_of, expert_of]
    return torch.zeros_like(hidden).index_add(0, token_of, hidden[token_of])


def _build(shape: Shape) -> Bench:
    randn, dtype = normal(shape), getattr(torch, shape.dtype)
    hidden = randn(shape.tokens, shape.hidden).to(dtype).requires_grad_()
    scores = randn(shape.tokens, shape.experts)
    routing_map = torch.zeros_like(scores).bool().scatter(1, scores.topk(TOP_K).indices, True)
    routing = {"weights": scores.softmax(1) * routing_map, "routing_map": routing_map}
    compared = Compared({"dx": hidden}, randn(shape.tokens, shape.hidden).to(dtype))
    variants: list[Variant | Missing] = [
        compared.variant("ours", partial(_ours, **routing)),
        compared.variant("torch eager", partial(_eager, **routing), "sums in the rows' dtype; synchronises with a GPU"),
    ]
    try:
        from megatron.core.transformer.moe import moe_utils
    except Exception as error:  # A broken peer must not end the benchmark; its reason is printed.
        variants.append(Missing("megatron-core, unfused", why_not_imported(error)))
    else:

        def megatron(hidden: Tensor, weights: Tensor, routing_map: Tensor) -> Tensor:
            rows, _, order = moe_utils.permute(hidden, routing_map, weights, TOP_K * hidden.shape[0])
            return moe_utils.unpermute(rows, order, hidden.shape, routing_map=routing_map)

        does = "sums in the rows' dtype; synchronises with a GPU"
        variants.append(compared.variant("megatron-core, unfused", partial(megatron, **routing), does))
    # Both ops and both gradients; each reads tokens and writes rows, or the reverse.
    num_bytes = 4.0 * (TOP_K + 1) * hidden.nbytes
    flops = 2.0 * TOP_K * hidden.numel()
    return Bench(variants, partial(compared.judge, partial(_eager, **routing)), flops, num_bytes, 2 * hidden.nbytes)


CASE = Case("moe_permute", _shapes, _build)
