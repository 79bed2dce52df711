"""A low-rank adapter (LoRA) of a model: its settings, its tensors by name, and its directory in PEFT's format.

Every adapted matrix W [out, in] computes W x + (alpha / rank) B (A x), with A [r, in] and B [out, r]. r is `rank`, or
`expert_rank` in experts. Tensors have PEFT's names without its prefix:

    model.layers.0.self_attn.q_proj.lora_A.weight [r, in]             model.layers.0.mlp.experts.3.up_proj.lora_B.weight [out, r]

Source: Hu et al., LoRA (arXiv 2106.09685), equation 3.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

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
_DTYPES = ("BF16", "F16", "F32")  # names of dtypes in safetensors files
_MERGE = "merge it into its model with PEFT (merge_and_unload) and set `model` to the result"

# Keys of adapter_config.json (PEFT 0.21) and the values for which PEFT computes W x + (alpha / rank) B (A x), as verified with
# PEFT's models. A key that is neither here nor in _BESIDE_TENSORS must be null, false or empty.
_PLAIN: Mapping[str, Sequence[object]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # With these values of init_lora_weights W stays as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA would subtract B A from W.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "mica", "eva"),
}
_BESIDE_TENSORS = frozenset({
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_parameters",  # checked against the tensors
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",  # the tensors' names decide instead
    "lora_dropout", "inference_mode", "ensure_weight_tying",  # no effect on tensors
    "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "runtime_config", "megatron_core",
    # PEFT reads these only with certain values of init_lora_weights or use_qalora, which are rejected.
    "eva_config", "corda_config", "lora_ga_config", "loftq_config", "qalora_group_size",
})  # fmt: skip


class AdapterConfig(Settings):
    """policies.<name>.adapter: pairs of small matrices, trained in place of the matrices that they adapt."""

    rank: int = Field(32, gt=0, le=512)
    """rank of each pair in attention and MLP; larger: more capacity, slower"""
    expert_rank: int | None = Field(None, gt=0, le=512)
    """rank of each pair in an expert; default: rank divided by the experts per token, at least 1"""
    alpha: float = Field(64.0, gt=0)
    """each pair's product is multiplied by alpha / rank; 2 x rank is usual"""
    targets: tuple[Target, ...] = Field(("attention", "mlp"), min_length=1)
    """matrices that get a pair: attention, mlp (dense models only), experts (MoE models only)"""
    start: str | None = None
    """PEFT directory that training starts from; rejected unless all of it can be used (docs/adapters.md); default: random A,
    zero B"""

    @property
    def scale(self) -> float:
        """alpha / rank. Experts have the same scale, so their PEFT lora_alpha is alpha x expert_rank / rank."""
        return self.alpha / self.rank

    def rank_in_experts(self, shape: ModelShape) -> int:
        """Return expert_rank, or its default for this model."""
        return self.expert_rank or max(1, self.rank // max(1, shape.experts_per_token))


def adapted(shape: ModelShape, adapter: AdapterConfig) -> dict[str, tuple[int, int, int]]:
    """Return {adapted matrix: (out, in, rank of its pair)} in layer order, for "model.layers.0.self_attn.q_proj" and so on."""
    hidden, heads, kv = shape.hidden_size, shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    query, key, out = (heads, hidden), (kv, hidden), (hidden, heads)
    of_attention = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": out}
    up, down = (shape.ffn_size, hidden), (hidden, shape.ffn_size)
    of_mlp = {"gate_proj": up, "up_proj": up, "down_proj": down}
    matrices: dict[str, tuple[int, int, int]] = {}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        if "attention" in adapter.targets:
            matrices |= {f"{prefix}self_attn.{name}": (*size, adapter.rank) for name, size in of_attention.items()}
        if "mlp" in adapter.targets and not shape.num_experts:
            matrices |= {f"{prefix}mlp.{name}": (*size, adapter.rank) for name, size in of_mlp.items()}
        if "experts" in adapter.targets:
            rank = adapter.rank_in_experts(shape)
            for expert in range(shape.num_experts):
                matrices |= {f"{prefix}mlp.experts.{expert}.{name}": (*size, rank) for name, size in of_mlp.items()}
    return matrices


def tensor_shapes(shape: ModelShape, adapter: AdapterConfig) -> dict[str, tuple[int, int]]:
    """Return {name of an adapter tensor, without PEFT's prefix: its shape}."""
    found: dict[str, tuple[int, int]] = {}
    for name, (out, into, rank) in adapted(shape, adapter).items():
        found |= {f"{name}.lora_A.weight": (rank, into), f"{name}.lora_B.weight": (out, rank)}
    return found


def peft_settings(folder: Path, *, is_split: bool = True) -> dict[str, Any]:
    """Read adapter_config.json of a PEFT directory with plain pairs A, B.

    is_split: require a separate pair for each expert.

    Raises ValueError if a file is missing, or a setting requires more than plain pairs.
    """
    key = f"adapter.start is {folder}"
    if not (folder / TENSORS).is_file() and (folder / "adapter_model.bin").is_file():
        raise ValueError(
            f"{key}, which has adapter_model.bin but no {TENSORS}; pickle files are not supported: convert it with PEFT "
            "(PeftModel.from_pretrained, then save_pretrained)"
        )
    if not (folder / CONFIG).is_file() or not (folder / TENSORS).is_file():
        raise ValueError(f"{key}, which lacks {CONFIG} or {TENSORS}; expected a PEFT directory with both")
    try:
        settings: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        lacks = {"peft_type", "r", "lora_alpha", "target_modules"} - settings.keys()
        numbers = [
            *({} if lacks else (settings["r"], settings["lora_alpha"])),
            *(settings.get("rank_pattern") or {}).values(),
            *(settings.get("alpha_pattern") or {}).values(),
        ]
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{key}: {CONFIG} cannot be read ({error}); expected a JSON object") from error
    if lacks or not all(isinstance(number, int | float) and number > 0 for number in numbers):
        raise ValueError(
            f"{key}: {CONFIG} does not describe a LoRA adapter; expected peft_type, target_modules, and positive r, lora_alpha "
            "and values of rank_pattern and alpha_pattern"
        )
    if is_split and settings.get("target_parameters"):
        raise ValueError(
            f"{key}, which has one pair for all experts of a layer (PEFT's target_parameters); expected a pair for each "
            f"expert: start from the output of `marsrl export {folder} NEW`"
        )
    wrong = {
        name: value
        for name, value in settings.items()
        if (value not in _PLAIN[name] if name in _PLAIN else name not in _BESIDE_TENSORS and value)
    }
    if wrong:
        advice = f"{_MERGE}, or train plain LoRA"
        if "init_lora_weights" in wrong:
            advice = f"convert it (PEFT's path_initial_model_for_weight_conversion), {advice}"
        elif wrong.keys() == {"use_rslora"} and not settings.get("rank_pattern"):
            alpha = settings["lora_alpha"] * math.sqrt(settings["r"])
            advice = f"set use_rslora to false and lora_alpha to {alpha:g} in that file, which gives the same adapter"
        values = ", ".join(f"{name} {json.dumps(value)}" for name, value in wrong.items())
        raise ValueError(f"{key}: {CONFIG} has {values}; expected plain pairs A, B: {advice}")
    return settings


def peft_pair(peft_config: Mapping[str, Any], matrix: str) -> tuple[int, float]:
    """Return (rank, alpha / rank) of a matrix according to adapter_config.json.

    As in PEFT, the first pattern that matches the end of the matrix's name applies."""

    def first_match(patterns: str, default: str) -> Any:
        matches = (
            value for key, value in (peft_config.get(patterns) or {}).items() if re.match(rf"(.*\.)?({key})$", matrix)
        )
        return next(matches, peft_config[default])

    rank = first_match("rank_pattern", "r")
    return rank, first_match("alpha_pattern", "lora_alpha") / rank


def check_start(folder: Path, shape: ModelShape, adapter: AdapterConfig) -> None:
    """Raise ValueError, naming the mismatch, unless the PEFT directory fits the adapter completely.

    The file must hold exactly the tensors of adapter.targets, with finite values and the policy's sizes, ranks and alpha / rank.
    Tensors are read one at a time.
    """
    from marsrl.rollout.weights.files import WeightFiles  # imported here: configs are read without torch

    settings, files = peft_settings(folder), WeightFiles(folder / TENSORS)
    key, targets = f"adapter.start is {folder}", f"adapter.targets=[{', '.join(adapter.targets)}]"
    expected = {PEFT_PREFIX + name: size for name, size in tensor_shapes(shape, adapter).items()}
    unused, missing = [name for name in files if name not in expected], [name for name in expected if name not in files]
    if unused or missing:
        reason = f"it has {_kinds(unused)} outside {targets}" if unused else f"it lacks {_kinds(missing)} of {targets}"
        present = targets_of(shape, adapter, (name.removeprefix(PEFT_PREFIX) for name in files))
        whole = tensor_shapes(shape, adapter.model_copy(update={"targets": present}))
        if {PEFT_PREFIX + name for name in whole} == set(files):
            advice = f"set adapter.targets=[{', '.join(present)}]"
        elif unused:
            advice = f"all of an adapter must be used: {_MERGE}, or train an adapter without these"
        else:
            advice = "every target matrix needs A and B: train an adapter with all of them, or omit adapter.start"
        raise ValueError(f"{key}: {reason}; {advice}")
    for name, size in expected.items():
        size_there, dtype = tuple(files.slice(name).get_shape()), files.slice(name).get_dtype()
        if size_there != size:
            in_experts, is_a = ".experts." in name, ".lora_A." in name
            rank = size_there[0 if is_a else 1] if len(size_there) == 2 else None
            advice = "the adapter belongs to another model"
            if rank and size_there == ((rank, size[1]) if is_a else (size[0], rank)):
                advice = f"set adapter.{'expert_rank' if in_experts else 'rank'}={rank}"
            raise ValueError(f"{key}: {name} has shape {list(size_there)}; this policy expects {list(size)}: {advice}")
        if dtype not in _DTYPES:
            raise ValueError(f"{key}: {name} is {dtype}; expected {', '.join(_DTYPES)}")
        if not files[name].isfinite().all():
            raise ValueError(
                f"{key}: {name} has NaN or infinite values; expected finite ones: use an earlier checkpoint"
            )
    scales = dict[float, str]()
    for matrix, (_, _, rank) in adapted(shape, adapter).items():
        config_rank, scale = peft_pair(settings, matrix)
        if config_rank != rank:
            raise ValueError(
                f"{key}: {CONFIG} gives {matrix} rank {config_rank}, but its tensors have rank {rank}; expected the same: "
                f"correct {CONFIG}"
            )
        scales.setdefault(scale, matrix)
    other = next((scale for scale in scales if not math.isclose(scale, adapter.scale)), None)
    if other is not None:
        advice = f"set adapter.alpha={other * adapter.rank:g}"
        if len(scales) > 1:
            found = ", ".join(f"{scale:g}" for scale in scales)
            advice = f"all matrices must have the same factor, but this adapter has {found}: {_MERGE}"
        raise ValueError(
            f"{key}: alpha / rank of {scales[other]} is {other:g}; expected adapter.alpha / adapter.rank = "
            f"{adapter.scale:g}: {advice}"
        )


def targets_of(shape: ModelShape, adapter: AdapterConfig, names: Iterable[str]) -> tuple[Target, ...]:
    """Return the targets that these tensors belong to."""
    found, parts = set(names), get_args(Target)
    own = {part: tensor_shapes(shape, adapter.model_copy(update={"targets": (part,)})) for part in parts}
    return tuple(part for part in parts if not found.isdisjoint(own[part]))


def _kinds(names: Iterable[str]) -> str:
    """Join names as text; names that differ only in layer and expert numbers are merged, with their count."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    return ", ".join(f"{kind} ({len(own)})" if len(own) > 1 else own[0] for kind, own in kinds.items())


def write_adapter(
    folder: Path, shape: ModelShape, adapter: AdapterConfig, tensors: Mapping[str, Tensor], base: str
) -> None:
    """Write a PEFT directory that PEFT and vLLM read; `folder` must exist. base: path of the adapted model."""
    from safetensors.torch import save_file  # imported here: configs are read without torch

    names = sorted({name.rsplit(".", 1)[-1] for name in adapted(shape, adapter)})
    in_experts = adapter.rank_in_experts(shape)
    has_experts = shape.num_experts > 0 and "experts" in adapter.targets
    ranks = {r".*\.experts\.\d+\.(gate|up|down)_proj": in_experts}
    # With transformers 5, PEFT treats experts' gate and up projections as one matrix. The first matching pattern applies.
    ranks |= {r".*\.experts\.gate_up_proj": 2 * in_experts, r".*\.experts\.down_proj": in_experts}
    settings = {
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
    (folder / CONFIG).write_text(json.dumps(settings, indent=1), encoding="utf-8")


def check_tensors(shape: ModelShape, adapter: AdapterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the names and shapes of the tensors match the model and the adapter's settings."""
    expected = tensor_shapes(shape, adapter)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := [name for name in {**expected, **shapes} if shapes.get(name) != expected.get(name)]:
        name = wrong[0]
        raise ValueError(
            f"adapter: {len(wrong)} of {len(expected)} tensors do not match the model and these settings ({_kinds(wrong)}); "
            f"first {name}: found {shapes.get(name, 'none')}, expected {expected.get(name, 'none')}"
        )


def held_by_shard(
    shape: ModelShape,
    adapter: AdapterConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    shard: EngineShard,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) as held by a shard of an engine: the shard's parts of A and of (alpha / rank) B, in dtype.

    B's rows and A's columns are split like the adapted matrix. As in vLLM, B is scaled in dtype, which is exact if alpha / rank
    is a power of two. Raises ValueError as check_tensors does.
    """
    check_tensors(shape, adapter, tensors)
    matrices = adapted(shape, adapter)
    layout = shard_layout({f"{name}.weight": (out, into) for name, (out, into, _) in matrices.items()}, shard)
    for name, (out, into, rank) in matrices.items():
        stack, whole = box_of(f"{name}.weight", (out, into))
        box = whole.overlap(layout.needs[stack])
        if not box.num_elements:  # this expert is on another shard
            continue
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        yield f"{name}.lora_A.weight", a[:, box.start[2] : box.end[2]].to(dtype)
        # For experts, compute alpha / rank in the same order of operations as readers of alpha_pattern do. Another order may
        # give another last bit.
        scale = adapter.scale * rank / rank if ".experts." in name else adapter.scale
        yield f"{name}.lora_B.weight", b[box.start[1] : box.end[1]].to(dtype) * scale


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a PEFT directory by name, without PEFT's prefix."""
    from safetensors.torch import load_file

    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(folder / TENSORS).items()}
