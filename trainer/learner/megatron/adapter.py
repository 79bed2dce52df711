"""Low-rank adapters on a frozen model; all policies with the same base share one copy of it per rank.

An adapted layer with weight W adds s B (A x) to W x, with s = alpha / rank; s is multiplied into B, as in vLLM.

    layer                      A                  B                 summed over TP
    q, k, v, gate, up          whole              cut as W          A
    o, down                    cut as W           whole             B
    experts                    by expert (EP)     by expert (EP)    none

Under sequence parallelism, whole matrices see only their rank's tokens; `sequence_parallel` marks their gradients for the sum.

    base = FrozenBase(model_dir, layout, policy)             # once
    adapter = Adapter(base, policy.adapter, seed)            # of each policy
    base.wrapped(batch, loss, mpt, active=ActiveAdapters((adapter,)))
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from marsrl.kernels import grouped_linear
from marsrl.rollout.adapter import PEFT_PREFIX, TENSORS, AdapterConfig, adapted, check_start
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.config import OptimizerConfig, PolicyConfig
from marsrl.trainer.learner.megatron.convert import Converter
from marsrl.trainer.learner.megatron.hf_files import HfReader
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.learner.megatron.mapping import ROW_PARALLEL, Unit, hf_span
from marsrl.trainer.learner.megatron.model import as_run, bare_model, skip_syncs_alone


class FrozenBase:
    """Model without gradients, whose layers have hooks for adapters. Constructed on all ranks together."""

    def __init__(self, model_dir: str | Path, layout: Layout, policy: PolicyConfig) -> None:
        self.shape, self.layout = read_shape(model_dir), layout
        self.model = bare_model(self.shape, layout, policy)
        Converter(self.model, self.shape).load(model_dir)
        self.wrapped = as_run(self.model).requires_grad_(False)
        for layer in self.model.decoder.layers:
            prefix, attention, mlp = f"{layer.layer_number - 1}.", layer.self_attention, layer.mlp
            qkv = tuple(f"{prefix}self_attn.{name}_proj" for name in "qkv")
            groups = attention.num_query_groups_per_partition
            self._adapt(attention.linear_qkv, partial(self._column, qkv, groups))
            self._adapt(attention.linear_proj, partial(self._row, f"{prefix}self_attn.o_proj"))
            if self.shape.num_experts:
                mlp.experts.pair_of = partial(self._expert_pair, f"{prefix}mlp.experts.")
            else:
                gate_up = (f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj")
                self._adapt(mlp.linear_fc1, partial(self._column, gate_up, None))
                self._adapt(mlp.linear_fc2, partial(self._row, f"{prefix}mlp.down_proj"))

    def _adapt(self, layer: nn.Module, delta: Any) -> None:
        def add(layer: nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
            adapted = delta(inputs[0].flatten(0, 1))
            return output if adapted is None else (output[0] + adapted[:, None], output[1])

        layer.register_forward_hook(add)

    def _column(self, names: Sequence[str], groups: int | None, x: Tensor) -> Tensor | None:
        """Return the adapters' part of q, k, v (interleaved by KV group) or gate, up: [T, out / TP] from x [T / TP, in]."""
        active = self.model.active
        if active is None or not any(names[0] in adapter.pairs for adapter in active.adapters):
            return None
        pairs = [active.pairs(name) for name in names]
        low = active.product(
            x, [torch.cat(of_adapter) for of_adapter in zip(*(a for a, _ in pairs), strict=True)], is_own=True
        )
        if self.layout.tensor > 1:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        lows = low.chunk(len(names), -1)
        parts = [active.product(part, b) for part, (_, b) in zip(lows, pairs, strict=True)]
        if groups is not None:
            parts = [part.unflatten(-1, (groups, -1)) for part in parts]
        return torch.cat(parts, -1).flatten(1)

    def _row(self, name: str, x: Tensor) -> Tensor | None:
        """Return the adapters' part of o or down: [T / TP, out] from x [T, in / TP]."""
        active = self.model.active
        if active is None or not any(name in adapter.pairs for adapter in active.adapters):
            return None
        a, b = active.pairs(name)
        low = active.product(x, a)  # A partial sum over tensor-parallel ranks.
        if self.layout.tensor > 1:
            low = reduce_scatter_to_sequence_parallel_region(low)
        return active.product(low, b, is_own=True)

    def _expert_pair(self, prefix: str, name: str) -> tuple[Tensor, Tensor] | None:
        """Return A [E, r, in] and s B [E, out, r] of this rank's experts; the micro-batch must have a single adapter."""
        active = self.model.active
        if active is None or f"{prefix}{name}" not in active.adapters[0].pairs:
            return None
        assert len(active.adapters) == 1, "experts' rows are not sorted by adapter"
        return active.adapters[0].pairs[f"{prefix}{name}"]()


