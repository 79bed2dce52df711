"""Hugging Face safetensors <-> this rank's Megatron shards, one tensor at a time, bit for bit.

| Megatron                          | Hugging Face                               | cut over ranks       |
|-----------------------------------|--------------------------------------------|----------------------|
| linear_qkv [G, (r+2) D, H]        | per KV group: r query heads, key, value    | TP, dim 0 (G)        |
| linear_proj                       | o_proj                                     | TP, dim 1            |
| mlp.linear_fc1 [2, F, H]          | gate_proj, up_proj                         | TP, dim 1 (F)        |
| mlp.linear_fc2                    | down_proj                                  | TP, dim 1            |
| experts.gate_up[e] [2, F, H]      | experts.e.gate_proj, experts.e.up_proj     | EP by e, ETP dim 1   |
| experts.down[e]                   | experts.e.down_proj                        | EP by e, ETP dim 1   |
| embedding, output_layer           | embed_tokens, lm_head (padded with zeros)  | TP, dim 0            |
| norms, router                     | the same                                   | not cut              |
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from marsrl.rollout.model_shape import ModelShape, weight_files

_SHARD_BYTES = 4 * 10**9  # of one safetensors file, as Hugging Face cuts them
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", "safetensors.index.json")


@dataclass(frozen=True)
class Unit:
    """What converts together: one Megatron parameter (of one expert), and its Hugging Face tensors.

    name: the parameter with its layer counted over all stages. stage: pipeline stage, expert: None outside experts.
    kind: how the Hugging Face tensors form the whole Megatron tensor. cut: its dimension that is cut, None: none.
    """

    name: str
    hf: tuple[str, ...]
    stage: int
    kind: Literal["plain", "vocab", "qkv", "pair"] = "plain"
    cut: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class _Place:
    """Where a rank stands in every group of the converter."""

    stage: int
    tensor: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int


def units(shape: ModelShape, num_stages: int) -> list[Unit]:
    """Every unit of the model, in the order of the Hugging Face file: the same list on all ranks."""
    last = num_stages - 1
    out = [Unit("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), 0, "vocab", 0)]
    for layer in range(shape.num_layers):
        stage = layer // (shape.num_layers // num_stages)
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."

        def add(
            name: str,
            *hf: str,
            kind: Literal["plain", "vocab", "qkv", "pair"] = "plain",
            cut: int | None = None,
            expert: int | None = None,
            prefixes: tuple[str, str] = (ours, theirs),
            at: int = stage,
        ) -> None:
            out.append(Unit(prefixes[0] + name, tuple(prefixes[1] + h for h in hf), at, kind, cut, expert))

        add("input_layernorm.weight", "input_layernorm.weight")
        qkv = [f"self_attn.{x}_proj" for x in "qkv"]
        add("self_attention.linear_qkv.weight", *(f"{x}.weight" for x in qkv), kind="qkv", cut=0)
        if shape.has_qkv_bias:
            add("self_attention.linear_qkv.bias", *(f"{x}.bias" for x in qkv), kind="qkv", cut=0)
        if shape.has_qk_norm:
            add("self_attention.q_layernorm.weight", "self_attn.q_norm.weight")
            add("self_attention.k_layernorm.weight", "self_attn.k_norm.weight")
        add("self_attention.linear_proj.weight", "self_attn.o_proj.weight", cut=1)
        add("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")
        if shape.num_experts:
            add("mlp.router.weight", "mlp.gate.weight")
        for e in range(shape.num_experts):
            hf = f"mlp.experts.{e}."
            add("mlp.experts.gate_up", f"{hf}gate_proj.weight", f"{hf}up_proj.weight", kind="pair", cut=1, expert=e)
            add("mlp.experts.down", f"{hf}down_proj.weight", cut=1, expert=e)
        if not shape.num_experts:
            add("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", kind="pair", cut=1)
            add("mlp.linear_fc2.weight", "mlp.down_proj.weight", cut=1)
    out.append(Unit("decoder.final_layernorm.weight", ("model.norm.weight",), last))
    if not shape.is_tied:
        out.append(Unit("output_layer.weight", ("lm_head.weight",), last, "vocab", 0))
    return out


class Converter:
    """Reads and writes the Hugging Face form of one model's parameters. Made, and used, on all ranks together."""

    def __init__(self, model: nn.Module, shape: ModelShape) -> None:
        self._shape = shape
        self._parameters = dict(model.named_parameters())
        self._num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._units = units(shape, self._num_stages)
        self._place = _Place(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_data_parallel_rank(),
        )
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, self._place)
        self._places: list[_Place] = places
        self._num_local_experts = shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
        self._dtype = next(iter(self._parameters.values())).dtype
        known = {self._local_name(unit) for unit in self._units if self._owns(unit)}
        if shape.is_tied and self._num_stages > 1:
            known.add("output_layer.weight")  # the last stage's copy of the embedding
        assert known >= set(self._parameters), f"no rule converts {sorted(set(self._parameters) - known)}"

    @torch.no_grad()
    def load(self, model_dir: str | Path) -> None:
        """Fill the parameters from a Hugging Face directory.

        Raises:
            ValueError: a tensor is missing or has another shape; with its name, file and both shapes.
        """
        with ExitStack() as stack:
            where = {}
            for path in weight_files(Path(model_dir)):
                file = stack.enter_context(safe_open(path, "pt"))
                where.update(dict.fromkeys(file.keys(), file))
            for unit in self._units:
                copies_embedding = (
                    unit.name.startswith("embedding.")
                    and self._place.stage > 0
                    and "output_layer.weight" in self._parameters
                    and self._shape.is_tied
                )
                if not self._owns(unit) and not copies_embedding:
                    continue
                missing = [name for name in unit.hf if name not in where]
                if missing:
                    raise ValueError(
                        f"model: {model_dir} has no tensor {', '.join(missing)}, which config.json asks for"
                    )
                tensors = [where[name].get_tensor(name) for name in unit.hf]
                for name, tensor, wanted in zip(unit.hf, tensors, self._model_shapes(unit), strict=True):
                    if tuple(tensor.shape) != wanted:
                        raise ValueError(
                            f"model: {model_dir}: {name} has shape {list(tensor.shape)}, config.json gives {list(wanted)}"
                        )
                target = self._parameters["output_layer.weight"] if copies_embedding else self._local(unit)
                target.copy_(self._cut(unit, self._join(unit, tensors)).reshape(target.shape))

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole CPU tensor) on rank 0, in the model's dtype; nothing on the others.

        Every rank must exhaust the iterator: each tensor is gathered from its owners when it is asked for, so that no
        rank holds the whole model. The tensors are copies: later steps do not change them.
        """
        for unit in self._units:
            whole = self._collect(unit)
            if whole is not None:
                parts = (part.contiguous().to("cpu", copy=True) for part in self._split(unit, whole))
                yield from zip(unit.hf, parts, strict=True)

    def save_hf(self, folder: str | Path, source: str | Path) -> None:
        """Write a Hugging Face directory: safetensors, index, and config and tokenizer files copied from `source`.

        It appears under its name when it is complete.

        Raises:
            ValueError: the directory exists.
        """
        folder = Path(folder)
        exists = [folder.exists()]
        dist.broadcast_object_list(exists, src=0)
        if exists[0]:
            raise ValueError(f"export: {folder} exists; name a new directory")
        if dist.get_rank() != 0:
            for _ in self.export():
                raise AssertionError("only rank 0 exports")
        else:
            self._write(folder, Path(source))
        dist.barrier()

    def _write(self, folder: Path, source: Path) -> None:
        part = folder.with_name(folder.name + ".part")
        part.mkdir(parents=True)
        files: list[list[str]] = []
        held: dict[str, Tensor] = {}
        num_bytes = total = 0

        def flush() -> None:
            files.append(list(held))
            save_file(held, part / f"{len(files)}.safetensors", metadata={"format": "pt"})
            held.clear()

        for name, tensor in self.export():
            size = tensor.numel() * tensor.element_size()
            if held and num_bytes + size > _SHARD_BYTES:
                flush()
                num_bytes = 0
            held[name] = tensor
            num_bytes += size
            total += size
        flush()
        weight_map = {}
        for i, names in enumerate(files, 1):
            final = "model.safetensors" if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
            (part / f"{i}.safetensors").rename(part / final)
            weight_map.update(dict.fromkeys(names, final))
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(_NOT_COPIED):
                shutil.copyfile(file, part / file.name)
        part.rename(folder)

    # One unit: who has it, and how it is cut and put together.

    def _owns(self, unit: Unit) -> bool:
        if unit.stage != self._place.stage:
            return False
        return unit.expert is None or unit.expert // self._num_local_experts == self._place.expert

    def _local_name(self, unit: Unit) -> str:
        if not unit.name.startswith("decoder.layers."):
            return unit.name
        _, _, layer, rest = unit.name.split(".", 3)
        return f"decoder.layers.{int(layer) - unit.stage * (self._shape.num_layers // self._num_stages)}.{rest}"

    def _local(self, unit: Unit) -> Tensor:
        parameter = self._parameters[self._local_name(unit)].data
        return parameter if unit.expert is None else parameter[unit.expert % self._num_local_experts]

    def _group(self, unit: Unit) -> Any:
        if unit.expert is None:
            return parallel_state.get_tensor_model_parallel_group()
        return parallel_state.get_expert_tensor_parallel_group()

    def _source(self, unit: Unit) -> int:
        """The rank that sends the unit to rank 0: the lowest that has the first shard."""
        for rank, place in enumerate(self._places):
            if place.stage != unit.stage:
                continue
            if unit.expert is None and place.tensor == 0 and place.data == 0:
                return rank
            holder = unit.expert is not None and unit.expert // self._num_local_experts == place.expert
            if holder and place.expert_tensor == 0 and place.expert_data == 0:
                return rank
        raise AssertionError(f"no rank owns {unit}")

    def _collect(self, unit: Unit) -> Tensor | None:
        """The whole Megatron tensor on rank 0, None elsewhere."""
        whole: Tensor | None = None
        source, rank = self._source(unit), dist.get_rank()
        if self._owns(unit):
            shard = self._local(unit).reshape(self._cut_shape(unit)).contiguous()
            group = self._group(unit)
            if unit.cut is None or group.size() == 1:
                whole = shard
            else:
                shards = [torch.empty_like(shard) for _ in range(group.size())]
                dist.all_gather(shards, shard, group=group)
                whole = torch.cat(shards, unit.cut)
        if source == 0:
            return whole if rank == 0 else None
        if rank == source:
            assert whole is not None
            dist.send(whole, 0)
            return None
        if rank == 0:
            whole = torch.empty(self._whole_shape(unit), dtype=self._dtype, device=torch.cuda.current_device())
            dist.recv(whole, source)
            return whole
        return None

    def _model_shapes(self, unit: Unit) -> list[tuple[int, ...]]:
        """Of the unit's Hugging Face tensors."""
        s = self._shape
        if unit.kind == "vocab":
            return [(s.vocab_size, s.hidden_size)]
        if unit.kind == "qkv":
            rest = () if unit.name.endswith("bias") else (s.hidden_size,)
            rows = (s.num_heads * s.head_size, s.num_kv_heads * s.head_size, s.num_kv_heads * s.head_size)
            return [(n, *rest) for n in rows]
        if unit.kind == "pair":
            return [(s.ffn_size, s.hidden_size)] * 2
        if "linear_proj" in unit.name:
            return [(s.hidden_size, s.num_heads * s.head_size)]
        if unit.cut is not None:
            return [(s.hidden_size, s.ffn_size)]
        if "router" in unit.name:
            return [(s.num_experts, s.hidden_size)]
        return [(s.head_size if "q_layernorm" in unit.name or "k_layernorm" in unit.name else s.hidden_size,)]

    def _whole_shape(self, unit: Unit) -> tuple[int, ...]:
        """Of the uncut Megatron tensor, vocabulary padding included, in the view that is cut."""
        s = self._shape
        shapes = self._model_shapes(unit)
        if unit.kind == "vocab":
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            return (-(-s.vocab_size // ranks) * ranks, s.hidden_size)
        if unit.kind == "qkv":
            per_group = (s.num_heads // s.num_kv_heads + 2) * s.head_size
            return (s.num_kv_heads, per_group, *shapes[0][1:])
        return (2, *shapes[0]) if unit.kind == "pair" else shapes[0]

    def _cut_shape(self, unit: Unit) -> tuple[int, ...]:
        whole = list(self._whole_shape(unit))
        if unit.cut is not None:
            whole[unit.cut] //= self._group(unit).size()
        return tuple(whole)

    def _cut(self, unit: Unit, whole: Tensor) -> Tensor:
        if unit.cut is None:
            return whole
        group = self._group(unit)
        return whole.chunk(group.size(), unit.cut)[group.rank()]

    def _join(self, unit: Unit, tensors: list[Tensor]) -> Tensor:
        s = self._shape
        if unit.kind == "qkv":
            return torch.cat([t.unflatten(0, (s.num_kv_heads, -1)) for t in tensors], 1)
        if unit.kind == "pair":
            return torch.stack(tensors)
        if unit.kind == "vocab":
            padding = self._whole_shape(unit)[0] - s.vocab_size
            return nn.functional.pad(tensors[0], (0, 0, 0, padding))
        return tensors[0]

    def _split(self, unit: Unit, whole: Tensor) -> list[Tensor]:
        s = self._shape
        if unit.kind == "qkv":
            heads = s.num_heads // s.num_kv_heads
            sizes = [heads * s.head_size, s.head_size, s.head_size]
            return [t.reshape(-1, *whole.shape[2:]) for t in whole.split(sizes, 1)]
        if unit.kind == "pair":
            return list(whole.unbind(0))
        return [whole[: s.vocab_size]] if unit.kind == "vocab" else [whole]
