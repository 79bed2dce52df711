"""`marsrl export`: convert a training checkpoint of any layout to a Hugging Face directory, in one process, layer by layer.

The checkpoint of an adapter becomes a PEFT directory or, with `merge`, a whole model with W + s B A in place of each adapted
matrix W. A PEFT directory with one (A, B) pair for all experts of a layer is converted to one with a pair for each expert.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from marsrl.rollout.adapter import (
    CONFIG,
    AdapterConfig,
    check_tensors,
    peft_pair,
    peft_settings,
    read_tensors,
    targets_of,
    write_adapter,
)
from marsrl.rollout.model_shape import ModelShape, read_shape
from marsrl.trainer.learner.megatron.checkpoint_index import IndexReader
from marsrl.trainer.learner.megatron.hf_files import HfReader, made_whole, weights_sum, write_hf
from marsrl.trainer.learner.megatron.mapping import Unit, adapter_units, part_shape, split, units
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.manifest import NAME as MANIFEST
from marsrl.trainer.runs.manifest import damage

_LAYERS = "decoder.layers."


def export(source: str | Path, out: str | Path, policy: str | None = None, *, merge: bool = False) -> tuple[Path, int]:
    """Write the weights of a checkpoint as a Hugging Face directory `out` with config and tokenizer; adapters in PEFT format.

    Returns the folder that the weights come from, and their size in bytes.

    source: a run directory (its latest checkpoint), a checkpoint (checkpoints/step_N or checkpoints/best), or one policy's folder
        in a checkpoint; or a PEFT directory, to give each expert its own pair of matrices.
    policy: name of the policy to export, if there are several.
    merge: write an adapter merged into its base.

    Raises ValueError if there is nothing to export, `policy` is needed, or `out` exists.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists and is never overwritten; name a new directory")
    if (Path(source) / CONFIG).is_file():
        return _split_by_expert(Path(source), out)
    folder = _policy_folder(Path(source), policy)
    frame = folder / "hf"
    if not frame.is_dir():
        raise ValueError(
            f"{folder} has no hf/ folder with config.json and tokenizer; expected a checkpoint of a policy"
        )
    shape = read_shape(frame, needs_weights=False)
    about = json.loads((folder / "learner.json").read_text(encoding="utf-8"))
    if "adapter" not in about:
        return folder, write_hf(out, hf_tensors(folder, shape, units(shape, 1)), frame)
    adapter = AdapterConfig.model_validate(about["adapter"])
    base = Path(about["base"]["path"])
    tensors = dict(hf_tensors(folder, shape, adapter_units(shape, adapter, 1)))
    if merge:
        if weights_sum(base) != about["base"]["sum"]:
            raise ValueError(
                f"{folder} is an adapter of {base}, whose weights have changed since; restore them, or export without --merge"
            )
        return folder, write_hf(out, _merged(base, shape, adapter, tensors), frame)
    with made_whole(out) as part:
        write_adapter(part, shape, adapter, tensors, str(base))
    return folder, sum(tensor.nbytes for tensor in tensors.values())


def _split_by_expert(source: Path, out: Path) -> tuple[Path, int]:
    """Convert a PEFT directory with one pair for all E experts of a layer (PEFT's target_parameters) to a pair per expert.

    With rank r, expert e has rows e r + i of A and columns i E + e of B, for i = 0 ... r - 1. The source fuses gate and up, so
    both get the same A.
    """
    peft = peft_settings(source, is_split=False)
    base, rank = str(peft["base_model_name_or_path"]), peft["r"]
    shape, tensors, scales = read_shape(base, needs_weights=False), dict[str, Tensor](), dict[str, float]()
    for name, tensor in read_tensors(source).items():
        fused = re.fullmatch(r"(.+\.experts)\.(base_layer\.)?lora_([AB])\.weight", name)
        if fused is None:
            tensors[name] = tensor
            matrix = name.rpartition(".lora_")[0]
            scales[matrix] = peft_pair(peft, matrix)[1]
            continue
        experts, is_gate_up, letter = fused.groups()
        matrix = f"{experts}.{'gate_up_proj' if is_gate_up else 'down_proj'}"
        scales[matrix] = peft_pair(peft, matrix)[1]
        num = shape.num_experts
        by_expert = tensor.unflatten(0, (num, -1)) if letter == "A" else tensor.unflatten(1, (-1, num)).permute(2, 0, 1)
        parts = {"down_proj": by_expert}
        if is_gate_up:
            gate, up = (by_expert, by_expert) if letter == "A" else by_expert.chunk(2, 1)
            parts = {"gate_proj": gate, "up_proj": up}
        for matrix, part in parts.items():
            tensors |= {f"{experts}.{e}.{matrix}.lora_{letter}.weight": part[e].clone() for e in range(num)}
    in_experts = next((len(t) for name, t in tensors.items() if ".experts." in name and ".lora_A." in name), None)
    adapter = AdapterConfig(rank=rank, expert_rank=in_experts, alpha=peft["lora_alpha"])
    adapter = adapter.model_copy(update={"targets": targets_of(shape, adapter, tensors)})
    if other := next((matrix for matrix, scale in scales.items() if not math.isclose(scale, adapter.scale)), None):
        raise ValueError(
            f"{source}: {other} has alpha / rank = {scales[other]:g}, but lora_alpha / r is {adapter.scale:g}; export needs one "
            "factor for all matrices"
        )
    check_tensors(shape, adapter, tensors)
    with made_whole(out) as folder:
        write_adapter(folder, shape, adapter, tensors, base)
    return source, sum(tensor.nbytes for tensor in tensors.values())