class Pair(nn.Module):
    """Matrices A and B of one adapted matrix, or of this rank's experts, with a leading expert dimension."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        self.scale = scale

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A and s B."""
        return self.lora_A, self.scale * self.lora_B


@dataclass(frozen=True)
class ActiveAdapters:
    """Adapters of a micro-batch, whose tokens are grouped by adapter in this order.

    counts: [adapters] int64, tokens of each; None: a single adapter. own: counts among this tensor-parallel rank's tokens.
    """

    adapters: tuple[Adapter, ...]
    counts: Tensor | None = None
    own: Tensor | None = None

    def pairs(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return ([r, in], [out, r]) of each adapter, padded with zeros to the largest rank."""
        found_pairs = [adapter.pairs[name]() if name in adapter.pairs else None for adapter in self.adapters]
        largest = max((pair for pair in found_pairs if pair is not None), key=lambda pair: pair[0].shape[0])
        rank, zeros = largest[0].shape[0], tuple(torch.zeros_like(matrix) for matrix in largest)
        pairs = [zeros if pair is None else pair for pair in found_pairs]
        a = [pad(matrix, (0, 0, 0, rank - matrix.shape[0])) for matrix, _ in pairs]
        return a, [pad(matrix, (0, rank - matrix.shape[1])) for _, matrix in pairs]

    def product(self, x: Tensor, matrices: Sequence[Tensor], *, is_own: bool = False) -> Tensor:
        """Multiply each row of x by its adapter's matrix. is_own: x has only this tensor-parallel rank's tokens."""
        if len(matrices) == 1:
            return linear(x, matrices[0])
        counts = self.own if is_own else self.counts
        assert counts is not None
        return grouped_linear(x.contiguous(), torch.stack(list(matrices)), counts)


class Adapter(MegatronModule):
    """This rank's part of an adapter. Construction is collective.

    Parameters have the names of mapping.adapter_units. pairs: by adapted matrix, "layer.matrix", with the layer
    counted over all stages. converter: reads and writes the adapter.
    """

    def __init__(self, base: FrozenBase, settings: AdapterConfig, seed: int) -> None:
        """Initialise A from `seed`, or read settings.start; ValueError if that cannot be used."""
        super().__init__(config=base.model.config)
        self.settings, self._base = settings, base
        self.decoder, self.pairs = nn.Module(), dict[str, Pair]()
        self.decoder.layers = nn.ModuleList()
        numbers = [layer.layer_number - 1 for layer in base.model.decoder.layers]
        self._first_layer = numbers[0]
        for number in numbers:
            of_layer = nn.Module()
            for name, (out, into, rank) in _of_a_layer(base, settings).items():
                pair = self.pairs[f"{number}.{name}"] = self._pair(name, out, into, rank, settings.scale)
                _put(of_layer, name, pair)
            self.decoder.layers.append(of_layer)
        self.converter = Converter(self, base.shape, settings)
        if settings.start is None:
            self.converter.fill(partial(_fresh, seed))
        else:
            self.read(settings.start)

    def read(self, folder: str | Path) -> None:
        """Read a PEFT directory; ValueError if a tensor is missing or would not be used."""
        check_start(Path(folder), self._base.shape, self.settings)
        reader = HfReader(Path(folder) / TENSORS, PEFT_PREFIX)
        self.converter.fill(partial(reader.shard, self._base.shape))

    def _pair(self, name: str, out: int, into: int, rank: int, scale: float) -> Pair:
        options = {"dtype": self.config.params_dtype, "device": torch.cuda.current_device()}
        tensor = self._base.layout.tensor
        if ".experts." in name:
            group, num = parallel_state.get_expert_model_parallel_group(), self.config.num_moe_experts
            local = num // group.size()
            pair = Pair(torch.empty(local, rank, into, **options), torch.empty(local, out, rank, **options), scale)
            for weight in pair.parameters():
                set_tensor_model_parallel_attributes(
                    weight, True, 0, 1
                )  # Otherwise the norm counts only one TP rank's experts.
                weight.allreduce = group.size() == 1  # type: ignore[attr-defined]  # DDP's group
            return pair
        is_row = name.endswith(ROW_PARALLEL)
        if is_row:
            into //= tensor
        else:
            out //= tensor
        pair = Pair(torch.empty(rank, into, **options), torch.empty(out, rank, **options), scale)
        cut, uncut = (pair.lora_A, pair.lora_B) if is_row else (pair.lora_B, pair.lora_A)
        set_tensor_model_parallel_attributes(cut, True, 1 if is_row else 0, 1)
        uncut.sequence_parallel = tensor > 1  # type: ignore[attr-defined]  # read by finalize
        return pair

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        """Return one tensor [layers, ...] for all layers, as megatron's blocks store them; experts [layers, experts, ...]."""
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        state = {}
        for name, weight in self.named_parameters():
            layer, local_name = name.removeprefix("decoder.layers.").split(".", 1)
            cuts = [(0, self._first_layer + int(layer), self._base.shape.num_layers)]
            replica = (0, tensor_rank, data_rank)
            if ".experts." in local_name:
                group = parallel_state.get_expert_model_parallel_group()
                cuts.append((1, group.rank(), group.size()))
                replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
            elif getattr(weight, "tensor_model_parallel", False):
                cuts.append((1 + weight.partition_dim, tensor_rank, self._base.layout.tensor))
                replica = (0, 0, data_rank)
            state[prefix + name] = ShardedTensor.from_rank_offsets(
                f"{prefix}decoder.layers.{local_name}", weight, *cuts, replica_id=replica, prepend_axis_num=1
            )
        return state


def for_training(adapter: Adapter, optimizer: OptimizerConfig) -> DistributedDataParallel:
    """Wrap the adapter with gradient buffers."""
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=optimizer.distributed)
    ddp = DistributedDataParallel(adapter.config, options, adapter)
    skip_syncs_alone(ddp)
    return ddp


