"""Conversion between Hugging Face safetensors and this rank's Megatron shards, tensor by tensor, bit for bit (mapping.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.weights.layout import Box, stack_of, stacked
from marsrl.trainer.learner.megatron.hf_files import HfReader, write_hf
from marsrl.trainer.learner.megatron.mapping import (
    Unit,
    adapter_units,
    held_boxes,
    held_stacks,
    hf_shapes,
    units,
)


@dataclass(frozen=True)
class _Place:
    """Position of a rank in the converter's groups."""

    stage: int
    tensor: int
    expert: int
    expert_tensor: int


class Converter:
    """Reader and writer of a model's parameters in Hugging Face format. Collective."""

    def __init__(self, model: nn.Module, shape: ModelShape, adapter: AdapterConfig | None = None) -> None:
        """Convert `model`, which holds only an adapter's parameters if `adapter` is given (adapter.py)."""
        self._shape = shape
        self._parameters = dict(model.named_parameters())
        # Maps a parameter to its values, which are on the CPU while the learner sleeps (sleep.py).
        self.held: Callable[[Tensor], Tensor] = lambda parameter: parameter
        self._num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        num_stages = self._num_stages
        self._units = units(shape, num_stages) if adapter is None else adapter_units(shape, adapter, num_stages)
        self._place = _Place(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, self._place)
        self._places: list[_Place] = places
        self._num_local_experts = shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
        self._dtype = next(iter(self._parameters.values())).dtype
        self._stacks = [u for u in self._units if u.expert is None or u.expert % self._num_local_experts == 0]
        self._part_of = {stack_of(name)[0]: (unit, i) for unit in self._stacks for i, name in enumerate(unit.hf)}
        known_names = {self._local_name(unit) for unit in self._units if self._owns(unit)}
        if shape.is_tied and self._num_stages > 1:
            known_names.add("output_layer.weight")  # The last stage's copy of the embedding.
        assert known_names >= set(self._parameters), f"no rule converts {sorted(set(self._parameters) - known_names)}"

    def load(self, model_dir: str | Path) -> None:
        """Fill the parameters from a Hugging Face directory; a rank reads only the bytes of its own shards.

        Raises ValueError, with name, file and both shapes, if a tensor is missing or has another shape.
        """
        self.fill(partial(HfReader(model_dir).shard, self._shape))

    @torch.no_grad()
    def fill(self, shard_of: Callable[[Unit, int, int], Tensor]) -> None:
        """Fill each unit on this rank with shard_of(unit, part, parts), in the view that is cut (mapping.py)."""
        # The last of several stages has a copy of a tied embedding.
        has_copy = self._shape.is_tied and "output_layer.weight" in self._parameters
        for unit in self._units:
            is_copied = has_copy and unit.name.startswith("embedding.")
            if not self._owns(unit) and not is_copied:
                continue
            group = self._group(unit)
            target = self._parameters["output_layer.weight"] if is_copied else self._local(unit)
            target.copy_(shard_of(unit, group.rank(), group.size()).reshape(target.shape))

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full CPU tensor) in the model's dtype on rank 0, and nothing on other ranks.

        Every rank must exhaust the iterator: each tensor, or stack of a layer's experts, is gathered from its owners
        on demand, so that no rank holds the whole model. The tensors are copies, unaffected by later steps.
        """
        rank, names = dist.get_rank(), defaultdict[str, list[str]](list)
        for name in (name for unit in self._units for name in unit.hf):
            names[stack_of(name)[0]].append(name)
        for stack, shape in self.shapes.items():
            gathered = torch.empty(shape if rank == 0 else 0, dtype=self._dtype)
            placed = set[Box]()
            for source, boxes in enumerate(self.boxes_of_ranks):
                box = boxes.get(stack)
                if box is None or box in placed:
                    continue
                placed.add(box)
                part = self.stack(stack)[:, : box.shape[1]].contiguous() if rank == source else None
                if rank == 0 and part is None:
                    part = torch.empty(box.shape, dtype=self._dtype, device=self.device)
                    dist.recv(part, source)
                elif part is not None and rank > 0:
                    dist.send(part.to(self.device), 0)
                if rank == 0 and part is not None:
                    box.of(gathered).copy_(part)
            if rank == 0:
                experts = sorted(names[stack], key=lambda name: stack_of(name)[1])
                yield from zip(experts, gathered if experts != [stack] else [gathered], strict=True)

    # Views of this rank's tensors, for a sync without files (direct.py: HeldWeights).

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all Hugging Face tensors of the model, with stacks of experts, in file order."""
        shapes = {name: size for u in self._units for name, size in zip(u.hf, hf_shapes(self._shape, u), strict=True)}
        return stacked(shapes)

    @property
    def device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    @cached_property
    def boxes_of_ranks(self) -> Sequence[Mapping[str, Box]]:
        """For each rank, {tensor name: the rank's part of that tensor}."""
        boxes_of_rank: list[dict[str, Box]] = [{} for _ in self._places]
        for place, boxes in zip(self._places, boxes_of_rank, strict=True):
            for unit in self._stacks:
                if self._owns(unit, place):
                    of_expert = place.expert_tensor, self._num_local_experts
                    part, num_experts = of_expert if unit.expert is not None else (place.tensor, 1)
                    boxes.update(held_boxes(self._shape, unit, part, self._group(unit).size(), num_experts))
        return boxes_of_rank

    @torch.no_grad()
    def stack(self, name: str) -> Tensor:
        """Return this rank's box of a tensor, [matrices, rows, columns], in the model's dtype; a view if evenly strided.

        The tensor is on the CPU while the learner's memory sleeps (sleep.py).
        """
        unit, part = self._part_of[name]
        parameter = self.held(self._parameters[self._local_name(unit)].data)
        return held_stacks(self._shape, unit, parameter, self._group(unit).size())[part]

    def save_hf(self, folder: str | Path, source: str | Path) -> None:
        """Write a Hugging Face directory: safetensors, index, and config and tokenizer files copied from `source`.

        The directory is renamed to `folder` once it is complete.

        Raises ValueError if the directory exists.
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
            write_hf(folder, self.export(), Path(source))
        dist.barrier()

    # Owners and sharding of one unit.

    def _owns(self, unit: Unit, position: _Place | None = None) -> bool:
        """Return True if a rank (default: this one) holds a part of the unit."""
        position = position or self._place
        if unit.stage != position.stage:
            return False
        return unit.expert is None or unit.expert // self._num_local_experts == position.expert

    def _local_name(self, unit: Unit) -> str:
        if not unit.name.startswith("decoder.layers."):
            return unit.name
        _, _, layer, suffix = unit.name.split(".", 3)
        return f"decoder.layers.{int(layer) - unit.stage * (self._shape.num_layers // self._num_stages)}.{suffix}"

    def _local(self, unit: Unit) -> Tensor:
        parameter = self._parameters[self._local_name(unit)].data
        return parameter if unit.expert is None else parameter[unit.expert % self._num_local_experts]

    def _group(self, unit: Unit) -> Any:
        if unit.expert is None:
            return parallel_state.get_tensor_model_parallel_group()
        return parallel_state.get_expert_tensor_parallel_group()
