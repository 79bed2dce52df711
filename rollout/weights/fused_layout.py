"""How the HF tensors of a Qwen2.5 / Qwen3 / Qwen3-MoE checkpoint are fused in engines, and the checksums of the result.

    ...self_attn.{q,k,v}_proj.*         -> ...self_attn.qkv_proj.*        rows of q, k, v one below the other
    ...mlp.{gate,up}_proj.weight        -> ...mlp.gate_up_proj.weight     rows of gate, then up
    ...mlp.experts.E.{gate,up}_proj     -> ...mlp.experts.w13_weight      [experts, 2 width, hidden]
    ...mlp.experts.E.down_proj          -> ...mlp.experts.w2_weight       [experts, hidden, width]
    model.embed_tokens.weight           -> also lm_head.weight, where the checkpoint ties them

Everything else keeps its name. Both sides of a weight sync use this file: the trainer on the tensors that it sends, the
engine on those that it received and on those that it really computes with.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from marsrl.rollout.weights.checksum import checksum_of_parts

_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_PART = re.compile(r"^(.*)\.(q|k|v|gate|up)_proj\.(weight|bias)$")
_LAYER = re.compile(r"^model\.layers\.\d+\.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ExpertName:
    """The name of a tensor of one expert, in parts."""

    base: str
    number: int
    part: str

    def renamed(self, number: int) -> str:
        """The same tensor's name in another expert."""
        return f"{self.base}.{number}.{self.part}_proj.weight"


def expert_of(name: str) -> ExpertName | None:
    """None: the tensor is of no expert."""
    found = _EXPERT.match(name)
    return ExpertName(found[1], int(found[2]), found[3]) if found else None


@dataclass(frozen=True, slots=True)
class Fusion:
    """What a fused tensor is made of. parts[e]: the tensors whose rows follow each other; is_stacked: one per "
    "expert."""

    parts: tuple[tuple[str, ...], ...]
    is_stacked: bool


def fusion_plan(names: Iterable[str]) -> dict[str, Fusion]:
    """{name of the fused tensor: what it is made of}, in the order of first appearance.

    Raises:
        ValueError: a part is missing (q without k), or experts are not numbered 0..n-1.
    """
    plan = _untied_plan(names)
    if _EMBEDDING in plan and _HEAD not in plan:
        plan[_HEAD] = plan[_EMBEDDING]
    return plan


def _untied_plan(names: Iterable[str]) -> dict[str, Fusion]:
    groups: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for name in names:
        if expert := expert_of(name):
            stacked = "w2" if expert.part == "down" else "w13"
            groups[f"{expert.base}.{stacked}_weight"][expert.number, expert.part] = name
        elif part_of := _PART.match(name):
            base, part, kind = part_of.groups()
            fused = "qkv" if part in "qkv" else "gate_up"
            groups[f"{base}.{fused}_proj.{kind}"][0, part] = name
        else:
            groups[name][0, ""] = name
    return {fused: _fusion(fused, members) for fused, members in groups.items()}


def _fusion(fused: str, members: Mapping[tuple[int, str], str]) -> Fusion:
    last = fused.rsplit(".", 2)
    if fused.endswith(".w13_weight"):
        parts: tuple[str, ...] = ("gate", "up")
    elif fused.endswith(".w2_weight"):
        parts = ("down",)
    elif last[-2] == "qkv_proj":
        parts = ("q", "k", "v")
    elif last[-2] == "gate_up_proj":
        parts = ("gate", "up")
    else:
        parts = ("",)
    experts = max(index for index, _ in members) + 1
    missing = [(e, p) for e in range(experts) for p in parts if (e, p) not in members]
    if missing:
        raise ValueError(
            f"weights: {fused} is fused from {', '.join(f'{p}_proj' for p in parts)}"
            f"{f' of {experts} experts' if experts > 1 else ''}, but {len(missing)} of these tensors are missing, first "
            f"{missing[0][1]}_proj{f' of expert {missing[0][0]}' if experts > 1 else ''}; found {sorted(members.values())[:4]}"
        )
    return Fusion(
        tuple(tuple(members[e, p] for p in parts) for e in range(experts)), fused.endswith(("w13_weight", "w2_weight"))
    )


