"""Peak rates of this device, measured in the same run by a matrix product and a copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from case import Variant
from timing import Clock, interleave


@dataclass(frozen=True)
class Roofline:
    """Peak rates. gemm_flops: FLOP/s of a square matrix product in this dtype. copy_bytes: bytes read and written per second."""

    gemm_flops: float
    copy_bytes: float

    def floor_s(self, flops: float, num_bytes: float) -> float:
        """Return the lower bound of the time for this many FLOPs and bytes."""
        return max(flops / self.gemm_flops, num_bytes / self.copy_bytes)


_best: dict[tuple[str, str], Roofline] = {}


def measure(device: str, dtype: str) -> Roofline:
    """Measure the rates; the best of all calls in this process counts, because other load can only lower a rate.

    For bfloat16 on a CPU the faster of the bfloat16 and the float32 product counts, because few CPUs have bfloat16 arithmetic.
    """
    is_cuda = device == "cuda"
    dtypes = {getattr(torch, dtype), torch.float32} if not is_cuda else {getattr(torch, dtype)}
    size = 8192 if is_cuda else 1024
    copied = torch.randn((2**28 if is_cuda else 2**24) // 4, device=device)
    target = torch.empty_like(copied)
    variants = [Variant("copy", partial(target.copy_, copied))]
    for gemm_dtype in dtypes:
        a, b = (torch.randn(size, size, device=device).to(gemm_dtype) for _ in range(2))
        variants.append(Variant(f"gemm {gemm_dtype}", partial(torch.mm, a, b, out=torch.empty_like(a))))
    times, _ = interleave(variants, Clock(device), rounds=7, budget_s=10)
    best = {name: min(seconds) for name, seconds in times.items()}
    gemm = min(seconds for name, seconds in best.items() if name != "copy")
    rates = Roofline(2 * size**3 / gemm, 2 * copied.nbytes / best["copy"])
    before = _best.get((device, dtype), rates)
    _best[device, dtype] = Roofline(max(rates.gemm_flops, before.gemm_flops), max(rates.copy_bytes, before.copy_bytes))
    return _best[device, dtype]
