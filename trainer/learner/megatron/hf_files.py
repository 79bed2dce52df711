"""Hugging Face directories: read parts of tensors, and write a directory atomically."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.model_shape import ModelShape, weight_files
from marsrl.rollout.weights.files import WeightFiles, write_files
from marsrl.rollout.weights.layout import EMBEDDING, HEAD
from marsrl.trainer.learner.megatron.mapping import Unit, hf_shapes, hf_span, join, units
from marsrl.trainer.runs.directory import sync, sync_tree

SHARD_BYTES = 4 * 10**9  # Size of a safetensors file; a writer holds at most this much in memory.
_ROWS = 16384  # Number of vocabulary rows compared at once.
_TRAINED = ("BF16", "F16", "F32")  # Dtypes as safetensors names them.
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", "safetensors.index.json")


class HfReader:
    """Reader of the tensors of a Hugging Face directory or file. Reads only the requested parts.

    shard = HfReader("models/qwen3").shard(shape, unit, part=1, parts=4)
    """

    def __init__(self, path: str | Path, prefix: str = "") -> None:
        """Open `path`; `prefix` is removed from the names in the files."""
        self._path, self._files = path, WeightFiles(path, prefix)

    def check(self, shape: ModelShape, *, is_trained: bool) -> None:
        """Check from headers that every tensor of config.json exists with its shape and, if is_trained, is not quantised.

        With tie_word_embeddings a head in the files must equal the embedding; both are read to compare. Raises as `shard` does.
        """
        for unit in units(shape, 1):
            self._check(shape, unit, is_trained)
        if shape.is_tied and HEAD in self._files and not self._is_embedding(HEAD):
            # transformers, vLLM and our engine decode with the head; the trainer would use the embedding.
            raise ValueError(
                f"model: {self._path}: config.json has tie_word_embeddings true, but {HEAD} in its files differs from "
                f"{EMBEDDING}; set tie_word_embeddings to false there, or delete {HEAD} if the embedding is its head"
            )

    def _is_embedding(self, name: str) -> bool:
        """Return True if a tensor equals the embedding; reads both in parts."""
        ours, embedding = self._files.slice(name), self._files.slice(EMBEDDING)
        num_rows = embedding.get_shape()[0]
        return ours.get_shape() == embedding.get_shape() and all(
            bool((ours[row : row + _ROWS] == embedding[row : row + _ROWS]).all()) for row in range(0, num_rows, _ROWS)
        )

    def shard(self, shape: ModelShape, unit: Unit, part: int = 0, parts: int = 1) -> Tensor:
        """Read part `part` of `parts` of a Megatron tensor, in the view that is cut (mapping.py).

        Raises ValueError, with name, file and both shapes, if a tensor is missing, has another shape or is quantised.
        """
        self._check(shape, unit, is_trained=True)
        tensors = []
        for name, expected_shape in zip(unit.hf, hf_shapes(shape, unit), strict=True):
            index = [slice(None)] * len(expected_shape)
            if unit.hf_cut is not None:
                index[unit.hf_cut] = slice(*hf_span(unit, expected_shape[unit.hf_cut], part, parts))
            tensors.append(self._read(name, tuple(index)))
        return join(shape, unit, tensors, parts)

    def _check(self, shape: ModelShape, unit: Unit, is_trained: bool) -> None:
        missing = [name for name in unit.hf if name not in self._files]
        kind, asks = ("model", "config.json") if unit.size is None else ("adapter", "this policy's adapter")
        if missing:
            raise ValueError(f"{kind}: {self._path} has no tensor {', '.join(missing)}, which {asks} requires")
        for name, expected_shape in zip(unit.hf, hf_shapes(shape, unit), strict=True):
            header = self._files.slice(name)
            found_shape, dtype = tuple(header.get_shape()), header.get_dtype()
            if found_shape != expected_shape:
                raise ValueError(
                    f"{kind}: {self._path}: {name} has shape {list(found_shape)}, but {asks} gives {list(expected_shape)}"
                )
            if is_trained and dtype not in _TRAINED:
                raise ValueError(
                    f"{kind}: {self._path}: {name} is {dtype}; quantised weights cannot be trained: convert them to "
                    f"{' or '.join(_TRAINED)}"
                )

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read part of a tensor from the files."""
        tensor: Tensor = self._files.slice(name)[index]
        return tensor


def weights_sum(model_dir: str | Path) -> str:
    """Return a digest of a model's weights, from name, size and last MiB of each file."""
    digest = hashlib.sha256()
    for path in weight_files(Path(model_dir)):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (1 << 20)))
            digest.update(f"{path.name} {size} ".encode() + file.read())
    return digest.hexdigest()


def copy_frame(source: Path, folder: Path) -> None:
    """Copy the files of a Hugging Face directory other than weights: config, generation config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, folder / file.name)


def write_hf(folder: Path, tensors: Iterable[tuple[str, Tensor]], frame: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Write a Hugging Face directory atomically and return the bytes of its tensors.

    At most shard_bytes of tensors (or one tensor) are held at a time. config.json names the dtype that was written, and
    generation_config.json the token that the chat template ends turns with.

    tensors: (Hugging Face name, CPU tensor). frame: directory with config.json and the tokenizer.
    """
    with made_whole(folder) as part:
        num_bytes = write_files(part, tensors, shard_bytes)
        copy_frame(frame, part)
        _name_dtype(part)
        if (part / "tokenizer.json").is_file():
            _name_ends(part)
    return num_bytes


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """Yield a directory to write to, which is renamed to `folder` if the body succeeds.

    Raises ValueError if `folder` exists.
    """
    if folder.exists():
        raise ValueError(f"export: {folder} exists; name a new directory")
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")  # Process ids repeat in containers.
    part.mkdir(parents=True)
    try:
        yield part
        sync_tree(part)
        part.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _name_ends(folder: Path) -> None:
    """Write the trained end token: a base model's files name only eos_token, so transformers and vLLM would not stop."""
    renderer, path = ChatRenderer(folder), folder / "generation_config.json"
    if not renderer.names_end:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        config["eos_token_id"] = list(renderer.stop_ids)
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _name_dtype(folder: Path) -> None:
    """Write the tensors' dtype into config.json, because transformers and vLLM load in that dtype."""
    path, files = folder / "config.json", WeightFiles(folder)
    dtype = str(files.slice(next(iter(files)))[:1].dtype).removeprefix("torch.")
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if config.get(key, dtype) != dtype:
            config[key] = dtype
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
