"""One version's weights as safetensors files for engines of this host: streamed, in shards, whole or not there.

    version_7.partial/shard_00000.safetensors, shard_00001..., index  --rename-->  version_7/

A tensor's bytes go from its memory to the file without a copy in between, and no more than a shard of tensors waits.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from marsrl.rollout.weights.fused_layout import INDEX_FILE
from marsrl.trainer.learner.megatron.hf_files import in_shards
from marsrl.trainer.runs.directory import names_file

logger = logging.getLogger(__name__)

SHARD_BYTES = 1 << 30
_PREFIX = "marsrl-weights-"
# Between a folder and its lock lies a moment; whoever restarts a killed run at once takes longer to get here.
_YOUNG_S = 10.0
_DTYPE_WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_MOST_A_CALL = 1 << 30  # Linux writes 2 GiB - 4 KiB a call at most


class PrivateFolder:
    """A new folder of this process for weights. What a killed process leaves there is found by its lock, which ended with it.

    path: parent/marsrl-weights-<process>-<random>.
    """

    def __init__(self, parent: str | Path | None) -> None:
        """parent None: /dev/shm where there is one, else the temporary directory. Folders of dead processes are removed."""
        where = parent_of(parent)
        for folder in left_behind(where):
            logger.warning("%s is of a process that has died: removed", folder)
            shutil.rmtree(folder, ignore_errors=True)  # another run may be at it, too
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=where))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        _take(self._lock)

    def close(self) -> None:
        """Remove it; may be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def parent_of(directory: str | Path | None = None) -> Path:
    """Where folders of weights are made: sync.directory, or its default."""
    if directory is not None:
        return Path(directory)
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def left_behind(parent: Path) -> list[Path]:
    """Folders of weights under `parent` whose process is gone. A lock, not a process id: hosts and containers share folders."""
    found = []
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # removed meanwhile, or somebody else's
            continue
        try:
            if time.time() - os.fstat(lock).st_mtime > _YOUNG_S and _take(lock):
                found.append(folder)
        finally:
            os.close(lock)
    return found


def _take(lock: int) -> bool:
    """Whether nobody else holds it, as far as the file system can tell."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks: then nothing is known to be left
        return False
    return True


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> int:
    """Write contiguous CPU tensors as `folder`, which replaces a folder of that name; returns their bytes.

    A shard holds shard_bytes at most, or one tensor that is larger.

    Raises:
        OSError: no room is left, or the folder cannot be written; nothing of it stays.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    place: dict[str, str] = {}
    num_bytes = 0
    try:
        partial.mkdir()
        for number, shard in enumerate(in_shards(tensors, shard_bytes)):
            name, shard_size = f"shard_{number:05d}.safetensors", sum(tensor.nbytes for tensor in shard.values())
            check_room(partial, shard_size)
            _write_file(partial / name, shard)
            place.update(dict.fromkeys(shard, name))
            num_bytes += shard_size
        index = {"metadata": {"total_size": num_bytes}, "weight_map": place}
        (partial / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return num_bytes


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError where the file system of `folder` has no room for num_bytes more."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        message = f"{num_bytes / 2**20:,.1f} MiB are to be written and {free / 2**20:,.1f} MiB are free"
        raise OSError(errno.ENOSPC, message, str(folder))


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """The safetensors format: length of the header (uint64, little-endian), header (JSON), tensors end to end."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": _DTYPE_WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    with names_file(path), path.open("wb", buffering=0) as file:
        for data in (len(text).to_bytes(8, "little"), text):
            _write(file.fileno(), memoryview(data))
        for tensor in tensors.values():
            _write(file.fileno(), memoryview(tensor.view(-1).view(torch.uint8).numpy().data))


def _write(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data[:_MOST_A_CALL]) :]
