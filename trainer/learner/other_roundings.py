"""Perturbation of every intermediate result by a rounding error, to get the results that another correct program could give.

Two programs that compute one model in one dtype differ only in their roundings. How far this moves their log-probs
apart depends on the weights, the depth and near-ties of a router: from 1e-7 to whole nats. No constant can
bound it, but a single program can measure it (Monte Carlo arithmetic: D. S. Parker, UCLA CSD-970002, 1997).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Module names in Megatron and transformers. _KEYS: modules that compute keys or values. _MATRIX: modules with one matrix that
# engines round. _EXPERTS: modules with two such matrices in sequence.
_KEYS = ("linear_qkv", "k_proj", "v_proj")
_MATRIX = (*_KEYS, "q_proj", "linear_proj", "o_proj", "linear_fc1", "linear_fc2", "gate_proj", "up_proj", "down_proj")
_EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes to which another program rounds.

    results: dtype of every result. cache, weights: dtypes of keys and values, and of layers' matrices, if they are coarser.
    """

    results: torch.dtype
    cache: torch.dtype | None = None
    weights: torch.dtype | None = None

    def of(self, module: str) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the independent roundings in a module's output.

        A sum of products with independent errors has about the relative error of one product. With rounded matrices, a product
        has two errors: that of the matrix, and that of its input, which GPU kernels round too.
        """
        dtypes = [self.cache if self.cache is not None and module.endswith(_KEYS) else self.results]
        if self.weights is not None:
            dtypes += [self.weights] * (2 * module.endswith(_MATRIX) + 4 * module.endswith(_EXPERTS))
        return tuple(dtypes)


@contextmanager
def other_roundings(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Perturb, in the body, outputs of modules with parameters by up to a unit roundoff of the other program's `precision`.

    Half of the error is per number, half per row (as if the scale of a norm or router was rounded). If a module returns a coarser
    dtype than `precision`, the roundoff of that dtype applies. The errors are the same in every call.
    """
    hooks = [
        module.register_forward_hook(_rounding(dtype, index + number * 100_003))
        for index, (name, module) in enumerate(model.named_modules())
        if any(True for _ in module.parameters())
        for number, dtype in enumerate(precision.of(name))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounding(dtype: torch.dtype, seed: int) -> Callable[[nn.Module, Any, Any], Any]:
    """Return a forward hook that perturbs a module's output; of several outputs, the first."""
    generators: dict[torch.device, torch.Generator] = {}

    def rounded(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        generator = generators.setdefault(x.device, torch.Generator(x.device).manual_seed(seed))
        off = _random_int16(x.shape, generator).float()
        roundoff = torch.finfo(x.dtype).eps / 2
        if x.dim() > 1:  # Log-probs of tokens are float32 in any program.
            off += _random_int16((*x.shape[:-1], 1), generator)
            roundoff = max(roundoff, torch.finfo(dtype).eps / 2)
        wide = x.float()
        return torch.addcmul(wide, wide, off, value=roundoff / 2**16).to(x.dtype)

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (rounded(output[0]), *output[1:]) if isinstance(output, tuple) else rounded(output)

    return hook


def _random_int16(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw uniformly over all int16, four from one draw of 64 bits: on a CPU drawing takes most of the time."""
    num = math.prod(shape)
    draws = torch.empty(-(-num // 4), dtype=torch.int64, device=generator.device)
    return draws.random_(-(2**63), None, generator=generator).view(torch.int16)[:num].view(tuple(shape))
