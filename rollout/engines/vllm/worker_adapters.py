"""Adapters in vLLM's workers: checksums of what the kernels hold, and patches of the CPU build of vLLM 0.32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from marsrl.rollout.adapter import read_tensors
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.layout import EngineShard


def held_checksums(manager: Any, number: int, path: str, shard: EngineShard) -> dict[str, int]:
    """Return {tensor: checksum of the held weight} of an adapter, named as in rollout.adapter.held_by_shard.

    manager: a worker's LoRAModelManager.
    number: id of the adapter in vLLM (LoRARequest.lora_int_id).
    path: the adapter's PEFT directory, from which its ranks are read.
    """
    ranks = {name: tensor.shape[0] for name, tensor in read_tensors(Path(path)).items() if ".lora_A." in name}
    slot, checksums = manager.lora_index_to_id.index(number), dict[str, int]()
    for module_name, module in manager.modules.items():
        for matrix, a, b in _pairs(module_name, module, manager, slot, shard):
            rank = ranks.get(f"{matrix}.lora_A.weight", 0)
            if a[rank:].any() or b[:, rank:].any():
                checksums[f"{matrix}.lora_B.weight beyond rank {rank}"] = checksum(b)
            if rank:
                checksums[f"{matrix}.lora_A.weight"] = checksum(a[:rank])
                checksums[f"{matrix}.lora_B.weight"] = checksum(b[:, :rank])
    return checksums


def _pairs(name: str, module: Any, manager: Any, slot: int, shard: EngineShard) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, A [r, in], B [out, r]) of a slot for each matrix fused into the module; r is the slot's rank."""
    if not hasattr(module, "w13_lora_a_stacked"):
        parts = manager.packed_modules.get(name, [name])
        for part, a, b in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            yield part, a[slot, 0], b[slot, 0]
        return
    stacked = {
        "gate": (module.w13_lora_a_stacked[0], module.w13_lora_b_stacked[0]),
        "up": (module.w13_lora_a_stacked[1], module.w13_lora_b_stacked[1]),
        "down": (module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0]),
    }
    for part, (a, b) in stacked.items():
        for place, expert in enumerate(shard.experts(module.global_num_experts)):
            yield f"{name}.{expert}.{part}_proj", a[slot, place], b[slot, place]


def repair_mixed_batches() -> None:
    """Patch vLLM's CPU kernels for batches that mix tokens with and without adapters.

    The replacements compute one GEMM for consecutive tokens of one adapter.

    vLLM 0.32 indexes A and B by each token's slot, which is -1 without an adapter: in a mixed batch, such tokens get the last
    slot's adapter (lora/ops/torch_ops/lora_ops.py). vLLM's GPU kernels skip these tokens.
    """
    from vllm.lora.punica_wrapper import punica_cpu

    cpu: Any = punica_cpu
    cpu.sgmv_shrink, cpu.sgmv_expand_slice = _shrink, _expand


def _ranges(lengths: Tensor, slots: Tensor) -> Iterator[tuple[slice, int]]:
    """Yield (rows, slot) of each run of tokens with an adapter."""
    start = 0
    for length, slot in zip(lengths.tolist(), slots.tolist(), strict=True):
        if slot >= 0:
            yield slice(start, start + length), slot
        start += length


def _shrink(x: Tensor, a: Tensor, out: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor, *sizes: Any) -> None:
    """Compute out [T, r] = scale x A^T by each token's slot, 0 without one; a [slots, 1, r, in]. sizes ends with the scale."""
    out.zero_()
    for rows, slot in _ranges(lengths, slots):
        out[rows] = sizes[-1] * (x[rows].to(out.dtype) @ a[slot, 0].to(out.dtype).T)


def _expand(x: Tensor, b: Tensor, out: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor, *sizes: Any) -> None:
    """Compute out [T, ..] += x [T, r] B^T in some columns, by each token's slot; b [slots, 1, columns, r].

    sizes: batches, longest, tokens, first column, columns, whether to add.
    """
    *_, first, columns, adds = sizes
    for rows, slot in _ranges(lengths, slots):
        view, delta = out[rows, first : first + columns], x[rows].to(out.dtype) @ b[slot, 0].to(out.dtype).T
        view.copy_(view + delta if adds else delta)


@contextmanager
def experts_without_adapters() -> Iterator[None]:
    """Inside the block, make vLLM use its CPU kernel for MoE layers despite adapters. Experts then cannot have adapters.

    With adapters vLLM 0.32 selects Triton's kernel on any platform (fused_moe/oracle/unquantized.py).
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    method: Any = unquantized_fused_moe_method
    select = method.select_unquantized_moe_backend

    def without_adapters(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config)

    method.select_unquantized_moe_backend = without_adapters
    try:
        yield
    finally:
        method.select_unquantized_moe_backend = select
