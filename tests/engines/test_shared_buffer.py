"""Weights sent through memory that two processes map: by CUDA IPC on a GPU, by a file on a CPU. About 5 s; needs only torch."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.connections import Rendezvous, SharedBuffer, TransferStore, site_of

MARK = 7.0
SIZES = (1 << 16, 1, 40_003)  # numbers of elements: a full buffer, the smallest bucket, an odd number
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def meeting(port: int) -> Rendezvous:
    return Rendezvous("session", "127.0.0.1", port, "ipc", 1, 1, "bfloat16", max(SIZES), timeout_s=600.0)


def receive(port: int, device: torch.device) -> None:
    """Receive the buckets of an engine's shard, in a process of its own.

    Report each bucket's checksum to the store, and write MARK into the buffer's last number before releasing the buffer.
    """
    store = TransferStore(meeting(port))
    buffer = SharedBuffer(store, 0, device, is_relay=False)
    for number, size in enumerate(SIZES):
        flat = buffer.receive(0, size * torch.bfloat16.itemsize).view(torch.bfloat16)
        store.set(f"checksum{number}", f"{flat.device.type} {checksum(flat)}")
        flat[-1] = MARK
        buffer.release()
    buffer.close()


@pytest.mark.parametrize(
    "device", [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=ON_A_GPU)], ids=str
)
def test_another_process_reads_buckets_in_the_trainer_s_memory(device: torch.device) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with subprocess.Popen([sys.executable, __file__, str(server.port), str(device)]) as engine:
        try:
            store = TransferStore(meeting(server.port))
            relay = SharedBuffer(store, 0, device, is_relay=True)
            assert store.get("site0") == site_of(device)  # one host, and with CUDA the same GPU
            generator, num_keys = torch.Generator().manual_seed(0), server.num_keys()
            for number, size in enumerate(SIZES):
                values = torch.randn(size, generator=generator).to(device, torch.bfloat16)
                slot = relay.slot(size)
                slot.copy_(values)
                relay.hand_over()
                assert store.get(f"checksum{number}") == f"{device.type} {checksum(values)}"
                # Both map the same memory, without a copy.
                assert slot[-1].item() == MARK and torch.equal(slot[:-1], values[:-1])
            assert engine.wait(60) == 0 and server.num_keys() == num_keys + len(SIZES)  # no key of a bucket is left
            relay.close()
        finally:
            engine.kill()


if __name__ == "__main__":
    receive(int(sys.argv[1]), torch.device(sys.argv[2]))
