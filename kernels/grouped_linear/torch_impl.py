"""Grouped linear layers by PyTorch's grouped GEMM (CUTLASS on Hopper), in bfloat16. Not run on a GPU here."""

import torch
from torch import Tensor

ALIGNMENT = 8  # bfloat16 numbers: the kernel reads 16 bytes at a time


def machine_lacks_grouped_mm() -> str | None:
    """None if a GPU is there, else the reason."""
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA device"


def why_not_grouped_mm(x: Tensor, weights: Tensor, tokens_per_expert: Tensor) -> str | None:
    """None if torch._grouped_mm can serve these tensors, forward and backward, else the reason."""
    if x.device.type != "cuda":
        return f"x is on {x.device}, this one is for CUDA"
    if x.dtype != torch.bfloat16:
        return f"x has dtype {str(x.dtype).removeprefix('torch.')}, torch._grouped_mm takes bfloat16"
    if x.shape[0] == 0:
        return "x has no rows"
    if x.shape[1] % ALIGNMENT or weights.shape[1] % ALIGNMENT:
        return f"K = {x.shape[1]} and N = {weights.shape[1]}, torch._grouped_mm takes multiples of {ALIGNMENT}"
    major, minor = torch.cuda.get_device_capability(x.device)
    if major < 9:
        return f"the GPU has compute capability {major}.{minor}, below 9.0 torch._grouped_mm is a loop that waits"
    return None


def grouped_linear_torch(x: Tensor, weights: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """[T, N] as the reference defines it; autograd is PyTorch's."""
    return torch._grouped_mm(
        x.contiguous(), weights.contiguous().transpose(1, 2), offs=ends_on(tokens_per_expert, x.device)
    )


def ends_on(tokens_per_expert: Tensor, device: torch.device) -> Tensor:
    """[E] int32 on the device: the end row of each expert. Counts in host memory are sent without synchronisation."""
    if device.type == "cuda" and tokens_per_expert.device.type == "cpu":
        tokens_per_expert = tokens_per_expert.pin_memory()
    return tokens_per_expert.to(device, non_blocking=True).cumsum(0, dtype=torch.int32)
