"""A 64-bit checksum of a tensor: equal on CPU and GPU, sensitive to every bit and to where it stands.

    sum over 8-byte words i of mix(word_i xor key_i)  +  hash(dtype, shape)   (mod 2^64),   key_i = (i + 1) * golden ratio

mix is MurmurHash3's 64-bit finaliser (shift-xor, multiply, shift-xor, multiply, shift-xor), a bijection:
- a change within one word (any flipped bit, any changed element) changes its term, hence the sum: it is always seen;
- a change of several words (swapped elements, permuted rows or experts, another offset) moves the sum by a difference of
  mixed words, which is 0 for one in 2^64 of such changes. The last shift-xor is what this rests on: without it, swapping
  x and -x moves the sum by 2^63 +- 2^31 twice, which cancels half of the time;
- a sum is associative: parts of a tensor can be added up in any order, by any number of threads, on any device.
It finds corruption, not attacks. csrc/cpu computes it at the speed of memory; PyTorch's operations, where that library is
not built and on GPUs, give the same number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.rollout.weights.layout import EMBEDDING, HEAD, fusion_plan

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_WORDS = 1 << 15  # words a round of the PyTorch form: 256 KiB, stays in the L2 cache of a CPU core
_WORDS_CUDA = 1 << 24


def checksum(tensor: Tensor) -> int:
    """The checksum of the tensor's values in row-major order, 0 <= it < 2^64.

    -0.0 and 0.0 differ; so do equal bytes of another dtype or shape.
    """
    return checksum_of_parts([tensor], tensor.shape)


def checksum_of_parts(parts: Iterable[Tensor], shape: Sequence[int]) -> int:
    """checksum(the parts one after the other, as a tensor of `shape`), without making that tensor.

    Args:
        parts: at least one; all of one dtype, each on any device. One is held at a time.

    Raises:
        ValueError: the parts have not one dtype, or other numbers of elements than the shape.
    """
    total, num_bytes, num_elements = 0, 0, 0
    rest: Tensor | None = None  # the bytes of a word whose end is in the next part
    dtype: torch.dtype | None = None
    for part in parts:
        dtype = dtype or part.dtype
        if part.dtype != dtype:
            raise ValueError(f"checksum: a part has dtype {part.dtype} where others have {dtype}; expected one dtype")
        num_elements += part.numel()
        data = part.detach().contiguous().view(-1).view(torch.uint8)
        if rest is not None:
            data = torch.cat([rest.to(data.device), data])
        whole = data.numel() // 8 * 8
        total += _word_sum(data[:whole], num_bytes // 8)
        num_bytes += whole
        rest = data[whole:] if whole < data.numel() else None
    if rest is not None:
        last = torch.zeros(8, dtype=torch.uint8, device=rest.device)
        last[: len(rest)] = rest
        total += _word_sum(last, num_bytes // 8)
    if num_elements != torch.Size(shape).numel():
        raise ValueError(f"checksum: the parts have {num_elements} elements; expected shape {tuple(shape)}")
    assert dtype is not None, "checksum_of_parts: no parts"
    return checksum_of_sum(total, dtype, shape)


def fused_checksums(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    """{name of the fused tensor: checksum}, as an engine that computes in dtype must hold them; nothing is fused for it."""
    found = {}
    for name, fusion in fusion_plan(tensors, ties_head=False).items():
        shapes = [tensors[part].shape for part in fusion.parts[0]]
        shape = [sum(part[0] for part in shapes), *shapes[0][1:]] if len(shapes) > 1 else list(shapes[0])
        parts = (tensors[part].to(dtype) for expert in fusion.parts for part in expert)
        found[name] = checksum_of_parts(parts, [len(fusion.parts), *shape] if fusion.is_stacked else shape)
    if EMBEDDING in found:
        found.setdefault(HEAD, found[EMBEDDING])
    return found


def checksum_of_sum(total: int, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The checksum of a tensor whose blocks' sums (block_sum) add up to total."""
    kind = hashlib.blake2b(f"{dtype} {list(shape)}".encode(), digest_size=8).digest()
    return (total + int.from_bytes(kind, "little")) % (1 << 64)


def block_sum(block: Tensor, row: int, col: int, matrix: tuple[int, int]) -> int:
    """What a block adds to the checksum of the tensor that it is a part of, whoever holds the rest.

    Args:
        block: [R, C], at (row, col) of the tensor seen as a matrix of shape `matrix`.

    Raises:
        ValueError: the block begins or ends within a word of 8 bytes, which then is in nobody's sum.
    """
    num_rows, num_cols = matrix
    if block.shape[1] == num_cols:  # its rows lie end to end
        start, length = row * num_cols * block.itemsize, block.nbytes
        data = block.detach().contiguous().view(-1).view(torch.uint8)
        if row + block.shape[0] == num_rows and length % 8:  # the tensor's last word
            data = torch.cat([data, data.new_zeros(-length % 8)])
        if start % 8 == 0 and data.numel() % 8 == 0:
            return _word_sum(data, start // 8) % (1 << 64)
    else:
        start, width, stride = ((row * num_cols + col) * block.itemsize, block.shape[1] * block.itemsize,
                                num_cols * block.itemsize)  # fmt: skip
        if start % 8 == width % 8 == stride % 8 == 0:
            return _strided_sum(block.detach().contiguous().view(torch.int64), start // 8, stride // 8) % (1 << 64)
    raise ValueError(
        f"checksum: a block {list(block.shape)} of {block.dtype} at ({row}, {col}) of a {num_rows} x {num_cols} matrix begins "
        "or ends within a word of 8 bytes: its share cannot be computed without its neighbours"
    )


def _word_sum(data: Tensor, first_word: int) -> int:
    """Sum of the mixed words of data [8 n] uint8, which begins at word first_word of its tensor."""
    if data.device.type == "cpu" and library.why_no_cpu_library() is None:
        return int(library.cpu_library().marsrl_word_sum(data.data_ptr(), data.numel() // 8, first_word))
    return _word_sum_torch(data, first_word)


def _word_sum_torch(data: Tensor, first_word: int) -> int:
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()  # PyTorch reads words at multiples of 8 bytes only
    words = data.view(torch.int64)
    step = min(_WORDS_CUDA if data.is_cuda else _WORDS, max(1, len(words)))
    whole = len(words) // step * step
    total = _strided_sum(words[:whole].view(-1, step), first_word, step)
    return total + _strided_sum(words[whole:].view(1, -1), first_word + whole, step)


def _strided_sum(words: Tensor, first_word: int, stride: int) -> int:
    """Sum of the mixed words [R, W] of a block whose rows are `stride` words apart."""
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
    """In place. int64 wraps around as uint64 does; its right shift copies the sign, which is cut off."""
    words ^= (words >> 33) & 0x7FFFFFFF
    words *= _signed(_MIX_1)
    words ^= (words >> 33) & 0x7FFFFFFF
    words *= _signed(_MIX_2)
    words ^= (words >> 33) & 0x7FFFFFFF
    return words


def _signed(value: int) -> int:
    """The int64 with the bits of value mod 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
