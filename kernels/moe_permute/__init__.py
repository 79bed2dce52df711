"""Token permutation of MoE layers: copy tokens to rows sorted by expert, and sum each token's rows."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from marsrl.kernels.checks import FLOATS, INTEGERS, check, check_cu_seqlens, check_range
from marsrl.kernels.differentiable import Gradient
from marsrl.kernels.dispatch import Op, of_first, why_not_host
from marsrl.kernels.moe_permute.cpu import CPU_MOVES
from marsrl.kernels.moe_permute.reference import moe_permute_reference, moe_unpermute_reference
from marsrl.kernels.moe_permute.two_moves import Permute, Unpermute
from marsrl.kernels.triton_machine import why_not_triton_float32


class RowOrder(NamedTuple):
    """Order of R rows, one per (token, expert) pair, sorted by expert and then by token.

    T is the number of tokens. All tensors are int64, and are made without synchronisation with a device.

    token_of: [R], the token of each row.
    row_of: [R], the rows of token 0 in the order of its experts, then those of token 1, and so on.
    bounds: [T+1], each token's first index in row_of; R at the end.
    weight_of: [R], index of each row's weight in the router's weights [T, E], flattened.
    """

    token_of: Tensor
    row_of: Tensor
    bounds: Tensor
    weight_of: Tensor

    @classmethod
    def of_map(cls, routing_map: Tensor, num_rows: int) -> "RowOrder":
        """Return the order for routing_map [T, E] bool, True where a token goes to an expert.

        num_rows: number of True entries.

        Raises:
            ValueError: a map in host memory does not have num_rows True entries. A map on a device is not checked: with fewer
                True entries the device reports an error, and with more the rows of the last experts are left out.
        """
        check("RowOrder", "routing_map", routing_map, (None, None), (torch.bool,))
        if routing_map.device.type == "cpu" and (num_true := int(routing_map.sum())) != num_rows:
            raise ValueError(f"RowOrder: routing_map has {num_true} true elements, expected {num_rows}")
        expert_of, token_of = torch.nonzero_static(routing_map.t(), size=num_rows).unbind(1)
        bounds = pad(routing_map.sum(1).cumsum(0), (1, 0))
        weight_of = token_of * routing_map.shape[1] + expert_of
        return cls(token_of.contiguous(), token_of.argsort(stable=True), bounds, weight_of)

    @classmethod
    def of_experts(cls, expert_of: Tensor) -> "RowOrder":
        """Return the order for R tokens with one expert each.

        expert_of: [R] int. The weights of moe_permute are then [R].
        """
        check("RowOrder", "expert_of", expert_of, (None,), INTEGERS)
        token_of = expert_of.argsort(stable=True)
        bounds = torch.arange(expert_of.numel() + 1, device=expert_of.device, dtype=torch.int64)
        return cls(token_of, token_of.argsort(), bounds, token_of)


def moe_permute(hidden: Tensor, weights: Tensor, order: RowOrder) -> tuple[Tensor, Tensor]:
    """Return one row for each expert of each token, and the row's weight; differentiable.

    The gradient of a token is the sum of its rows' gradients, added in float32, in the order of the token's experts, and rounded
    once, so every run gives the same bits. Only the order is saved for the backward, neither hidden nor weights.

    Args:
        hidden: [T, H] float.
        weights: [T, E] in any float dtype, or [R] if the order was made by of_experts.

    Returns:
        [R, H] in the dtype of hidden, and [R] in the dtype of weights.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("moe_permute", "hidden", hidden, (None, None), FLOATS)
    check("moe_permute", "weights", weights, tuple(weights.shape), FLOATS, hidden.device)
    token_of, row_of, bounds, weight_of = order
    _check_order("moe_permute", hidden, row_of.numel(), token_of, row_of, bounds)
    if bounds.numel() != hidden.shape[0] + 1:
        raise ValueError(f"moe_permute: hidden has {hidden.shape[0]} tokens, expected {bounds.numel() - 1} as in order")
    check("moe_permute", "order.weight_of", weight_of, (row_of.numel(),), (torch.int64,), hidden.device)
    check_range("moe_permute", "order.weight_of", weight_of, weights.numel() - 1)
    results: tuple[Tensor, Tensor] = _PERMUTE(hidden, weights, *order)
    return results


def moe_unpermute(rows: Tensor, order: RowOrder) -> Tensor:
    """Sum each token's rows; a token without rows gets 0. Differentiable.

    Rows are added in float32, in the order of the token's experts, and the sum is rounded once, so every run gives the same bits.
    Only the order is saved for the backward.

    Rows must already be multiplied by the router's weights. swiglu does this between an expert's two layers, where rows are
    narrower.

    Args:
        rows: [R, H] float.

    Returns:
        [T, H] in the dtype of rows.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("moe_unpermute", "rows", rows, (None, None), FLOATS)
    token_of, row_of, bounds, _ = order
    _check_order("moe_unpermute", rows, rows.shape[0], token_of, row_of, bounds)
    sums: Tensor = _UNPERMUTE(rows, token_of, row_of, bounds)
    return sums


def _check_order(op: str, x: Tensor, num_rows: int, token_of: Tensor, row_of: Tensor, bounds: Tensor) -> None:
    for name, tensor in (("token_of", token_of), ("row_of", row_of)):
        check(op, f"order.{name}", tensor, (num_rows,), (torch.int64,), x.device)
    num_tokens = check_cu_seqlens(op, bounds, num_rows, x.device, "order.bounds")
    check_range(op, "order.token_of", token_of, num_tokens - 1)
    check_range(op, "order.row_of", row_of, num_rows - 1)


_OF_PERMUTE = Gradient("moe_permute", num_tensors=6, num_outputs=2, num_unread=2)
_OF_UNPERMUTE = Gradient("moe_unpermute", num_tensors=4, num_unread=1)
_PERMUTE = Op(
    "moe_permute",
    (
        _OF_PERMUTE.triton("moe_permute.triton_impl", "triton_permute", of_first(why_not_triton_float32, "hidden")),
        _OF_PERMUTE.implementation("cpu", partial(Permute, CPU_MOVES), of_first(why_not_host, "hidden")),
        _OF_PERMUTE.reference(moe_permute_reference),
    ),
)
_UNPERMUTE = Op(
    "moe_unpermute",
    (
        _OF_UNPERMUTE.triton("moe_permute.triton_impl", "triton_unpermute", of_first(why_not_triton_float32, "rows")),
        _OF_UNPERMUTE.implementation("cpu", partial(Unpermute, CPU_MOVES), of_first(why_not_host, "rows")),
        _OF_UNPERMUTE.reference(moe_unpermute_reference),
    ),
)
