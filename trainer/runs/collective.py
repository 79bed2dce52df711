"""Small talk between ranks: who am I, wait for all, bytes from rank 0 or from everybody, failing together."""

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
    device = _device()
    size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    buffer = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return bytes(buffer.cpu().numpy().tobytes())


def gather_bytes(data: bytes) -> list[bytes]:
    """Every rank's bytes, by rank, on every rank. Collective."""
    if world_size() == 1:
        return [data]
    device = _device()
    sizes = torch.zeros(world_size(), dtype=torch.int64, device=device)
    sizes[rank()] = len(data)
    dist.all_reduce(sizes)
    mine = torch.zeros(max(1, int(sizes.max())), dtype=torch.uint8, device=device)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(parts, mine)
    return [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes.tolist(), strict=True)]


def all_true(claim: bool) -> bool:
    """Whether the claim holds on every rank. Collective."""
    if world_size() == 1:
        return claim
    flag = torch.tensor([int(claim)], dtype=torch.int32, device=_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def stop_together(error: BaseException | None, what: str, advice: str = "") -> None:
    """Go on where no rank has an error, else raise on all of them. Collective.

    Raises:
        RuntimeError: what, then each rank that failed with its error, then what to do about it.
    """
    told = gather_bytes(f"{type(error).__name__}: {error}".encode() if error is not None else b"")
    failed = [f"rank {r}: {text.decode()}" for r, text in enumerate(told) if text]
    if failed:
        raise RuntimeError("; ".join([what, *failed, advice] if advice else [what, *failed])) from error


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
