"""64-bit checksum of a tensor: equal on CPU and GPU, sensitive to every bit and its position.

    sum over 8-byte words i of mix(word_i xor key_i)  +  hash(dtype, shape)   (mod 2^64),   key_i = (i + 1) * golden ratio

mix is MurmurHash3's 64-bit finaliser (shift-xor, multiply, shift-xor, multiply, shift-xor), a bijection. Therefore:
- A change within one word (any flipped bit, any changed element) is always detected, because it changes one term of the sum.
- A change of several words (swapped elements, permuted rows or experts, another offset) changes the sum by a difference of mixed
  words. This difference is 0 for one in 2^64 of such changes. The last shift-xor is necessary for this: without it, swapping x
  and -x moves the sum by 2^63 +- 2^31 twice, which cancels half of the time.
- Parts of a tensor can be summed in any order, by any number of threads, on any device.
The checksum detects corruption, not attacks. csrc/cpu computes it at memory speed. On GPUs, and without that library, PyTorch
operations compute the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.rollout.weights.layout import Box, ShardLayout, whole_box

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_WORDS = 1 << 15  # words per step of the PyTorch implementation; 256 KiB fit in the L2 cache of a CPU core
_WORDS_CUDA = 1 << 24


def checksum(tensor: Tensor) -> int:
    """Return the checksum of the tensor's values in row-major order, in [0, 2^64).

    -0.0 and 0.0 have different checksums, and so have equal bytes with different dtypes or shapes.
    """
    flat = tensor.reshape(1, tensor.numel())
    total = block_sum(flat[None], whole_box(flat.shape), flat.shape)
    return checksum_of_sum(total, tensor.dtype, tensor.shape)


class ShardSums:
    """Checksums of a shard's fused tensors, computed block by block in any order, without assembling the tensors.

    sums = ShardSums(layout, torch.bfloat16)
    sums.add("model.layers.0.self_attn.q_proj.weight", box, matrix)      # for each block of this rank
    sums.merge(another_rank.totals)                                      # for each other rank
    sums.checksums() == {"model.layers.0.self_attn.qkv_proj.weight": 0x5EED, ...}
    """

    def __init__(self, layout: ShardLayout, dtype: torch.dtype) -> None:
        self.layout, self._dtype = layout, dtype
        self.totals = dict.fromkeys(layout.shapes, 0)

    def add(self, name: str, box: Box, values: Tensor) -> None:
        """Add a block's values [matrices, rows, columns]. box: the block's place in `name`, an HF tensor or a stack."""
        for fused, place in self.layout.placed(name, box):
            self.merge({fused: block_sum(values.to(self._dtype), place, self.layout.shapes[fused])})

    def merge(self, totals: Mapping[str, int]) -> None:
        """Add another rank's sums of blocks."""
        for name, total in totals.items():
            self.totals[name] = (self.totals[name] + total) % (1 << 64)

    def checksums(self) -> dict[str, int]:
        """Return {fused tensor: checksum}. Call it once every block has been added."""
        return {n: checksum_of_sum(self.totals[n], self._dtype, shape) for n, shape in self.layout.shapes.items()}


def checksum_of_sum(total: int, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the checksum of a tensor from the total of its blocks' sums (block_sum)."""
    kind = hashlib.blake2b(f"{dtype} {list(shape)}".encode(), digest_size=8).digest()
    return (total + int.from_bytes(kind, "little")) % (1 << 64)


def block_sum(block: Tensor, at: Box, shape: Sequence[int]) -> int:
    """Return a block's share of the checksum of a tensor of this shape.

    at: the block's box in the tensor. block: the values in this box, [matrices, rows, columns].

    Raises ValueError: the block begins or ends within an 8-byte word, which also has values of a neighbouring block.
    """
    whole, size = whole_box(shape), block.itemsize
    _, num_rows, num_cols = whole.shape
    matrices, rows, cols = block.shape
    assert matrices == 1 or rows == num_rows or cols == num_cols, (at, shape)
    first = ((at.start[0] * num_rows + at.start[1]) * num_cols + at.start[2]) * size
    runs, stride = 1, 0  # number of contiguous ranges of the tensor, and the distance between their starts in bytes
    if cols < num_cols:
        runs, stride = matrices * rows, num_cols * size
    elif rows < num_rows and matrices > 1:
        runs, stride = matrices, num_rows * num_cols * size
    data = block.detach().contiguous().view(-1).view(torch.uint8)
    if runs == 1 and len(data) % 8 and first + len(data) == whole.num_elements * size:  # incomplete last word
        data = torch.cat([data, data.new_zeros(-len(data) % 8)])
    length = len(data) // runs
    if first % 8 or length % 8 or stride % 8:
        raise ValueError(
            f"checksum: a block {list(block.shape)} of {block.dtype} at {at} of {list(shape)} begins or ends within a word of "
            "8 bytes; expected blocks of whole words"
        )
    if data.device.type == "cpu" and library.why_no_cpu_library() is None:
        return int(library.cpu_library().marsrl_word_sum(data, runs, length // 8, first // 8, stride // 8))
    return _word_sum(data.view(runs, length), first // 8, stride // 8) % (1 << 64)


def _word_sum(data: Tensor, first_word: int, stride: int) -> int:
    """Sum the mixed words with PyTorch operations: data [runs, bytes] uint8."""
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()  # PyTorch reads words only at multiples of 8 bytes
    words = data.view(torch.int64)
    if len(words) > 1:
        return _strided_sum(words, first_word, stride)
    words = words[0]
    step = min(_WORDS_CUDA if data.is_cuda else _WORDS, max(1, len(words)))
    whole = len(words) // step * step
    total = _strided_sum(words[:whole].view(-1, step), first_word, step)
    return total + _strided_sum(words[whole:].view(1, -1), first_word + whole, step)


def _strided_sum(words: Tensor, first_word: int, stride: int) -> int:
    """Sum the mixed words [R, W] of a block whose rows are `stride` words apart."""
    num_words = max(1, words.shape[1])
    step = max(1, (_WORDS_CUDA if words.is_cuda else _WORDS) // num_words)
    column = torch.arange(1, words.shape[1] + 1, device=words.device, dtype=torch.int64) * _signed(_GOLDEN)
    row = torch.arange(min(step, len(words)), device=words.device, dtype=torch.int64) * _signed(stride * _GOLDEN)
    key = row[:, None] + column
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), step):
        part = words[start : start + step]
        total += _mix(part ^ (key[: len(part)] + _signed((first_word + start * stride) * _GOLDEN))).sum()
    return int(total.item())


def _mix(words: Tensor) -> Tensor:
    """Mix words in place. int64 wraps around as uint64 does; its right shift copies the sign, which is masked off."""
    words ^= (words >> 33) & 0x7FFFFFFF
    words *= _signed(_MIX_1)
    words ^= (words >> 33) & 0x7FFFFFFF
    words *= _signed(_MIX_2)
    words ^= (words >> 33) & 0x7FFFFFFF
    return words


def _signed(value: int) -> int:
    """Return the int64 with the bits of value mod 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
