"""Index of a checkpoint, index.json: file and byte range of each part of each tensor, in place of Megatron's pickled .metadata.

Imports no megatron, because `marsrl export` reads the index too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Part of a stored tensor: `length` bytes from `start` of `file` are a torch.save of the part at `offsets`."""

    tensor: str
    offsets: tuple[int, ...]
    file: str
    start: int
    length: int


def render_index(metadata: Metadata, written: Iterable[StoredChunk]) -> bytes:
    """Render index.json.

    metadata: names, dtypes, shapes and shards of all tensors, as planned. written: the chunks of all ranks.

    Raises RuntimeError if a planned part was not written.
    """
    where = {(chunk.tensor, chunk.offsets): chunk for chunk in written}
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), f"{name} is no tensor"
        chunks = []
        for chunk in stored.chunks:
            chunk_written = where.get((name, tuple(chunk.offsets)))
            if chunk_written is None:
                raise RuntimeError(f"{name}: no rank wrote its part at {list(chunk.offsets)}")
            chunks.append(
                [list(chunk.offsets), list(chunk.sizes), chunk_written.file, chunk_written.start, chunk_written.length]
            )
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(stored.size), "chunks": chunks}
    return json.dumps({"tensors": tensors}, separators=(",", ":")).encode("ascii")


def read_index(folder: Path) -> Metadata:
    """Read the metadata of the checkpoint in `folder` for torch's reader; ValueError for an invalid index.json."""
    path = folder / INDEX
    try:
        tensors = json.loads(path.read_bytes())["tensors"]
        metadata = Metadata(state_dict_metadata={}, storage_data={}, storage_meta=StorageMeta())
        for name, stored in tensors.items():
            dtype = getattr(torch, stored["dtype"])
            chunks = []
            for offsets, sizes, file, start, length in stored["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                metadata.storage_data[MetadataIndex(name, torch.Size(offsets))] = _StorageInfo(file, start, length)
            size = torch.Size(stored["size"])
            metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"checkpoint {folder}: {INDEX} cannot be read ({error}); it is damaged or of another program: restore the file"
        ) from error
    return metadata


class IndexReader(FileSystemReader):
    """Reader of tensor files by torch, with index.json instead of the pickled .metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_index(Path(self.path))
