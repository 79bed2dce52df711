"""Low-rank adapters on a frozen model; policies with the same base share one copy of the base per rank.

An adapted layer with weight W adds B s (A x) to W x, with s = alpha / rank.

    layer                      A                  B                 summed over TP
    q, k, v, gate, up          whole              cut as W          A
    o, down                    cut as W           whole             B
    experts                    by expert (EP)     by expert (EP)    none

Under sequence parallelism, whole matrices see only their rank's tokens, so their gradients are summed.

    base = FrozenBase(model_dir, layout, policy)             # once
    slot = base.trained.add(Adapter(base, policy.adapter, seed))            # of each policy
    base.wrapped(batch, loss, mpt, active=ActiveAdapters(base.trained, slice(slot, slot + 1)))
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from marsrl.kernels import grouped_linear
from marsrl.rollout.adapter import PEFT_PREFIX, TENSORS, AdapterConfig, adapted, check_start
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.config import OptimizerConfig, PolicyConfig
from marsrl.trainer.learner.megatron.convert import Converter
from marsrl.trainer.learner.megatron.hf_files import HfReader
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.learner.megatron.mapping import ROW_PARALLEL, Unit, hf_span
from marsrl.trainer.learner.megatron.model import as_run, bare_model
from marsrl.trainer.learner.sleep import Memory

# Matrices with the same input, whose A matrices are joined into one.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ALIGNMENT = 16  # In elements: GPUs read 16 bytes at a time.

Place = tuple[str, str]
"""Name of the matrix (for joined matrices, of the first), and "A" or "B"."""


def is_whole(name: str, letter: str) -> bool:
    """Return True if every tensor-parallel rank holds the whole matrix; False: a part, or different experts."""
    return ".experts." not in name and name.endswith(ROW_PARALLEL) != (letter == "A")


def _place(name: str, letter: str) -> tuple[Place, int, int]:
    """Return (place, index in it, number of matrices in it)."""
    prefix, _, last = name.rpartition(".")
    for names in _JOINED if letter == "A" else ():
        if last in names:
            return (f"{prefix}.{names[0]}", letter), names.index(last), len(names)
    return (name, letter), 0, 1


class FrozenBase:
    """Model without gradients, whose layers have hooks for adapters. Constructed on all ranks together."""

    def __init__(self, model_dir: str | Path, layout: Layout, policy: PolicyConfig) -> None:
        self.shape, self.layout = read_shape(model_dir), layout
        self.model = bare_model(self.shape, layout, policy)
        Converter(self.model, self.shape).load(model_dir)
        self.trained, self.references = Bank(is_trained=True), Bank(is_trained=False)
        self.optimizer: Any = None  # BankOptimizer of `trained`, from its first use on.
        self.optimizer_configs: list[OptimizerConfig] = []
        self.wrapped = as_run(self.model).requires_grad_(False)
        self.memory = Memory(self.state_tensors, self.gradient_tensors)  # With all adapters.
        for layer in self.model.decoder.layers:
            prefix, attention, mlp = f"{layer.layer_number - 1}.", layer.self_attention, layer.mlp
            qkv = tuple(f"{prefix}self_attn.{name}_proj" for name in "qkv")
            groups = attention.num_query_groups_per_partition
            self._adapt(attention.linear_qkv, partial(self._column, qkv, groups))
            self._adapt(attention.linear_proj, partial(self._row, f"{prefix}self_attn.o_proj"))
            if self.shape.num_experts:
                mlp.experts.adapted = partial(self._of_experts, f"{prefix}mlp.experts.")
            else:
                gate_up = (f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj")
                self._adapt(mlp.linear_fc1, partial(self._column, gate_up, None))
                self._adapt(mlp.linear_fc2, partial(self._row, f"{prefix}mlp.down_proj"))

    def state_tensors(self) -> Iterator[Tensor]:
        """Yield this rank's tensors that outlive a step, of the model, all adapters and their optimizer."""
        yield from self.model.parameters()
        for adapter in (*self.trained.adapters, *self.references.adapters):
            yield from adapter.parameters()
        if self.optimizer is not None:
            yield from self.optimizer.state_tensors()

    def gradient_tensors(self) -> list[Tensor]:
        return [rows.gradients for rows in self.trained.buffers.values()]

    def _adapt(self, layer: nn.Module, delta: Any) -> None:
        def add(layer: nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
            adapted = delta(inputs[0].flatten(0, 1))
            return output if adapted is None else (output[0] + adapted[:, None], output[1])

        layer.register_forward_hook(add)

    def _column(self, names: Sequence[str], groups: int | None, x: Tensor) -> Tensor | None:
        """Return the adapters' part of q, k, v (interleaved by KV group) or gate, up: [T, out / TP] from x [T / TP, in]."""
        active = self.model.active
        if active is None or not active.adapt(names[0]):
            return None
        low = active.product(x, names[0], "A", is_own=True)
        if self.layout.tensor > 1:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        lows = active.scaled(low).chunk(len(names), -1)
        parts = [active.product(part, name, "B") for part, name in zip(lows, names, strict=True)]
        if groups is not None:
            parts = [part.unflatten(-1, (groups, -1)) for part in parts]
        return torch.cat(parts, -1).flatten(1)

    def _row(self, name: str, x: Tensor) -> Tensor | None:
        """Return the adapters' part of o or down: [T / TP, out] from x [T, in / TP]."""
        active = self.model.active
        if active is None or not active.adapt(name):
            return None
        low = active.product(x, name, "A")  # A partial sum over tensor-parallel ranks.
        if self.layout.tensor > 1:
            low = reduce_scatter_to_sequence_parallel_region(low)
        return active.product(active.scaled(low, is_own=True), name, "B", is_own=True)

    def _of_experts(self, prefix: str, names: Sequence[str], rows: Tensor, counts: Tensor) -> Tensor | None:
        """Return the adapter's part of down or of gate, up: [R, out] from rows [R, in] and the number of rows of each expert.

        The micro-batch must have a single adapter.
        """
        active = self.model.active
        if active is None or not active.adapt(prefix + names[0]):
            return None
        assert active.slots.stop == active.slots.start + 1, "experts' rows are not sorted by adapter"
        bank, row = active.bank, active.bank.buffers[True].slots.index(active.slots.start)
        low = active.scaled(_product(rows, bank, prefix + names[0], "A", row, counts))
        parts = zip(low.chunk(len(names), -1), names, strict=True)
        return torch.cat([_product(part, bank, prefix + name, "B", row, counts) for part, name in parts], -1)


class Pair(nn.Module):
    """Matrices A and B of one adapted matrix, or of this rank's experts, with a leading expert dimension."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(a, requires_grad=False), nn.Parameter(b, requires_grad=False)


@dataclass(eq=False)
class Rows:
    """Buffer [N, P] of matrices whose gradients are summed over one group; one row per adapter in `slots`.

    places: {place: (offset in a row, shape)}. num_whole: number of leading elements of a row that every tensor-parallel rank
    holds.
    group: process group of the data-parallel ranks. gradients: [N, P] float32; empty if nothing is trained.
    """

    weights: Tensor
    slots: Sequence[int]
    places: Mapping[Place, tuple[int, tuple[int, ...]]]
    num_whole: int
    group: Any
    gradients: Tensor

    @classmethod
    def of(
        cls, shapes: Mapping[Place, tuple[int, ...]], slots: Sequence[int], group: Any, options: Mapping[str, Any]
    ) -> Rows:
        """Lay out a row with these matrices, and return rows of zeros, without gradients."""
        places, end, num_whole = dict[Place, tuple[int, tuple[int, ...]]](), 0, 0
        for place in sorted(shapes, key=lambda place: not is_whole(*place)):
            places[place] = end, shapes[place]
            end += _up(math.prod(shapes[place]), _ALIGNMENT)
            num_whole = end if is_whole(*place) else num_whole
        weights = torch.zeros(len(slots), _up(end, _ALIGNMENT * group.size()), **options)
        return cls(weights, slots, places, num_whole, group, weights.new_empty(0, dtype=torch.float32))

    def at(self, rows: Tensor, place: Place) -> Tensor:
        """Return the view [..., *shape] of a place in rows [..., P]."""
        offset, shape = self.places[place]
        return rows[..., offset : offset + math.prod(shape)].unflatten(-1, shape)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Bank:
    """A and B of all adapters of one base on this rank, which train together. An adapter's slot is its index.

    All adapters must be added before the first use, which moves them into buffers.

    Each adapter has a row of the dense buffer and, with the target experts, a row of the experts' buffer. A row has a place for
    each matrix. All adapters' A of a matrix are thus one tensor [N, ..., r, in], and their B [N, ..., out, r], views of the
    buffer. r is the largest rank; numbers beyond an adapter's own rank are 0, and so are their gradients.

        buffer     matrices                                          gradients are summed over
        dense      A of q, k, v, gate, up and B of o, down           DP and TP
                   B of q, k, v, gate, up and A of o, down           DP
        experts    A and B of experts                                the experts' DP
    """

    def __init__(self, *, is_trained: bool) -> None:
        self.adapters: list[Adapter] = []
        self.buffers: dict[bool, Rows] = {}  # By "has the matrices of experts".
        self._is_trained = is_trained

    def add(self, adapter: Adapter) -> int:
        """Add an adapter and return its slot."""
        assert not self.buffers, "adapters are added before the bank is used"
        self.adapters.append(adapter)
        return len(self.adapters) - 1

    def join(self) -> None:
        """Move the adapters' weights into buffers, of which their parameters become views. Later calls do nothing."""
        if self.buffers or not self.adapters:
            return
        shapes: dict[bool, dict[Place, tuple[int, ...]]] = {}
        for member in self.adapters:
            for name, letter, weight in member.matrices():
                place, _, num = _place(name, letter)
                shape = (*weight.shape[:-2], num, *weight.shape[-2:]) if letter == "A" else tuple(weight.shape)
                of_kind = shapes.setdefault(".experts." in name, {})
                of_kind[place] = tuple(map(max, shape, of_kind.get(place, shape)))  # Adapters may have different ranks.
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        for is_expert, of_kind in shapes.items():
            slots = list(range(len(self.adapters)))
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            if is_expert:  # Their rows may be large, so only adapters that target experts have one.
                slots = [slot for slot in slots if "experts" in self.adapters[slot].settings.targets]
                group = parallel_state.get_expert_data_parallel_group()
            self.buffers[is_expert] = Rows.of(of_kind, slots, group, options)
        for slot, member in enumerate(self.adapters):
            views = self.views(member, {kind: rows.weights[row] for kind, rows, row in self.rows_of(slot)})
            for (_, _, weight), view in zip(member.matrices(), views, strict=True):
                weight.data = view.copy_(weight.data)
        # Allocated last, when the adapters' own tensors are freed, to keep the peak of memory low.
        for rows in self.buffers.values() if self._is_trained else ():
            rows.gradients = torch.zeros_like(rows.weights, dtype=torch.float32)
        self.scales = torch.tensor([member.settings.scale for member in self.adapters], **options)

    def rows_of(self, slot: int) -> Iterator[tuple[bool, Rows, int]]:
        """Yield (True for the experts' buffer, buffer, the adapter's row in it)."""
        for kind, rows in self.buffers.items():
            if slot in rows.slots:
                yield kind, rows, rows.slots.index(slot)

    def views(self, adapter: Adapter, rows: Mapping[bool, Tensor]) -> Iterator[Tensor]:
        """Yield the adapter's matrices in the adapter's order, as views of one row [P] of each buffer."""
        for name, letter, weight in adapter.matrices():
            is_expert, (place, index, _) = ".experts." in name, _place(name, letter)
            view = self.buffers[is_expert].at(rows[is_expert], place)
            view = view.select(-3, index) if letter == "A" else view
            yield view[tuple(map(slice, weight.shape))]

    def weights(self, name: str, letter: str) -> Tensor:
        """Return all adapters' A [N, (E,) J, r, in] of J joined matrices, or B [N, (E,) out, r].

        name: name of the matrix; of joined matrices, the first.
        """
        rows = self.buffers[".experts." in name]
        return rows.at(rows.weights, (name, letter))

    def gradient(self, name: str, letter: str) -> Tensor:
        """Return the float32 gradient of the tensor that `weights` returns for the same arguments."""
        rows = self.buffers[".experts." in name]
        return rows.at(rows.gradients, (name, letter))


@dataclass(frozen=True)
class ActiveAdapters:
    """Adapters of a micro-batch, whose tokens are grouped by adapter in the order of their bank.

    slots: a range of the bank's slots that contains these adapters. counts: [slots] int64, number of tokens of each slot. own:
    the same counts for this tensor-parallel rank's tokens.
    """

    bank: Bank
    slots: slice
    counts: Tensor
    own: Tensor

    def adapt(self, name: str) -> bool:
        """Return True if one of the adapters adapts the matrix."""
        return any(name in adapter.pairs for adapter in self.bank.adapters[self.slots])

    def scaled(self, low: Tensor, *, is_own: bool = False) -> Tensor:
        """Multiply each row by its adapter's alpha / rank. is_own: the rows are this tensor-parallel rank's tokens."""
        first, *others = (adapter.settings.scale for adapter in self.bank.adapters[self.slots])
        if all(scale == first for scale in others):
            return low * first
        counts = self.own if is_own else self.counts
        return low * self.bank.scales[self.slots].repeat_interleave(counts, output_size=low.shape[0])[:, None]

    def product(self, x: Tensor, name: str, letter: str, *, is_own: bool = False) -> Tensor:
        """Multiply each row of x by its adapter's A or B.

        The backward pass adds to the bank's gradient. is_own: as in scaled.
        """
        return _product(x, self.bank, name, letter, self.slots, self.own if is_own else self.counts)


def _product(x: Tensor, bank: Bank, name: str, letter: str, row: slice | int, counts: Tensor) -> Tensor:
    """Multiply rows of x by the matrices in rows of the bank, or by the experts in one row.

    counts: number of rows of x for each matrix.
    """
    matrices, gradient = bank.weights(name, letter)[row], None
    if torch.is_grad_enabled():
        matrices, gradient = matrices.detach().requires_grad_(), bank.gradient(name, letter)[row]
    return grouped_linear(x.contiguous(), matrices, counts, main_grad=gradient)


class Adapter(MegatronModule):
    """This rank's part of an adapter. Construction is collective.

    Parameters have the names of mapping.adapter_units. pairs: {"layer.matrix": its A and B}, with layers counted over
    all stages. converter: reads and writes the adapter.
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
                pair = self.pairs[f"{number}.{name}"] = self._pair(name, out, into, rank)
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

    def matrices(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield (matrix, "A" or "B", its parameter)."""
        for name, pair in self.pairs.items():
            yield from ((name, "A", pair.lora_A), (name, "B", pair.lora_B))

    def _pair(self, name: str, out: int, into: int, rank: int) -> Pair:
        options = {"dtype": self.config.params_dtype, "device": torch.cuda.current_device()}
        tensor = self._base.layout.tensor
        if ".experts." in name:
            local = self.config.num_moe_experts // parallel_state.get_expert_model_parallel_group().size()
            return Pair(torch.empty(local, rank, into, **options), torch.empty(local, out, rank, **options))
        into, out = (into, out // tensor) if is_whole(name, "A") else (into // tensor, out)
        return Pair(torch.empty(rank, into, **options), torch.empty(out, rank, **options))

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
            elif not is_whole(*local_name.rsplit(".lora_", 1)):
                cuts.append((1 + local_name.endswith("A"), tensor_rank, self._base.layout.tensor))
                replica = (0, 0, data_rank)
            state[prefix + name] = ShardedTensor.from_rank_offsets(
                f"{prefix}decoder.layers.{local_name}", weight, *cuts, replica_id=replica, prepend_axis_num=1
            )
        return state


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

    A is uniform in [-b, b] with b = 1 / sqrt(in) (Kaiming with a = sqrt(5), as in PEFT); B is zero.
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
