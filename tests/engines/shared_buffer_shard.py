"""An engine shard in a process of its own, for test_shared_buffer.py: python shared_buffer_shard.py PORT DEVICE SIZE ..."""

import sys

import torch

from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.connections import Rendezvous, SharedBuffer, TransferStore

MARK = 7.0


def meeting(port: int, max_elements: int) -> Rendezvous:
    return Rendezvous("session", "127.0.0.1", port, "ipc", 1, 1, "bfloat16", max_elements, timeout_s=600.0)


def receive(port: int, device: torch.device, sizes: list[int]) -> None:
    """Tells at the store the checksum of each bucket, and marks the buffer's last number before it hands it back."""
    rendezvous = meeting(port, max(sizes))
    store = TransferStore(rendezvous)
    buffer = SharedBuffer(store, 0, device, is_relay=False)
    for number, size in enumerate(sizes):
        flat = buffer.receive(0, size)
        store.set(f"checksum{number}", f"{flat.device.type} {checksum(flat)}")
        flat[-1] = MARK
        buffer.release()
    buffer.close()


if __name__ == "__main__":
    receive(int(sys.argv[1]), torch.device(sys.argv[2]), [int(size) for size in sys.argv[3:]])
