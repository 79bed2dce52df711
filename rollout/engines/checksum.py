"""A 64-bit checksum of a tensor's bits: equal on CPU and GPU, sensitive to the order of the elements.

    checksum = sum over 8-byte words i of mix(word_i xor key_i)   (mod 2^64),   key_i = (i + 1) * golden ratio

with mix = multiply, fold the high half down, multiply (as in MurmurHash3's finaliser). A sum is associative, so any
number of threads gives the same value. It finds corruption, not attacks.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -49064778989728563  # 0xFF51AFD7ED558CCD
_MIX_2 = -4265267296055464877  # 0xC4CEB9FE1A85EC53
_WORDS = 1 << 15  # words a round: 256 KiB, stays in the L2 cache of a CPU core
_WORDS_CUDA = 1 << 24


def checksum(tensor: Tensor) -> int:
    """The checksum of the tensor's values in row-major order, as a signed 64-bit integer.

    Shape does not enter, dtype does (through the bits): -0.0 and 0.0 differ, as do float32 and bfloat16 ones.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    num_bytes = data.numel()
    whole = num_bytes // 8 * 8
    step = _WORDS_CUDA if data.is_cuda else _WORDS
    words = _as_words(data[:whole])
    key = torch.arange(1, min(step, max(words.numel(), 1)) + 1, device=data.device, dtype=torch.int64) * _GOLDEN
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), step):
        block = words[start : start + step]
        salt = _wrap(start * _GOLDEN)
        total += _mix(block ^ (key[: block.numel()] + salt))
    if whole < num_bytes:
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: num_bytes - whole] = data[whole:]
        total += _mix(tail.view(torch.int64) ^ _wrap((whole // 8 + 1) * _GOLDEN))
    return _wrap(int(total.item()) + num_bytes * _MIX_1)


def _as_words(data: Tensor) -> Tensor:
    """[N] uint8 as [N/8] int64; a slice that does not start at a multiple of 8 bytes is copied."""
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _mix(words: Tensor) -> Tensor:
    words = words.mul_(_MIX_1)
    words ^= (words >> 32) & 0xFFFFFFFF  # int64 shifts are arithmetic: cut the sign off
    return words.mul_(_MIX_2).sum()


def _wrap(value: int) -> int:
    """Python's integer as the int64 that wraps around as tensors do."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
