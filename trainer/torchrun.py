"""Rank and number of ranks from torchrun's environment variables, for code that runs before torch.distributed."""

from __future__ import annotations

import os


def is_rank_0() -> bool:
    """Return True on rank 0, which prints, writes files and starts engines, and in a process without torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


def world_size() -> int:
    """Return the number of ranks on all hosts; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))
