"""The same model with every intermediate result rounded differently: the results another correct program may get.

Two programs that compute one model in one dtype differ only in their roundings. How far that moves their log-probs
apart depends on the weights, the depth and near-ties of a router: from 1e-7 to whole nats. No constant can
bound it, but one program can measure it alone (Monte Carlo arithmetic: D. S. Parker, UCLA CSD-970002, 1997).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_KEYS = ("linear_qkv", "k_proj", "v_proj")  # modules that compute keys or values: Megatron's, transformers'


@contextmanager
def other_roundings(
    model: nn.Module, dtype: torch.dtype, seed: int = 0, cache_dtype: torch.dtype | None = None
) -> Iterator[None]:
    """In the body, outputs of modules with parameters are off by up to a unit roundoff of `dtype`.

    Half of the error is each number's own, half its row's (as if a norm's or a router's scale was rounded). `dtype` is what the
    other program computes in; if a module returns a coarser one, that. The same seed gives the same errors.
    cache_dtype: of its keys and values, if different.
    """
    hooks = [
        module.register_forward_hook(
            _rounding(cache_dtype if cache_dtype and name.endswith(_KEYS) else dtype, seed * 1_000_003 + place)
        )
        for place, (name, module) in enumerate(model.named_modules())
        if any(True for _ in module.parameters())
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounding(dtype: torch.dtype, seed: int) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook that perturbs a module's output, or the first of several."""
    generators: dict[torch.device, torch.Generator] = {}

    def rounded(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        generator = generators.setdefault(x.device, torch.Generator(x.device).manual_seed(seed))
        off = torch.rand(x.shape, generator=generator, device=x.device) - 0.5
        roundoff = torch.finfo(x.dtype).eps / 2
        if x.dim() > 1:  # log-probs of tokens are float32 in any program
            off += torch.rand((*x.shape[:-1], 1), generator=generator, device=x.device) - 0.5
            roundoff = max(roundoff, torch.finfo(dtype).eps / 2)
        wide = x.float()
        return torch.addcmul(wide, wide, off, value=roundoff).to(x.dtype)

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (rounded(output[0]), *output[1:]) if isinstance(output, tuple) else rounded(output)

    return hook