def finalize(trained: Sequence[DistributedDataParallel]) -> None:
    """Sum adapter gradients over data-parallel ranks, and gradients of unsharded matrices over tensor-parallel ranks."""
    for ddp in trained:
        ddp.finish_grad_sync()
    _allreduce_non_tensor_model_parallel_grads(list(trained), trained[0].config)


def _of_a_layer(base: FrozenBase, settings: AdapterConfig) -> dict[str, tuple[int, int, int]]:
    """Return {matrix: (out, in, rank)} of a layer, with one entry for all experts."""
    first = "model.layers.0."
    sizes = {
        name.removeprefix(first): size for name, size in adapted(base.shape, settings).items() if name.startswith(first)
    }
    return {re.sub(r"\.experts\.\d+\.", ".experts.", name): size for name, size in sizes.items()}


def _put(parent: nn.Module, name: str, child: nn.Module) -> None:
    """Register a module under a dotted name, creating modules for the parts of the name."""
    *parts, last = name.split(".")
    for part in parts:
        if not hasattr(parent, part):
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent.add_module(last, child)


def _fresh(seed: int, unit: Unit, part: int, parts: int) -> Tensor:
    """Return part of a new tensor, the same under every layout.

    A is uniform in 1 / sqrt(in) (Kaiming, a = sqrt(5), as PEFT), B is zero.
    """
    assert unit.size is not None
    if unit.name.endswith("lora_B"):
        tensor = torch.zeros(unit.size)
    else:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{unit.hf[0]}".encode()))
        bound = 1.0 / math.sqrt(unit.size[1])
        tensor = torch.empty(unit.size).uniform_(-bound, bound, generator=generator)
    if unit.cut is None:
        return tensor
    start, stop = hf_span(unit, unit.size[unit.cut], part, parts)
    return tensor.narrow(unit.cut, start, stop - start)
