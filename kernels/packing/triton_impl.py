"""Packing in Triton: one pass over the positions."""
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from marsrl.kernels.checks import sequence_of_tokens
from marsrl.kernels.triton_machine import on_device_of

_TOKENS_OF_PROGRAM = 1024


@triton.jit
def _pack(
    token_ids,
    is_sampled,
    cu_seqlens,
    logprobs,  # None: not given
    weights,
    num_given,
    num_tokens,
    sequence_of,  # [num_tokens] int64
    packed_ids,
    position_ids,
    targets,
    mask,
    packed_logprobs,
    packed_weights,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    sequence = tl.load(sequence_of + token, mask=is_token, other=0)
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    tl.store(
        packed_ids + token, tl.load(token_ids + token, mask=token < num_given, other=0).to(tl.int64), mask=is_token
    )
    tl.store(position_ids + token, token - begin, mask=is_token)
    following = token + 1
    has_next = (following < end) & (following < num_given)
    target = tl.load(token_ids + following, mask=has_next, other=0).to(tl.int64)
    is_trained = tl.load(is_sampled + following, mask=has_next, other=0) != 0
    tl.store(targets + token, target, mask=is_token)
    tl.store(mask + token, is_trained.to(tl.uint8), mask=is_token)
    if logprobs is not None:
        tl.store(packed_logprobs + token, tl.load(logprobs + following, mask=is_trained, other=0.0), mask=is_token)
    if weights is not None:
        tl.store(packed_weights + token, tl.load(weights + following, mask=is_trained, other=0.0), mask=is_token)


def pack_triton(
    token_ids: Tensor,
    is_sampled: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
    logprobs: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The fields of Packed in order."""
    integers = torch.empty(3, num_tokens, dtype=torch.int64, device=token_ids.device)
    mask = torch.empty(num_tokens, dtype=torch.bool, device=token_ids.device)
    packed = [None if values is None else values.new_empty(num_tokens) for values in (logprobs, weights)]
    if num_tokens:
        with on_device_of(token_ids):
            _pack[(triton.cdiv(num_tokens, _TOKENS_OF_PROGRAM),)](
                token_ids.contiguous(),
                is_sampled.contiguous().view(torch.uint8),
                cu_seqlens.contiguous(),
                None if logprobs is None else logprobs.contiguous(),
                None if weights is None else weights.contiguous(),
                token_ids.numel(),
                num_tokens,
                sequence_of_tokens(cu_seqlens, num_tokens),
                *integers.unbind(),
                mask.view(torch.uint8),
                *packed,
                BLOCK=_TOKENS_OF_PROGRAM,
            )
    return *integers.unbind(), mask, *packed
