"""sync.backend=shm: a version's weights as safetensors files in a folder shared by trainer rank 0 and the engines.

    rank 0   FileSender.write: a tensor -> its part of the checksums -> shards      engine   WeightFiles: tensors by name

    version_7.partial/shard_00000.safetensors, shard_00001..., index  --rename-->  version_7/

Tensors are streamed: at most one shard is in memory, and a version is either complete or absent.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from marsrl.rollout.model_shape import weight_files
from marsrl.rollout.weights.checksum import ShardSums
from marsrl.rollout.weights.layout import EngineShard, box_of, shard_layout

logger = logging.getLogger(__name__)

SHARD_BYTES = 1 << 30
_PREFIX = "marsrl-weights-"


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """A version on disk. expected: of each shard of an engine {fused tensor: checksum}; seconds_of: export, checksum, write."""

    folder: Path
    expected: Sequence[Mapping[str, int]]
    num_bytes: int
    seconds_of: dict[str, float]


class FileSender:
    """Writes versions to a private folder (PrivateFolder). Old ones stay until `forget_others`."""

    def __init__(self, directory: str | Path | None, dtype: torch.dtype) -> None:
        self._folder, self._dtype = PrivateFolder(directory), dtype

    def write(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        shards: Sequence[EngineShard],
    ) -> WrittenWeights:
        """Write a model's HF-named tensors. shards: of an engine, whose checksums are computed meanwhile.

        Raises:
            RuntimeError: they cannot be written; with advice.
        """
        folder = self._folder.path / f"version_{version}"
        sums_of = {shard: ShardSums(shard_layout(shapes, shard), self._dtype) for shard in shards}
        seconds_of = {"export": 0.0, "checksum": 0.0}
        start = time.perf_counter()

        def checked() -> Iterator[tuple[str, Tensor]]:
            """The same tensors, as the engines get them."""
            asked = time.perf_counter()
            for name, exported in tensors:
                tensor = exported.detach().to("cpu", self._dtype).contiguous()
                came = time.perf_counter()
                stack, box = box_of(name, tensor.shape)
                for sums in sums_of.values():
                    held = box.overlap(sums.layout.needs[stack])
                    if held.num_elements:
                        sums.add(stack, held, held.within(box).of(tensor))
                seconds_of["export"] += came - asked
                seconds_of["checksum"] += time.perf_counter() - came
                yield name, tensor
                asked = time.perf_counter()

        try:
            num_elements = sum(torch.Size(shape).numel() for shape in shapes.values())
            check_room(self._folder.path, num_elements * self._dtype.itemsize)
            num_bytes = write_shards(folder, checked())
        except (OSError, SafetensorError) as error:
            raise not_written(version, folder, error) from error
        seconds_of["write"] = time.perf_counter() - start - sum(seconds_of.values())
        return WrittenWeights(folder, [sums_of[shard].checksums() for shard in shards], num_bytes, seconds_of)

    @staticmethod
    def forget_others(folder: Path) -> None:
        """Remove every version but this one."""
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)

    def close(self) -> None:
        self._folder.close()


def not_written(version: int, folder: Path, error: OSError | SafetensorError) -> RuntimeError:
    """The error for a version that could not be written, with the remedy."""
    reason = getattr(error, "strerror", None) or error
    return RuntimeError(
        f"weight sync: version {version} could not be written to {folder}: {reason}; make room there (the version before stays "
        "until this one is proven, so it takes the model twice): a larger shared memory (docker run --shm-size), or another "
        "folder (sync.directory)"
    )


class PrivateFolder:
    """A new folder of this process for weights. Folders left by killed processes are recognised by their released locks.

    path: parent/marsrl-weights-<process>-<random>.
    """

    def __init__(self, parent: str | Path | None) -> None:
        """parent None: /dev/shm if it exists, else the temporary directory. Removes folders of dead processes."""
        where = parent_of(parent)
        for folder in left_behind(where):
            logger.warning("%s is of a process that has died: removed", folder)
            shutil.rmtree(folder, ignore_errors=True)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=where))
            with suppress(FileNotFoundError):  # another process removed it before it was locked
                self._lock = _locked(self.path)
                break

    def close(self) -> None:
        """Remove it; may be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def parent_of(directory: str | Path | None = None) -> Path:
    """The parent of folders of weights: sync.directory, or its default."""
    if directory is not None:
        return Path(directory)
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def left_behind(parent: Path) -> Iterator[Path]:
    """Folders of weights under `parent` whose process is gone; each is locked while the caller uses it.

    Locks instead of process ids: hosts and containers share folders.
    """
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # removed meanwhile, or somebody else's
            continue
        try:
            if _take(lock):
                yield folder
        finally:
            os.close(lock)


def _locked(folder: Path) -> int:
    """A descriptor holding the folder's lock. FileNotFoundError: no such folder."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: leftovers cannot be recognised
            fcntl.flock(lock, fcntl.LOCK_EX)
        folder.stat()
    except BaseException:
        os.close(lock)
        raise
    return lock


def _take(lock: int) -> bool:
    """False if somebody else holds it, as far as the file system can tell."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return False
    return True


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> int:
    """Write contiguous CPU tensors to `folder`, replacing one of that name; returns their bytes.

    A shard has at most shard_bytes, or a single larger tensor.

    Raises:
        OSError, SafetensorError: no room is left, or the folder cannot be written; nothing is left behind.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    place: dict[str, str] = {}
    num_bytes = 0
    try:
        partial.mkdir()
        for number, shard in enumerate(in_shards(tensors, shard_bytes)):
            name = f"shard_{number:05d}.safetensors"
            save_file(shard, partial / name, metadata={"format": "pt"})
            place.update(dict.fromkeys(shard, name))
            num_bytes += sum(tensor.nbytes for tensor in shard.values())
        index = {"metadata": {"total_size": num_bytes}, "weight_map": place}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return num_bytes


def in_shards(tensors: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The named tensors in order, in shards of at most most_bytes or a single larger tensor; one empty shard if there are none.

    A shard is emptied when the next is requested, so that only one is in memory.
    """
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > most_bytes:
            yield shard
            shard.clear()
            num_bytes = 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    yield shard


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError if the file system of `folder` has no room for num_bytes more."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        message = f"{num_bytes / 2**20:,.1f} MiB are to be written and {free / 2**20:,.1f} MiB are free"
        raise OSError(errno.ENOSPC, message, str(folder))


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a safetensors file, or of an HF directory with one or more of them, read on demand."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = [path] if path.is_file() else weight_files(path)
        self._open = [safe_open(str(file), framework="pt") for file in files]
        self._file_of = {name: handle for handle in self._open for name in handle.keys()}  # noqa: SIM118 - no mapping

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)
