"""A low-rank adapter (LoRA) of a model: its settings, its tensors by name, and its directory in PEFT's format.

Every adapted matrix W [out, in] computes W x + (alpha / rank) B (A x), with A [r, in], B [out, r]; r is `rank`, or `expert_rank`
in experts. Tensors are named as PEFT names them, without its prefix:

    model.layers.0.self_attn.q_proj.lora_A.weight [r, in]             model.layers.0.mlp.experts.3.up_proj.lora_B.weight [out, r]

Source: Hu et al., LoRA (arXiv 2106.09685), equation 3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from marsrl.rollout.config import Settings
from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.weights.layout import EngineShard, box_of, shard_layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Target = Literal["attention", "mlp", "experts"]
PEFT_PREFIX = "base_model.model."
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


class AdapterConfig(Settings):
    """policies.<name>.adapter: a pair of small matrices for each adapted one, trained in its place."""

    rank: int = Field(32, gt=0, le=512)
    """of each pair in attention and MLP; larger: more to learn with, slower"""
    expert_rank: int | None = Field(None, gt=0, le=512)
    """of each pair in an expert; default: rank over the experts that a token visits, at least 1"""
    alpha: float = Field(64.0, gt=0)
    """every pair's product is multiplied by alpha / rank; 2 x rank is usual"""
    targets: tuple[Target, ...] = Field(("attention", "mlp"), min_length=1)
    """matrices that get a pair: attention, mlp (MoE models have none), experts (of MoE models)"""
    start: str | None = None
    """PEFT directory whose numbers training starts from; default: A random, B zero, as the base"""

    @property
    def scale(self) -> float:
        """alpha / rank, of experts too: their alpha in PEFT's words is alpha x expert_rank / rank."""
        return self.alpha / self.rank

    def rank_in_experts(self, shape: ModelShape) -> int:
        """expert_rank, or its default for this model."""
        return self.expert_rank or max(1, self.rank // max(1, shape.experts_per_token))


def adapted(shape: ModelShape, adapter: AdapterConfig) -> dict[str, tuple[int, int, int]]:
    """{adapted matrix, "model.layers.0.self_attn.q_proj": (out, in, rank of its pair)}, in the order of the layers."""
    hidden, heads, kv = shape.hidden_size, shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    query, key, out = (heads, hidden), (kv, hidden), (hidden, heads)
    of_attention = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": out}
    up, down = (shape.ffn_size, hidden), (hidden, shape.ffn_size)
    of_mlp = {"gate_proj": up, "up_proj": up, "down_proj": down}
    found: dict[str, tuple[int, int, int]] = {}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        if "attention" in adapter.targets:
            found |= {f"{prefix}self_attn.{name}": (*size, adapter.rank) for name, size in of_attention.items()}
        if "mlp" in adapter.targets and not shape.num_experts:
            found |= {f"{prefix}mlp.{name}": (*size, adapter.rank) for name, size in of_mlp.items()}
        if "experts" in adapter.targets:
            rank = adapter.rank_in_experts(shape)
            for expert in range(shape.num_experts):
                found |= {f"{prefix}mlp.experts.{expert}.{name}": (*size, rank) for name, size in of_mlp.items()}
    return found


def tensor_shapes(shape: ModelShape, adapter: AdapterConfig) -> dict[str, tuple[int, int]]:
    """{tensor of the adapter, without PEFT's prefix: its shape}."""
    found: dict[str, tuple[int, int]] = {}
    for name, (out, into, rank) in adapted(shape, adapter).items():
        found |= {f"{name}.lora_A.weight": (rank, into), f"{name}.lora_B.weight": (out, rank)}
    return found


def why_not_start(folder: Path, adapter: AdapterConfig, *, is_split: bool = True) -> str | None:
    """None where training can start from the numbers of this PEFT directory, else the reason; its tensors are not looked at.

    is_split: a pair for each expert is needed.
    """
    key = f"adapter.start is {folder}"
    if not (folder / CONFIG).is_file() or not (folder / TENSORS).is_file():
        return f"{key}, which has no {CONFIG} or no {TENSORS}; expected a PEFT directory"
    told = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if told.get("peft_type") != "LORA" or any(told.get(name) for name in ("use_dora", "use_rslora", "modules_to_save")):
        return f"{key}, which is no plain LoRA: DoRA, rsLoRA and whole modules (modules_to_save) are not trained"
    if is_split and told.get("target_parameters"):
        return (
            f"{key}, which has one pair for all experts of a layer (PEFT's target_parameters); "
            f"`marsrl export {folder} NEW` writes a pair for each: start from that"
        )
    ranks, alphas = told.get("rank_pattern") or {}, told.get("alpha_pattern") or {}
    for pattern in (None, *{**ranks, **alphas}):
        scale = alphas.get(pattern, told["lora_alpha"]) / ranks.get(pattern, told["r"])
        if not math.isclose(scale, adapter.scale):
            of = f"of {pattern} " if pattern else ""
            return (
                f"{key}, {of}made with alpha / rank = {scale:g}; here adapter.alpha / adapter.rank is {adapter.scale:g}"
            )
    return None


def write_adapter(
    folder: Path, shape: ModelShape, adapter: AdapterConfig, tensors: Mapping[str, Tensor], base: str
) -> None:
    """Write a PEFT directory, which PEFT and vLLM read; `folder` exists. base: path of the model that it adapts."""
    from safetensors.torch import save_file  # here: configs are read without torch

    names = sorted({name.rsplit(".", 1)[-1] for name in adapted(shape, adapter)})
    in_experts = adapter.rank_in_experts(shape)
    has_experts = shape.num_experts > 0 and "experts" in adapter.targets
    ranks = {r".*\.experts\.\d+\.(gate|up|down)_proj": in_experts}
    # as PEFT calls experts' matrices with transformers 5, which has gate and up as one; the first pattern that fits counts
    ranks |= {r".*\.experts\.gate_up_proj": 2 * in_experts, r".*\.experts\.down_proj": in_experts}
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "rank_pattern": ranks if has_experts else {},
        "alpha_pattern": {name: adapter.scale * rank for name, rank in ranks.items()} if has_experts else {},
        "target_modules": names,
        "bias": "none",
        "inference_mode": True,
    }
    save_file({PEFT_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps(told, indent=1), encoding="utf-8")


def check_tensors(shape: ModelShape, adapter: AdapterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError where the tensors are not those of this adapter of this model."""
    expected = tensor_shapes(shape, adapter)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := [name for name in {**expected, **found} if found.get(name) != expected.get(name)]:
        name = wrong[0]
        raise ValueError(
            f"adapter: {len(wrong)} of {len(expected)} tensors are not those of this model and these settings, first {name}: "
            f"found {found.get(name, 'none')}, expected {expected.get(name, 'none')}"
        )


def held_by_shard(
    shape: ModelShape,
    adapter: AdapterConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    shard: EngineShard,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as a shard of an engine holds them: its part of A and of B alpha / rank, each in dtype.

    It cuts B's rows and A's columns as it cuts the adapted matrix. B is scaled in dtype, as vLLM does: with alpha / rank a power
    of two no number is rounded. Raises ValueError: the tensors are not those of this adapter of this model.
    """
    check_tensors(shape, adapter, tensors)
    matrices = adapted(shape, adapter)
    layout = shard_layout({f"{name}.weight": (out, into) for name, (out, into, _) in matrices.items()}, shard)
    for name, (out, into, rank) in matrices.items():
        stack, whole = box_of(f"{name}.weight", (out, into))
        box = whole.overlap(layout.needs[stack])
        if not box.num_elements:  # an expert of another shard
            continue
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        yield f"{name}.lora_A.weight", a[:, box.start[2] : box.end[2]].to(dtype)
        # of experts as a reader of alpha_pattern computes it, which may be another number in the last place
        scale = adapter.scale * rank / rank if ".experts." in name else adapter.scale
        yield f"{name}.lora_B.weight", b[box.start[1] : box.end[1]].to(dtype) * scale


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a PEFT directory by name, without PEFT's prefix."""
    from safetensors.torch import load_file

    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(folder / TENSORS).items()}
