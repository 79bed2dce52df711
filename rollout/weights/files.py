"""sync.backend=shm: a version's weights as safetensors files in a folder shared by trainer rank 0 and the engines.

    rank 0   write_version: a tensor -> its part of the checksums -> shards         engine   WeightFiles: tensors by name

    version_7.partial/model-00001-of-00003.safetensors, ..., index  --rename-->  version_7/

Tensors are streamed: only one file's tensors are in memory at a time. A version is either complete or absent.
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
from typing import Any

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
    """A version on disk. expected: {fused tensor: checksum} for each shard of an engine."""

    folder: Path
    expected: Sequence[Mapping[str, int]]
    num_bytes: int


def write_version(
    parent: Path,
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    shards: Sequence[EngineShard],
    seconds_of: dict[str, float],
) -> WrittenWeights:
    """Write a model's HF-named tensors as dtype to `parent`/version_N.

    shards: the shards of an engine; their checksums are computed during the write. seconds_of: dict that receives the seconds of
    export, checksum and write.

    Raises RuntimeError, with advice, if the weights cannot be written.
    """
    folder = parent / f"version_{version}"
    sums_of = {shard: ShardSums(shard_layout(shapes, shard), dtype) for shard in shards}
    seconds_of |= {"export": seconds_of.get("export", 0.0), "checksum": 0.0}
    start = time.perf_counter() - sum(seconds_of.values())

    def checked() -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as engines receive them, adding them to the checksums."""
        asked = time.perf_counter()
        for name, exported in tensors:
            tensor = exported.detach().to("cpu", dtype).contiguous()
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
        check_room(parent, num_elements * dtype.itemsize)
        num_bytes = write_shards(folder, checked())
    except (OSError, SafetensorError) as error:
        raise not_written(version, folder, error) from error
    seconds_of["write"] = time.perf_counter() - start - sum(seconds_of.values())
    return WrittenWeights(folder, [sums_of[shard].checksums() for shard in shards], num_bytes)


def not_written(version: int, folder: Path, error: OSError | SafetensorError) -> RuntimeError:
    """Build the error for a version that could not be written, with the remedy."""
    reason = getattr(error, "strerror", None) or error
    return RuntimeError(
        f"weight sync: version {version} could not be written to {folder}: {reason}; free space there (the previous version "
        "stays until this one is verified, so the model is stored twice), enlarge shared memory (docker run --shm-size), or set "
        "sync.directory to another folder"
    )


class PrivateFolder:
    """A new folder of this process for weights. Folders left by killed processes are recognised by their released locks.

    path: parent/marsrl-weights-<process>-<random>.
    """

    def __init__(self, parent: str | Path | None) -> None:
        """Create the folder, and remove folders of dead processes.

        parent: folder to create it in; None: /dev/shm if it exists, else the temporary directory.
        """
        where = parent_of(parent)
        for folder in left_behind(where):
            logger.warning("removed %s, left by a dead process", folder)
            shutil.rmtree(folder, ignore_errors=True)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=where))
            with suppress(FileNotFoundError):  # another process removed it before it was locked
                self._lock = _locked(self.path)
                break

    def keep_only(self, version: Path) -> None:
        """Remove every version but this one."""
        for other in self.path.iterdir():
            if other != version:
                shutil.rmtree(other)

    def close(self) -> None:
        """Remove the folder; may be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def parent_of(directory: str | Path | None = None) -> Path:
    """Return the parent of folders of weights: sync.directory, or its default."""
    if directory is not None:
        return Path(directory)
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def left_behind(parent: Path) -> Iterator[Path]:
    """Yield folders of weights under `parent` whose process is gone; each is locked while the caller uses it.

    Uses locks, not process ids, because hosts and containers share folders.
    """
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        with suppress(
            OSError
            # The folder is still locked, was removed meanwhile or belongs to another user, or its file system has no locks.
        ):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
            finally:
                os.close(lock)


def _locked(folder: Path) -> int:
    """Return a descriptor holding the folder's lock. FileNotFoundError: no such folder."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # raised by a file system without locks, where leftovers cannot be recognised
            fcntl.flock(lock, fcntl.LOCK_EX)
        folder.stat()
    except BaseException:
        os.close(lock)
        raise
    return lock


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> int:
    """Write contiguous CPU tensors to `folder` as write_files does, replacing an existing folder; return their size in bytes.

    Raises OSError, SafetensorError: no room is left, or the folder cannot be written; nothing is left behind.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        num_bytes = write_files(partial, tensors, shard_bytes)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return num_bytes


def write_files(folder: Path, tensors: Iterable[tuple[str, Tensor]], most_bytes: int) -> int:
    """Write contiguous CPU tensors to files in `folder`, named as by Hugging Face; return their size in bytes.

    A file holds at most most_bytes, or a single larger tensor. Only one file's tensors are in memory at a time.
    """
    files, num_bytes, file_of = list[list[str]](), 0, dict[str, str]()
    for shard in _in_shards(tensors, most_bytes):
        files.append(list(shard))
        save_file(shard, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
    for number, names in enumerate(files, 1):
        final = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / final)
        file_of.update(dict.fromkeys(names, final))
    if len(files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return num_bytes


def _in_shards(tensors: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors, in order, in shards {name: tensor} of at most most_bytes.

    A larger tensor has a shard of its own. Without tensors there is one empty shard. A shard is emptied when the next is
    requested, so that only one is in memory.
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
        message = f"{num_bytes / 2**20:,.1f} MiB are needed, but only {free / 2**20:,.1f} MiB are free"
        raise OSError(errno.ENOSPC, message, str(folder))


class WeightFiles(Mapping[str, Tensor]):
    """Tensors of a safetensors file, or of an HF directory with one or more of them, read on demand.

    prefix: prefix of the names in the files, which is removed.

    Raises ValueError: a file is missing or incomplete.
    """

    def __init__(self, path: str | Path, prefix: str = "") -> None:
        path = Path(path)
        self._stored: dict[str, tuple[Any, str]] = {}  # name: (open file, name in the file)
        for file in [path] if path.is_file() else weight_files(path):
            try:
                opened = safe_open(str(file), framework="pt")
            except SafetensorError as error:
                raise ValueError(
                    f"model: {file} is not a complete safetensors file ({error}); download it again"
                ) from error
            self._stored.update({name.removeprefix(prefix): (opened, name) for name in opened.keys()})  # noqa: SIM118 - no mapping

    def __getitem__(self, name: str) -> Tensor:
        file, stored = self._stored[name]
        return file.get_tensor(stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # the default of Mapping would read the tensor

    def slice(self, name: str) -> Any:
        """Return the tensor's header; indexing it reads only the indexed part."""
        file, stored = self._stored[name]
        return file.get_slice(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
