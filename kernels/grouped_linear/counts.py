"""Where each expert's rows end."""

import torch
from torch import Tensor


def ends_on(tokens_per_expert: Tensor, device: torch.device) -> Tensor:
    """[E] int32 on the device: the row behind each expert's last. Counts in host memory are sent, nothing is waited for."""
    if device.type == "cuda" and tokens_per_expert.device.type == "cpu":
        tokens_per_expert = tokens_per_expert.pin_memory()
    return tokens_per_expert.to(device, non_blocking=True).cumsum(0, dtype=torch.int32)
