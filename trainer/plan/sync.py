"""How long a publish takes: from the trainer's weights to engines that hold the new ones, by sync.backend."""

from __future__ import annotations

from dataclasses import dataclass

from marsrl.trainer.config import SyncBackend
from marsrl.trainer.plan import hardware as hw
from marsrl.trainer.plan.engines import EngineMemory, EngineSetup
from marsrl.trainer.plan.memory import SIZE
from marsrl.trainer.plan.parameters import elements, num_tensors


@dataclass(frozen=True)
class SyncTime:
    """Seconds of one publish by what takes them, one after the other; 0: this backend does not do it.

    gather: the whole model on rank 0 and in its host's memory. write, load: files. send: between GPUs. copy: into buckets and
    out of them. checksum: of what is sent, and of what arrived. links_alone: an engine GPU receives its weights, nothing else.
    """

    backend: SyncBackend
    gather: float = 0.0
    write: float = 0.0
    load: float = 0.0
    send: float = 0.0
    copy: float = 0.0
    checksum: float = 0.0
    links_alone: float = 0.0

    @property
    def total(self) -> float:
        return self.gather + self.write + self.load + self.send + self.copy + self.checksum


def sync_time(
    backend: SyncBackend, setup: EngineSetup, memory: EngineMemory, num_trainers: int, num_gpus: int, gpu: hw.Gpu
) -> SyncTime:
    """Seconds of a sync of one policy's engines; backend: as it is after placement.with_backend.

    M = bytes of the model, S = of an engine GPU's shard, n = ranks, N = tensors, link = NVLink where all GPUs are on one node,
    else a GPU's network. Checksums on GPUs move 31 bytes of memory a byte.

        shm    gather M / link + M / PCIe     write 2 M / host memory      load S / host memory + S / PCIe, all engines at once
               checksum M / a core's + 31 S / memory
        nccl   send max(s, S) / link          copy (2 / memory + host N / S) max(s, S)     checksum 31 (M / n + S) / memory
               s = engines TP S / n: what a rank sends; ranks that hold the same share the work, none gathers
               host: of a piece of a tensor, at least one a tensor and shard
        ipc    send (s + S)(n - 1)/n / link   copy (2 / memory + host N / S) (s + S)       checksum as nccl
               a rank passes on what its own engine GPU gets, and sends to the others' in the same thread
    """
    model, shard = elements(setup.shape).total * SIZE[setup.dtype], memory.weights
    link = (gpu.nvlink if num_gpus <= hw.GPUS_PER_NODE.value else gpu.network) * hw.LINK_SHARE.value
    pcie, bandwidth = gpu.pcie * hw.LINK_SHARE.value, gpu.bandwidth * hw.MEMORY_SHARE.value
    summed = hw.CHECKSUM_MOVES.value / bandwidth  # seconds a byte
    if backend == "shm":
        return SyncTime(
            backend,
            gather=model / link + model / pcie,
            write=2 * model / hw.HOST_BANDWIDTH.value,
            load=shard / hw.HOST_BANDWIDTH.value + shard / pcie,
            checksum=model / hw.CHECKSUM.value + shard * summed,
            links_alone=shard / link,
        )
    sent = setup.num_gpus * shard / num_trainers
    passed, over_links = max(sent, shard), max(sent, shard)
    if backend == "ipc":
        passed = sent + shard
        over_links = passed * (num_trainers - 1) / num_trainers
    return SyncTime(
        backend,
        send=over_links / link,
        copy=passed * (2 / bandwidth + hw.PIECE_S.value * num_tensors(setup.shape) / shard),
        checksum=(model / num_trainers + shard) * summed,
        links_alone=shard / link,
    )
