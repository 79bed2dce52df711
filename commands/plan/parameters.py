"""Parameter counts of a rank: every parameter of the mapping, divided by the ranks that split it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from marsrl.rollout.adapter import AdapterConfig, adapted
from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.learner.megatron.mapping import Unit, hf_shapes, padded_rows, units


@dataclass(frozen=True)
class Elements:
    """Parameter counts of a whole model by kind of split. The counts layer_* are for one layer; all layers are equal."""

    embedding: int  # split by TP, padded; shared with the head if the model is tied
    head: int  # split by TP, padded; 0 if the model is tied
    layer_cut: int  # split by TP
    layer_whole: int  # on every TP rank: norms, router
    layer_experts: int  # split by EP x ETP
    final_norm: int
    num_layers: int

    @property
    def total(self) -> int:
        layer = self.layer_cut + self.layer_whole + self.layer_experts
        return self.embedding + self.head + self.final_norm + self.num_layers * layer


@dataclass(frozen=True)
class RankElements:
    """Parameter counts of one rank. Experts are separate, because fewer ranks share their optimizer state."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


@lru_cache(maxsize=64)
def elements(shape: ModelShape) -> Elements:
    """Count the parameters of the whole model, tensor by tensor, from the mapping between Hugging Face and Megatron."""
    all_units = units(shape, 1)
    layer = [unit for unit in all_units if unit.name.startswith("decoder.layers.0.")]

    def count(chosen: Iterable[Unit]) -> int:
        return sum(prod(size) for unit in chosen for size in hf_shapes(shape, unit))

    return Elements(
        embedding=count(u for u in all_units if u.name.startswith("embedding.")),
        head=count(u for u in all_units if u.name.startswith("output_layer.")),
        layer_cut=count(u for u in layer if u.cut is not None and u.expert is None),
        layer_whole=count(u for u in layer if u.cut is None),
        layer_experts=count(u for u in layer if u.expert is not None),
        final_norm=count(u for u in all_units if "final_layernorm" in u.name),
        num_layers=shape.num_layers,
    )


@lru_cache(maxsize=64)
def num_pieces(shape: ModelShape, expert: int) -> int:
    """Return the number of pieces sent in a publish: one per tensor, and three stacks per expert rank for a layer's experts."""
    found = [unit for unit in units(shape, 1) if unit.expert in (None, 0)]
    return sum(len(unit.hf) * (1 if unit.expert is None else expert) for unit in found)


def active_elements(shape: ModelShape) -> int:
    """Count the parameters active in one token's forward pass, without the embedding (a lookup)."""
    e = elements(shape)
    head = e.head or e.embedding
    return head + e.num_layers * (e.layer_cut + e.layer_whole) + active_expert_elements(shape)


def active_expert_elements(shape: ModelShape) -> int:
    """Count the experts' parameters active in one token's forward pass."""
    e = elements(shape)
    return e.num_layers * (e.layer_experts * shape.experts_per_token // shape.num_experts) if shape.num_experts else 0


def rank_elements(shape: ModelShape, layout: Layout, stage: int) -> RankElements:
    """Count the parameters of a rank of pipeline stage `stage`. The vocabulary is padded to a multiple of TP.

    dense = L/PP (cut / TP + whole) + [first stage] V H / TP + [last stage] (V H / TP + H). Tensor parallelism divides a
    layer's `cut` parameters, and repeats the `whole` ones (norms, routers). With PP > 1 a tied model's last stage has its own
    copy of the embedding.
    expert = L/PP experts / (EP ETP)
    """
    e = elements(shape)
    num_layers = shape.num_layers // layout.pipeline
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    vocabulary = padded_rows(shape.vocab_size, layout.tensor) // layout.tensor * shape.hidden_size
    dense = num_layers * (e.layer_cut // layout.tensor + e.layer_whole)
    dense += vocabulary if is_first else 0
    has_head = is_last and (not shape.is_tied or layout.pipeline > 1)
    dense += (vocabulary if has_head else 0) + (e.final_norm if is_last else 0)
    expert = num_layers * e.layer_experts // (layout.expert * layout.expert_tensor)
    return RankElements(dense, expert)


def adapter_elements(shape: ModelShape, layout: Layout, adapters: Sequence[AdapterConfig]) -> RankElements:
    """Count the numbers in A and B of all these adapters on one rank of any pipeline stage.

    q, k, v, gate, up: r in [A, whole] + out r / TP [B]; o, down: r in / TP [A] + out r [B, whole]; expert: r (in + out) / EP.
    Adapters are stored together. Each takes the memory of every attention and MLP matrix that any of them adapts, at the largest
    rank. Only adapters with the target `experts` take memory for the experts' matrices.
    """
    largest: dict[str, tuple[int, int, int]] = {}
    for adapter in adapters:
        for name, sizes in adapted(replace(shape, num_layers=1), adapter).items():
            largest[name] = max(sizes, largest.get(name, sizes))
    dense = expert = 0
    for name, (out, into, rank) in largest.items():
        if ".experts." in name:
            expert += rank * (into + out)
        elif name.endswith(("o_proj", "down_proj")):
            dense += rank * (into // layout.tensor + out)
        else:
            dense += rank * (into + out // layout.tensor)
    num_layers = shape.num_layers // layout.pipeline
    num_of_experts = sum("experts" in adapter.targets for adapter in adapters)
    return RankElements(num_layers * dense * len(adapters), num_layers * expert * num_of_experts // layout.expert)