def fuse(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, fused tensor) one after the other, cast to dtype: only one fused tensor is held at a time.

    device: where they are made, in memory of their own; None: where the parts are, and a tensor that is fused from
    nothing may be the part itself. Each number is copied once at most.
    """
    for name, fusion in fusion_plan(tensors).items():
        first = tensors[fusion.parts[0][0]]
        if fusion.is_stacked or len(fusion.parts[0]) > 1:
            yield name, _stacked(name, fusion, tensors, dtype or first.dtype, device or first.device)
        else:
            yield name, first.to(device or first.device, dtype or first.dtype, copy=device is not None)


def _stacked(
    name: str, fusion: Fusion, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    shapes = [tensors[part].shape for part in fusion.parts[0]]
    rows = sum(shape[0] for shape in shapes)
    fused = torch.empty((len(fusion.parts), rows, *shapes[0][1:]), dtype=dtype, device=device)
    for out, parts in zip(fused, fusion.parts, strict=True):
        at = 0
        for part, shape in zip(parts, shapes, strict=True):
            tensor = tensors[part]
            if tensor.shape != shape or shape[1:] != shapes[0][1:]:
                raise ValueError(
                    f"weights: {part} has shape {list(tensor.shape)}, expected {[shape[0], *shapes[0][1:]]} as a part of {name}"
                )
            out[at : at + shape[0]].copy_(tensor)
            at += shape[0]
    return fused if fusion.is_stacked else fused[0]


def fused_checksums(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    """{name of the fused tensor: checksum}, as an engine that computes in dtype must hold them; nothing is fused for it."""
    return with_tied_head(untied_checksums(tensors, dtype))


def untied_checksums(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    """fused_checksums of some of a model's tensors (say a layer's, see by_layer): a head only where it is among them."""
    found = {}
    for name, fusion in _untied_plan(tensors).items():
        shapes = [tensors[part].shape for part in fusion.parts[0]]
        shape = [sum(part[0] for part in shapes), *shapes[0][1:]] if len(shapes) > 1 else list(shapes[0])
        parts = (tensors[part].to(dtype) for expert in fusion.parts for part in expert)
        found[name] = checksum_of_parts(parts, [len(fusion.parts), *shape] if fusion.is_stacked else shape)
    return found


def with_tied_head(checksums: Mapping[str, int]) -> dict[str, int]:
    """The checksums of a whole model, whose head is its embedding where it has none of its own."""
    tied = {_HEAD: checksums[_EMBEDDING]} if _EMBEDDING in checksums else {}
    return {**tied, **checksums}


def by_layer(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """HF-named tensors a decoder layer at a time; what lies before, between and after layers comes as it is.

    Raises:
        ValueError: the tensors of a layer do not come one after the other.
    """
    seen: set[str] = set()
    for layer, members in itertools.groupby(tensors, lambda named: _layer_of(named[0])):
        if layer in seen:
            raise ValueError(
                f"weights: tensors of {layer}* come in several places; expected one layer after the other, each whole"
            )
        seen |= {layer} if layer else set()
        yield dict(members)


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else ""


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a safetensors file, or of an HF directory with one or many of them, read when asked for."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = [path] if path.is_file() else _files_of(path)
        self._open = [safe_open(str(file), framework="pt") for file in files]
        self._file_of = {name: handle for handle in self._open for name in handle.keys()}  # noqa: SIM118 - no mapping

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _files_of(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.is_file():
        files = sorted({directory / file for file in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [directory / "model.safetensors"]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"weights: {missing[0]} is missing; expected a safetensors checkpoint in {directory}")
    return files