def _merged(
    base: Path, shape: ModelShape, adapter: AdapterConfig, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of the base merged with the adapter in float32, stored in the adapter's dtype."""
    reader = HfReader(base)
    for unit in units(shape, 1):
        for name, weight in zip(unit.hf, split(shape, unit, reader.shard(shape, unit)), strict=True):
            matrix, whole = name.removesuffix(".weight"), weight.float()
            if f"{matrix}.lora_A.weight" in tensors:
                a, b = (tensors[f"{matrix}.lora_{letter}.weight"].float() for letter in "AB")
                whole = whole + adapter.scale * b @ a
            yield name, whole.to(next(iter(tensors.values())).dtype).contiguous()


def exported(source: Path) -> dict[str, Path]:
    """Return a Hugging Face directory for each trained policy.

    source: a run directory (its latest checkpoint) or a checkpoint. Exports are cached in the run's folder exported/.

    Raises ValueError if the run has no complete checkpoint, or the checkpoint is damaged.
    """
    chosen = _checkpoint(source)
    run = chosen.parents[1]
    manifest = (chosen / MANIFEST).read_bytes()  # names the cache, because a repeated step has different weights
    cache = run / "exported" / f"{chosen.name}-{hashlib.blake2b(manifest, digest_size=4).hexdigest()}"
    for other in cache.parent.glob("step_*"):
        if other != cache:
            shutil.rmtree(other)
    for policy in _policies(chosen):
        if not (cache / policy).exists():
            export(chosen, cache / policy, policy, merge=True)
    return {policy: cache / policy for policy in _policies(chosen)}


def hf_tensors(folder: Path, shape: ModelShape, chosen: Sequence[Unit]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) in the checkpoint's dtype, in the order of `chosen`; one layer is in memory at a time."""
    stored = _Stored(folder)
    for unit in chosen:
        whole = stored.whole(shape, unit)
        yield from zip(unit.hf, (part.contiguous() for part in split(shape, unit, whole)), strict=True)


def _checkpoint(source: Path) -> Path:
    """Return the folder of a run's latest checkpoint, the checkpoint named by checkpoints/best or latest, or `source` itself."""
    if source.is_file() and source.name in ("best", "latest"):
        return source.parent / source.read_text(encoding="ascii").strip()
    if not (source / "config.yaml").is_file():
        return source
    latest = RunDirectory(source).latest_checkpoint()
    if latest is None:
        raise ValueError(
            f"run {source} has no complete checkpoint yet; wait for one (every run.checkpoint_minutes, at Ctrl-C, and at the end)"
        )
    return latest.path


def _policies(checkpoint: Path) -> list[str]:
    return sorted(path.parent.name for path in checkpoint.glob("policies/*/learner.json"))


def _policy_folder(source: Path, policy: str | None) -> Path:
    if (source / "learner.json").is_file():
        return source
    source = _checkpoint(source)
    if (source / "policies").is_dir() and (problems := damage(source)):
        raise ValueError(f"checkpoint {source} is damaged: {'; '.join(problems[:8])}; restore the files or use another")
    if not (policies := _policies(source)):
        raise ValueError(
            f"{source} is not a run directory (config.yaml), a checkpoint (policies/) or a policy's folder in one (learner.json)"
        )
    if policy is None and len(policies) > 1:
        raise ValueError(f"{source} has several policies, {', '.join(policies)}; choose one with --policy")
    name = policy or policies[0]
    if name not in policies:
        raise ValueError(f"--policy {name}: {source} has no such policy; expected one of {', '.join(policies)}")
    return source / "policies" / name


class _Stored:
    """Reader of full Megatron parameters in a distributed checkpoint of any layout.

    A parameter of all layers is stored as one tensor [layers, ...]; experts' parameters as [layers, experts, ...]. Stored chunks
    span at most one layer of one rank, so layers are read one at a time; the last one is cached.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = IndexReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._layer: int | None = None
        self._of_layer: dict[str, Tensor] = {}

    def whole(self, shape: ModelShape, unit: Unit) -> Tensor:
        """Return the unit's full Megatron tensor; tensors of the vocabulary keep their stored padding."""
        if not unit.name.startswith(_LAYERS):
            return self._read(unit.name, ())
        layer, _, rest = unit.name.removeprefix(_LAYERS).partition(".")
        if int(layer) != self._layer:
            self._layer, self._of_layer = int(layer), {}
        if rest not in self._of_layer:
            self._of_layer[rest] = self._read(_LAYERS + rest, (int(layer),))
        layer_tensor = self._of_layer[rest]
        tensor = layer_tensor if unit.expert is None else layer_tensor[unit.expert]
        expected = part_shape(shape, unit)
        if tensor.numel() != torch.Size(expected).numel():
            raise ValueError(
                f"checkpoint {self._folder}: {unit.name} has shape {list(tensor.shape)}, config.json requires {list(expected)}"
            )
        return tensor.reshape(expected)

    def _read(self, key: str, index: tuple[int, ...]) -> Tensor:
        """Return the part of the stored tensor `key` at `index`, which indexes its first dimensions."""
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"checkpoint {self._folder} has no tensor {key}, which its config.json requires")
        rest = stored.size[len(index) :]
        chunk = ChunkStorageMetadata(
            offsets=torch.Size([*index, *(0 for _ in rest)]), sizes=torch.Size([*(1 for _ in index), *rest])
        )
        items = create_read_items_for_chunk_list(key, stored, [chunk])
        target = torch.empty(chunk.sizes, dtype=stored.properties.dtype)
        self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        return target.reshape(rest)


class _Into(DefaultLoadPlanner):
    """Load planner of torch with a single destination tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._target
