"""Mapping from Hugging Face tensors to Megatron parameters and their shards. Imports no megatron.

| Megatron                          | Hugging Face                               | cut over ranks       |
|-----------------------------------|--------------------------------------------|----------------------|
| linear_qkv [G, (r+2) D, H]        | per KV group: r query heads, key, value    | TP, dim 0 (G)        |
| linear_proj                       | o_proj                                     | TP dim 1; bias whole |
| mlp.linear_fc1 [2, F, H]          | gate_proj, up_proj                         | TP, dim 1 (F)        |
| mlp.linear_fc2                    | down_proj                                  | TP dim 1; bias whole |
| experts.gate_up[e] [2, F, H]      | experts.e.gate_proj, experts.e.up_proj     | EP by e, ETP dim 1   |
| experts.down[e]                   | experts.e.down_proj                        | EP by e, ETP dim 1   |
| embedding, output_layer           | embed_tokens, lm_head (padded with zeros)  | TP, dim 0            |
| norms, router                     | the same                                   | not cut              |

Parameters are shown in the view that is cut, in which a shard is one range of one dimension.

An adapter's parameters have PEFT's names, a pair A [r, in], B [out, r] for each adapted matrix:

| q, k, v, gate, up                 | .lora_A, .lora_B                           | B: TP, dim 0         |
| o, down                           | .lora_A, .lora_B                           | A: TP, dim 1         |
| experts.gate_proj, ... [e]        | experts.e.gate_proj.lora_A, ...            | EP by e              |

The converter (convert.py), the export of a checkpoint and the planner (in commands/) all read this table. A shard of a
Megatron parameter is one range of rows, or of columns, of each of its Hugging Face tensors: see held_boxes, which a sync
without files uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from marsrl.rollout.adapter import AdapterConfig, adapted
from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.weights.layout import Box, stack_of, whole_box

Kind = Literal["plain", "vocab", "qkv", "pair"]
ROW_PARALLEL = ("o_proj", "down_proj")  # Cut along the input dimension; other matrices are cut along the output.


@dataclass(frozen=True)
class Unit:
    """Unit of conversion: one Megatron parameter (of one expert) and its Hugging Face tensors.

    name: name of the parameter, with the layer counted over all stages.
    hf: names of the Hugging Face tensors.
    stage: pipeline stage of the parameter.
    kind: rule by which the Hugging Face tensors form the whole Megatron tensor.
    cut: the sharded dimension; None: not sharded.
    expert: index of the expert; None outside experts.
    size: shape of an adapter's tensor; None: the model's shape determines it.
    """

    name: str
    hf: tuple[str, ...]
    stage: int
    kind: Kind = "plain"
    cut: int | None = None
    expert: int | None = None
    size: tuple[int, int] | None = None

    @property
    def hf_cut(self) -> int | None:
        """Dimension along which a rank's part is contiguous in each Hugging Face tensor; None: not cut."""
        return self.cut if self.kind == "plain" else 0


