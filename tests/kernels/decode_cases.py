"""attention_decode against a masked softmax, for any implementation and device."""

from collections.abc import Sequence

import torch

from marsrl.kernels import attention_decode
from marsrl.kernels.attention_decode.reference import attention_decode_reference
from marsrl.kernels.testing import assert_accurate


def compare(
    lengths: Sequence[int],
    capacity: int,
    heads: tuple[int, int],
    head_size: int,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    device: str = "cpu",
) -> None:
    """The cache lies head by head and is given as a transposed view, as the local engine does."""
    num_heads, num_key_heads = heads
    q = torch.randn(len(lengths), num_heads, head_size, device=device).to(dtype)
    shape = (len(lengths), num_key_heads, capacity, head_size)
    k, v = (torch.randn(shape, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    given = torch.tensor(lengths, device=device)
    found = attention_decode(q, k, v, given, scale=scale)
    exact_scale = head_size**-0.5 if scale is None else scale
    exact, plain = (
        attention_decode_reference(q.to(d), k.to(d), v.to(d), given, exact_scale) for d in (torch.float64, dtype)
    )
    assert_accurate("output", found, exact, plain)
    assert torch.equal(found, attention_decode(q, k, v, given, scale=scale)), "output differs between two runs"
    longest = max(lengths)
    alone = attention_decode(q[:1], k[:1, :longest].contiguous(), v[:1, :longest].contiguous(), given[:1], scale=scale)
    assert_accurate("decoded alone", alone, exact[:1], plain[:1])
    if device == "cuda":
        assert torch.equal(alone, found[:1]), "the other rows or the capacity change a row"
