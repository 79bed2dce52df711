"""Where everything of a run is: which host and GPU has which rank or engine, and how weights get from the ones to the others."""

from __future__ import annotations

from marsrl.trainer.config import RunConfig, SyncBackend


def with_backend(config: RunConfig, *, on_gpus: bool) -> RunConfig:
    """The config with sync.backend=auto decided, in one way on all ranks: by the settings and whether there are GPUs.

    Engines on the trainer's GPUs map its memory (ipc). Engines on GPUs of their own get each rank's part straight from its
    GPU (nccl), on one host too: files there would be gathered by one rank, copied to the host's memory and read from
    there by every engine, the whole model over one GPU's link to the host each time. Without GPUs, and where
    sync.directory asks for them, files (shm).
    """
    if config.sync.backend != "auto":
        return config
    return config.model_copy(update={"sync": config.sync.model_copy(update={"backend": _backend(config, on_gpus)})})


def _backend(config: RunConfig, on_gpus: bool) -> SyncBackend:
    rollout = config.rollout
    between_processes = rollout.placement != "local" and rollout.engine != "scripted"
    if config.sync.directory is not None or not between_processes or not (on_gpus or config.sync.cpu_twin):
        return "shm"
    return "ipc" if rollout.placement == "colocated" else "nccl"
