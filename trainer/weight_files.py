"""One version's weights as safetensors files for engines of this host: streamed, in shards, whole or not there.

    version_7.partial/shard_00000.safetensors, shard_00001..., index  --rename-->  version_7/

A tensor's bytes go from its memory to the file without a copy in between, and no more than a shard of tensors waits.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from marsrl.rollout.engines.fused_layout import INDEX_FILE

SHARD_BYTES = 1 << 30
_DTYPE_WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_MOST_A_CALL = 1 << 30  # Linux writes 2 GiB - 4 KiB a call at most


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> int:
    """Write contiguous CPU tensors as `folder`, which replaces a folder of that name; returns their bytes.

    A shard holds shard_bytes at most, or one tensor that is larger.

    Raises:
        OSError: no room is left, or the folder cannot be written; nothing of it stays.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    place: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    num_bytes = num_waiting = 0

    def write() -> None:
        name = f"shard_{len(set(place.values())):05d}.safetensors"
        check_room(partial, num_waiting)
        _write_file(partial / name, waiting)
        place.update(dict.fromkeys(waiting, name))
        waiting.clear()

    try:
        partial.mkdir()
        for name, tensor in tensors:
            if waiting and num_waiting + tensor.nbytes > shard_bytes:
                write()
                num_waiting = 0
            waiting[name] = tensor
            num_waiting += tensor.nbytes
            num_bytes += tensor.nbytes
        write()
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
        raise OSError(28, f"{num_bytes / 2**20:,.1f} MiB are to be written and {free / 2**20:,.1f} MiB are free")


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """The safetensors format: length of the header (uint64, little-endian), header (JSON), tensors end to end."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": _DTYPE_WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    with path.open("wb", buffering=0) as file:
        for data in (len(text).to_bytes(8, "little"), text):
            _write(file.fileno(), memoryview(data))
        for tensor in tensors.values():
            _write(file.fileno(), memoryview(tensor.view(-1).view(torch.uint8).numpy().data))


def _write(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data[:_MOST_A_CALL]) :]
