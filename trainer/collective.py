"""Small talk between ranks: who am I, wait for all, and bytes from rank 0. Works the same with one process."""

from __future__ import annotations

import torch
import torch.distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def broadcast_bytes(data: bytes | None) -> bytes:
    """Rank 0's bytes on every rank. Collective; `data` is None elsewhere."""
    if world_size() == 1:
        assert data is not None
        return data
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    buffer = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return bytes(buffer.cpu().numpy().tobytes())