def units(shape: ModelShape, num_stages: int) -> list[Unit]:
    """Return every unit of the model, in the order of the Hugging Face file: the same list on all ranks."""
    last, of_a_layer = num_stages - 1, list[Unit]()

    def add(name: str, *hf: str, kind: Kind = "plain", cut: int | None = None, expert: int | None = None) -> None:
        of_a_layer.append(Unit(name, hf, 0, kind, cut, expert))

    add("input_layernorm.weight", "input_layernorm.weight")
    qkv = [f"self_attn.{x}_proj" for x in "qkv"]
    add("self_attention.linear_qkv.weight", *(f"{x}.weight" for x in qkv), kind="qkv", cut=0)
    if shape.has_qkv_bias:
        add("self_attention.linear_qkv.bias", *(f"{x}.bias" for x in qkv), kind="qkv", cut=0)
    if shape.has_qk_norm:
        add("self_attention.q_layernorm.weight", "self_attn.q_norm.weight")
        add("self_attention.k_layernorm.weight", "self_attn.k_norm.weight")
    add("self_attention.linear_proj.weight", "self_attn.o_proj.weight", cut=1)
    if shape.has_proj_bias:
        add("self_attention.linear_proj.bias", "self_attn.o_proj.bias")
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
    if shape.has_mlp_bias:
        add("mlp.linear_fc1.bias", "mlp.gate_proj.bias", "mlp.up_proj.bias", kind="pair", cut=1)
        add("mlp.linear_fc2.bias", "mlp.down_proj.bias")
    out = [Unit("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), 0, "vocab", 0)]
    for layer in range(shape.num_layers):
        stage = layer // (shape.num_layers // num_stages)
        megatron_prefix, hf_prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for unit in of_a_layer:
            out.append(
                replace(
                    unit, name=megatron_prefix + unit.name, hf=tuple(hf_prefix + name for name in unit.hf), stage=stage
                )
            )
    out.append(Unit("decoder.final_layernorm.weight", ("model.norm.weight",), last))
    if not shape.is_tied:
        out.append(Unit("output_layer.weight", ("lm_head.weight",), last, "vocab", 0))
    return out


def adapter_units(shape: ModelShape, adapter: AdapterConfig, num_stages: int) -> list[Unit]:
    """Return every unit of an adapter, layer by layer: the same list on all ranks."""
    out = []
    for matrix, (rows, columns, rank) in adapted(shape, adapter).items():
        _, _, layer, suffix = matrix.split(".", 3)
        stage, expert = int(layer) // (shape.num_layers // num_stages), None
        cut_a, cut_b = (1, None) if suffix.endswith(ROW_PARALLEL) else (None, 0)
        if ".experts." in suffix:
            expert, cut_a, cut_b = int(suffix.split(".")[2]), None, None
            suffix = suffix.replace(f".{expert}.", ".", 1)
        for letter, size, cut in (("A", (rank, columns), cut_a), ("B", (rows, rank), cut_b)):
            name = f"decoder.layers.{layer}.{suffix}.lora_{letter}"
            out.append(Unit(name, (f"{matrix}.lora_{letter}.weight",), stage, "plain", cut, expert, size))
    return out


def padded_rows(vocab_size: int, parts: int) -> int:
    """Round the vocabulary up so that all of `parts` ranks hold the same number of rows."""
    return -(-vocab_size // parts) * parts


def hf_shapes(shape: ModelShape, unit: Unit) -> list[tuple[int, ...]]:
    """Return the shapes of the unit's Hugging Face tensors."""
    s = shape
    if unit.size is not None:
        return [unit.size]
    trailing = () if unit.name.endswith("bias") else (s.hidden_size,)
    if unit.kind == "vocab":
        return [(s.vocab_size, s.hidden_size)]
    if unit.kind == "qkv":
        rows = (s.num_heads * s.head_size, s.num_kv_heads * s.head_size, s.num_kv_heads * s.head_size)
        return [(n, *trailing) for n in rows]
    if unit.kind == "pair":
        return [(s.ffn_size, *trailing)] * 2
    if unit.name.endswith("linear_proj.weight"):
        return [(s.hidden_size, s.num_heads * s.head_size)]
    if unit.cut is not None:
        return [(s.hidden_size, s.ffn_size)]
    if "router" in unit.name:
        return [(s.num_experts, s.hidden_size)]
    return [(s.head_size if "q_layernorm" in unit.name or "k_layernorm" in unit.name else s.hidden_size,)]


def part_shape(shape: ModelShape, unit: Unit, parts: int = 1) -> tuple[int, ...]:
    """Return the shape of one of `parts` equal shards of the Megatron tensor, in the view that is cut.

    Vocabulary padding is included.
    """
    shapes = hf_shapes(shape, unit)
    if unit.kind == "vocab":
        full_shape = [padded_rows(shape.vocab_size, parts), shape.hidden_size]
    elif unit.kind == "qkv":
        per_group = (shape.num_heads // shape.num_kv_heads + 2) * shape.head_size
        full_shape = [shape.num_kv_heads, per_group, *shapes[0][1:]]
    else:
        full_shape = [2, *shapes[0]] if unit.kind == "pair" else list(shapes[0])
    if unit.cut is not None:
        full_shape[unit.cut] //= parts
    return tuple(full_shape)


def hf_span(unit: Unit, size: int, part: int, parts: int) -> tuple[int, int]:
    """Return [start, stop) of part `part` along hf_cut of a Hugging Face tensor that has `size` there."""
    rows_per_part = padded_rows(size, parts) // parts if unit.kind == "vocab" else size // parts
    return min(size, part * rows_per_part), min(size, (part + 1) * rows_per_part)


def join(shape: ModelShape, unit: Unit, tensors: Sequence[Tensor], parts: int = 1) -> Tensor:
    """Join the unit's Hugging Face tensors, each reduced to hf_span, into the shard, in the view that is cut."""
    if unit.kind == "qkv":
        return torch.cat([t.unflatten(0, (shape.num_kv_heads // parts, -1)) for t in tensors], 1)
    if unit.kind == "pair":
        return torch.stack(list(tensors))
    if unit.kind == "vocab":
        missing = part_shape(shape, unit, parts)[0] - tensors[0].shape[0]
        return nn.functional.pad(tensors[0], (0, 0, 0, missing))
    return tensors[0]


def split(shape: ModelShape, unit: Unit, whole: Tensor) -> list[Tensor]:
    """Split the whole Megatron tensor, in the view that is cut, into the unit's Hugging Face tensors."""
    if unit.kind == "qkv":
        heads = shape.num_heads // shape.num_kv_heads
        sizes = [heads * shape.head_size, shape.head_size, shape.head_size]
        return [t.reshape(-1, *whole.shape[2:]) for t in whole.split(sizes, 1)]
    if unit.kind == "pair":
        return list(whole.unbind(0))
    return [whole[: shape.vocab_size]] if unit.kind == "vocab" else [whole]


def held_boxes(shape: ModelShape, unit: Unit, part: int, parts: int, num_experts: int = 1) -> Iterator[tuple[str, Box]]:
    """Yield (name of a stack, Box) for each of the unit's tensors.

    The Box is the part of the tensor, within its stack, that shard `part` of `parts` holds. Tensors of which the shard holds only
    padding are left out.

    num_experts: number of experts that the rank holds, from the unit's expert on.
    """
    for name, size in zip(unit.hf, hf_shapes(shape, unit), strict=True):
        stack, expert = stack_of(name)
        box = whole_box(size).cut(0, expert, expert + num_experts)
        if unit.hf_cut is not None:
            box = box.cut(1 + unit.hf_cut, *hf_span(unit, size[unit.hf_cut], part, parts))
        if box.num_elements:
            yield stack, box


def held_stacks(shape: ModelShape, unit: Unit, parameter: Tensor, parts: int) -> Sequence[Tensor]:
    """Return a rank's parts of the unit's tensors, each [matrices, rows, columns]; vocabulary padding may follow.

    parameter: the unit's parameter; for an expert's unit, the parameter that holds all experts of the rank.
    """
    if unit.expert is not None:
        return parameter.unbind(1) if unit.kind == "pair" else [parameter]
    view = parameter.reshape(part_shape(shape, unit, parts))
    return [tensor.reshape(1, tensor.shape[0], -1) for tensor in split(shape, unit, view)]
