"""How many rows each expert has, as the host or the device knows it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """Exactly one of the two: a list that the host knows, or a tensor [E] int on a GPU that it never reads."""

    host: list[int] | None
    device: Tensor | None

    def on_host(self) -> list[int]:
        """The list; waits for the device where only that knows it."""
        if self.host is not None:
            return self.host
        assert self.device is not None
        return self.device.tolist()

    def ends_on(self, device: torch.device) -> Tensor:
        """[E] int32: the row behind each expert's last. A list is sent over, nothing is waited for."""
        counts = torch.tensor(self.host, dtype=torch.int32, device="cpu") if self.device is None else self.device
        if device.type == "cuda" and counts.device.type == "cpu":
            counts = counts.pin_memory()
        return counts.to(device, non_blocking=True).cumsum(0, dtype=torch.int32)
