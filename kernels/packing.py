"""Packing of sequences into inputs of one forward pass, and selection of the trained positions.

token   a0 a1 a2 | b0 b1 b2 b3 |            a0 and b0 b1 are prompts; the policy sampled the rest
target  a1 a2 -  | b1 b2 b3 -  |            the next token of the sequence; the last token has none
mask     x  x    |     x  x    |            set where the target was sampled
row      0  1          4  5                 kept_rows(mask)

All functions use PyTorch operations on whole arrays, and do not synchronise unless their docstring says so.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_end

from marsrl.kernels.checks import INTEGERS, check, check_cu_seqlens, kept_first, sequence_of_tokens


@dataclass(frozen=True)
class Packed:
    """Inputs and targets of T positions. All fields are [T].

    token_ids: int64.
    position_ids: int64, counted from 0 in every sequence.
    targets: int64, the next token of the sequence; 0 if there is none.
    mask: bool, True if the policy sampled the next token.
    logprobs, weights: float32, values of the next token, 0 where the mask is False; None if `pack` got none.
    """

    token_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    mask: Tensor
    logprobs: Tensor | None
    weights: Tensor | None


def pack(
    token_ids: Tensor,
    is_sampled: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
    *,
    logprobs: Tensor | None = None,
    weights: Tensor | None = None,
) -> Packed:
    """Turn flat arrays of tokens into positions, each with the next token as its target.

    Args:
        token_ids: [N] int, the tokens of all sequences end to end.
        is_sampled: [N] bool, True if the policy chose the token; False in prompts and tool output.
        cu_seqlens: [S+1] int, from 0 to num_tokens; positions after the N-th are padding and belong to the last sequence.
        num_tokens: T, at least N. An argument because reading it from cu_seqlens would make the host wait for the device.
        logprobs, weights: [N] float32, one value per token; not read where is_sampled is False.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("pack", "token_ids", token_ids, (None,), INTEGERS)
    num_given, device = token_ids.shape[0], token_ids.device
    if num_tokens < num_given:
        raise ValueError(f"pack: num_tokens is {num_tokens}, expected at least the {num_given} of token_ids")
    check("pack", "is_sampled", is_sampled, (num_given,), (torch.bool,), device)
    check_cu_seqlens("pack", cu_seqlens, num_tokens, device)
    for name, values in (("logprobs", logprobs), ("weights", weights)):
        if values is not None:
            check("pack", name, values, (num_given,), (torch.float32,), device)
    sequence_of = sequence_of_tokens(cu_seqlens, num_tokens)
    is_last = torch.ones(num_tokens, dtype=torch.bool, device=device)
    is_last[:-1] = sequence_of[1:] != sequence_of[:-1]

    def padded(values: Tensor) -> Tensor:
        return pad_end(values, (0, num_tokens - values.numel()))

    def of_next(values: Tensor) -> Tensor:
        return padded(values).roll(-1).masked_fill(is_last, 0)

    def where_masked(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(mask, of_next(values), 0)

    token_ids, mask = token_ids.long(), of_next(is_sampled)
    places = torch.arange(num_tokens, device=device) - cu_seqlens.long()[sequence_of]
    return Packed(padded(token_ids), places, of_next(token_ids), mask, where_masked(logprobs), where_masked(weights))


def kept_rows(mask: Tensor, *, num_kept: int | None = None) -> Tensor:
    """Return the positions where mask [T] bool is set, [K] int64, ascending.

    num_kept: K, if the host knows it. None: K is counted, which synchronises if mask is on a device. On a device num_kept is not
    checked; if it is too large, the last rows are -1.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("kept_rows", "mask", mask, (None,), (torch.bool,))
    if num_kept is None or mask.device.type == "cpu":
        num_true = int(mask.sum())
        if num_kept is not None and num_kept != num_true:
            raise ValueError(
                f"kept_rows: num_kept is {num_kept}, expected {num_true}, the number of set elements of mask"
            )
        num_kept = num_true
    number, tokens = kept_first(mask)
    rows = pad_end(tokens[:num_kept], (0, max(0, num_kept - tokens.numel())), value=-1)
    return torch.where(torch.arange(num_kept, device=mask.device) < number, rows, -1)
