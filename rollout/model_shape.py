"""Shape of a Hugging Face model directory, from its validated config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class _Family:
    """Properties of one architecture, taken from transformers' modeling files.

    biases_by: {key of config.json: the ModelShape fields that it sets}. fixed: {key: the only supported value, also
    its default}; only vLLM reads some of these keys. sliding_window: default of config.json's sliding_window; None: the
    architecture has no sliding window.
    """

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    is_moe: bool = False
    sliding_window: int | None = None
    biases_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)


_FAMILIES = {
    "Qwen2ForCausalLM": _Family(has_qkv_bias=True),
    "Qwen3ForCausalLM": _Family(has_qk_norm=True, fixed={"attention_bias": False}),
    "Qwen3MoeForCausalLM": _Family(
        has_qk_norm=True,
        is_moe=True,
        fixed={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "LlamaForCausalLM": _Family(
        biases_by={"attention_bias": ("has_qkv_bias", "has_proj_bias"), "mlp_bias": ("has_mlp_bias",)},
        fixed={"bias": False, "qkv_bias": False},
    ),
    "MistralForCausalLM": _Family(
        sliding_window=4096, fixed={"attention_bias": False, "mlp_bias": False, "llama_4_scaling": None}
    ),
}
# Values required in all families.
_FIXED = {"hidden_act": "silu", "use_sliding_window": False, "partial_rotary_factor": 1.0}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaled rotary frequencies (rope type llama3); see engines/local/model.py."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: float


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama, Mistral, Qwen2.5, Qwen3 or Qwen3-MoE model. num_experts 0: a dense model with MLP width ffn_size.

    max_positions: maximum sequence length; at most the sliding window, within which attention is plain causal attention.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int  # MLP width; in MoE models, the width of one expert
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    num_experts: int = 0
    experts_per_token: int = 0
    normalises_top_k: bool = True  # router weights of the chosen experts sum to 1
    has_proj_bias: bool = False  # bias of the attention's output projection
    has_mlp_bias: bool = False
    rope_scaling: RopeScaling | None = None

    def settings(self) -> dict[str, float]:
        """Return settings that change results but no tensor, so that checksums of the weights cannot detect a difference."""
        router = {"experts_per_token": self.experts_per_token, "normalises_top_k": self.normalises_top_k}
        scaling = asdict(self.rope_scaling) if self.rope_scaling else {}
        return {
            "rope_theta": self.rope_theta,
            "norm_eps": self.norm_eps,
            "has_qk_norm": self.has_qk_norm,
            **{f"rope_{name}": value for name, value in scaling.items()},
            **(router if self.num_experts else {}),
        }


def read_shape(model_dir: str | Path, *, needs_weights: bool = True) -> ModelShape:
    """Read model_dir/config.json. needs_weights: also check that all weight files exist.

    Raises:
        ValueError: no directory, config.json or weight files, or an unsupported architecture or option; names the file
            or key, and what is supported.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        hub = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(model_dir)):
            hub = f"; to download it: hf download {model_dir} --local-dir {folder.name}"
        raise ValueError(f"model: {folder} is not a directory; expected a Hugging Face checkpoint directory{hub}")
    if (folder / "adapter_config.json").is_file():  # rejected, because transformers would load the adapter and its base
        raise ValueError(
            f"model: {folder} contains an adapter (adapter_config.json); expected a whole model: set `model` to the adapter's "
            "base and adapter.start to the adapter, or remove adapter_config.json if the weights here are whole"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model: {folder} has no config.json; found {_listing(folder)}; expected a Hugging Face checkpoint directory"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model: {path} is not JSON ({error}); download it again") from error
    shape = _shape(config, path)  # checked first: for an unsupported model other errors are irrelevant
    if needs_weights:
        weight_files(folder)
    return shape


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model directory. Raises ValueError if it has none, or lacks a file of its index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"model: {index} is not an index of weight files ({error!r}); download it again"
            ) from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"model: {folder} is incomplete: {index.name} names {len(names)} files, missing: {', '.join(missing)}; "
                "download it again"
            )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(
            f"model: {folder} has neither model.safetensors nor {index.name}; found {_listing(folder)}. Weights in "
            "pickle files (pytorch_model.bin) are not supported: convert them to safetensors"
        )
    return [single]


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "nothing"


def _shape(config: dict[str, Any], path: Path) -> ModelShape:
    architectures = config.get("architectures") or ["none"]
    architecture = str(architectures[0])
    if architecture not in _FAMILIES:
        supported = ", ".join(_FAMILIES)
        raise ValueError(f"model: {path}: architecture {architecture} is not supported; supported: {supported}")
    family = _FAMILIES[architecture]
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = _rope_scaling(rope, path)
    for name, value in {**_FIXED, **family.fixed}.items():
        _only(path, name, value if config.get(name) is None else config[name], (value,))
    biases = {each: bool(config.get(name)) for name, fields in family.biases_by.items() for each in fields}

    def key(*names: str) -> int:
        found = next((config[name] for name in names if name in config), None)
        if not isinstance(found, int):
            raise ValueError(f"model: {path}: {' or '.join(names)} is {found!r}, expected an integer")
        return found

    heads, positions = key("num_attention_heads"), key("max_position_embeddings")
    window = config.get("sliding_window", family.sliding_window) if family.sliding_window else None
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError(f"model: {path} has no rope_theta (nor rope_parameters.rope_theta)")
    return ModelShape(
        architecture=architecture,
        num_layers=key("num_hidden_layers"),
        hidden_size=key("hidden_size"),
        num_heads=heads,
        num_kv_heads=key("num_key_value_heads"),
        head_size=int(config.get("head_dim") or key("hidden_size") // heads),
        ffn_size=key("moe_intermediate_size") if family.is_moe else key("intermediate_size"),
        vocab_size=key("vocab_size"),
        max_positions=min(positions, window or positions),
        rope_theta=float(theta),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_qk_norm=family.has_qk_norm,
        num_experts=key("num_experts", "num_local_experts") if family.is_moe else 0,
        experts_per_token=key("num_experts_per_tok") if family.is_moe else 0,
        normalises_top_k=bool(config.get("norm_topk_prob", False)),
        rope_scaling=scaling,
        **{"has_qkv_bias": family.has_qkv_bias, **biases},
    )


def _rope_scaling(rope: Mapping[str, Any], path: Path) -> RopeScaling | None:
    """Read rope scaling; None for unscaled frequencies."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    _only(path, "rope type", kind, ("default", "llama3"))
    if kind == "default":
        return None
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values: list[Any] = [rope.get(key) for key in keys]
    if not all(isinstance(value, int | float) for value in values) or values[1] >= values[2]:
        found = ", ".join(f"{key} {value}" for key, value in zip(keys, values, strict=True))
        raise ValueError(
            f"model: {path}: rope type llama3 has {found}; expected four numbers, with low_freq_factor below high_freq_factor"
        )
    return RopeScaling(*map(float, values))


def _only(path: Path, name: str, value: object, supported: tuple[object, ...]) -> None:
    if value not in supported:
        raise ValueError(f"model: {path}: {name} is {value!r}; supported: {', '.join(map(repr, supported))}")
