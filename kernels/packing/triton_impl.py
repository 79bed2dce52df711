"""Packing in Triton: one pass over the positions, and a mask ranked by two kernels."""
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from marsrl.kernels.triton_machine import on_device_of

_TOKENS_OF_PROGRAM = 1024


@triton.jit
def _sequence_of(cu_seqlens, token, num_sequences, steps):
    """The sequence of packed tokens, the last one with cu_seqlens <= token. `steps` halvings find one of num_sequences."""
    low = tl.zeros_like(token)
    high = low + num_sequences
    for _ in range(steps):
        middle = (low + high) >> 1  # low itself once they are neighbours
        is_left = tl.load(cu_seqlens + middle) <= token
        low = tl.where(is_left, middle, low)
        high = tl.where(is_left, high, middle)
    return low


@triton.jit
def _pack(
    token_ids,
    is_sampled,
    cu_seqlens,
    logprobs,  # None: not given
    weights,
    num_given,
    num_tokens,
    num_sequences,
    steps,
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
    sequence = _sequence_of(cu_seqlens, token, num_sequences, steps)
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


@triton.jit
def _count_kept(mask, counts, num_tokens, BLOCK: tl.constexpr):
    """counts[i] = how many tokens of the i-th part of the mask are set."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_kept = tl.load(mask + token, mask=token < num_tokens, other=0)
    tl.store(counts + tl.program_id(0), tl.sum(is_kept.to(tl.int64)))


@triton.jit
def _place_kept(mask, counts, rows, num_tokens, num_kept, BLOCK: tl.constexpr):
    """rows[k] = the k-th token that is set."""
    program = tl.program_id(0)
    before = tl.zeros((), tl.int64)
    for begin in range(0, program, BLOCK):
        part = begin + tl.arange(0, BLOCK)
        before += tl.sum(tl.load(counts + part, mask=part < program, other=0))
    token = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_kept = tl.load(mask + token, mask=token < num_tokens, other=0).to(tl.int64)
    place = before + tl.cumsum(is_kept) - is_kept
    tl.store(rows + place, token, mask=(is_kept != 0) & (place < num_kept))


def pack_triton(
    token_ids: Tensor,
    is_sampled: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
    logprobs: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The fields of Packed in order."""
    num_sequences = cu_seqlens.numel() - 1
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
                num_sequences,
                num_sequences.bit_length(),
                *integers.unbind(),
                mask.view(torch.uint8),
                *packed,
                BLOCK=_TOKENS_OF_PROGRAM,
            )
    return *integers.unbind(), mask, *packed


def kept_rows_triton(mask: Tensor, num_kept: int) -> Tensor:
    """[num_kept] int64: where mask [T] is set, ascending, then -1."""
    rows = torch.full((num_kept,), -1, dtype=torch.int64, device=mask.device)
    num_tokens = mask.numel()
    if num_tokens == 0 or num_kept == 0:
        return rows
    parts = triton.cdiv(num_tokens, _TOKENS_OF_PROGRAM)
    counts = rows.new_empty(parts)
    with on_device_of(mask):
        bits = mask.contiguous().view(torch.uint8)
        _count_kept[(parts,)](bits, counts, num_tokens, BLOCK=_TOKENS_OF_PROGRAM)
        _place_kept[(parts,)](bits, counts, rows, num_tokens, num_kept, BLOCK=_TOKENS_OF_PROGRAM)
    return rows
