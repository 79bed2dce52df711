"""Packing in plain PyTorch: the definition."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from marsrl.kernels.checks import kept_first, sequence_of_tokens


def pack_reference(
    token_ids: Tensor,
    is_sampled: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
    logprobs: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The fields of Packed in order."""
    sequence_of = sequence_of_tokens(cu_seqlens, num_tokens)
    is_last = torch.ones(num_tokens, dtype=torch.bool, device=token_ids.device)
    is_last[:-1] = sequence_of[1:] != sequence_of[:-1]

    def padded(values: Tensor) -> Tensor:
        return pad(values, (0, num_tokens - values.numel()))

    def of_next(values: Tensor) -> Tensor:
        return padded(values).roll(-1).masked_fill(is_last, 0)

    def where_masked(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(mask, of_next(values), 0)

    token_ids, mask = token_ids.long(), of_next(is_sampled)
    places = torch.arange(num_tokens, device=token_ids.device) - cu_seqlens.long()[sequence_of]
    return padded(token_ids), places, of_next(token_ids), mask, where_masked(logprobs), where_masked(weights)


def kept_rows_reference(mask: Tensor, num_kept: int) -> Tensor:
    """[num_kept] int64: where mask [T] is set, ascending, then -1."""
    number, tokens = kept_first(mask)
    rows = pad(tokens[:num_kept], (0, max(0, num_kept - tokens.numel())), value=-1)
    return torch.where(torch.arange(num_kept, device=mask.device) < number, rows, -1)
