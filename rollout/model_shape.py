"""The shape of a Hugging Face model directory: what config.json says, checked, in our words."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen2.5, Qwen3 or Qwen3-MoE model. num_experts 0: dense, ffn_size is its MLP's width."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int  # of one expert where there are experts
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

    def settings(self) -> dict[str, float]:
        """Settings that change the numbers but no tensor's name or shape: checksums do not tell them apart."""
        router = {"experts_per_token": self.experts_per_token, "normalises_top_k": self.normalises_top_k}
        return {
            "rope_theta": self.rope_theta,
            "norm_eps": self.norm_eps,
            "has_qk_norm": self.has_qk_norm,
            **(router if self.num_experts else {}),
        }


def read_shape(model_dir: str | Path, *, needs_weights: bool = True) -> ModelShape:
    """The shape that model_dir/config.json describes; the weight files that it needs are there (needs_weights).

    Raises:
        ValueError: no directory, no config.json, no or missing weight files, an architecture or an option that is not
            supported; with the name of the file or key, and what is supported.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        hub = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(model_dir)):
            hub = f" (nothing is downloaded; to get it: hf download {model_dir} --local-dir {folder.name})"
        raise ValueError(f"model: {folder} is not a directory; expected a Hugging Face checkpoint directory{hub}")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model: {folder} has no config.json; found {_listing(folder)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model: {path} is not JSON: {error}") from error
    shape = _shape(config, path)  # first: of an unsupported model it does not matter what else is missing
    if needs_weights:
        weight_files(folder)
    return shape


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model directory, all of which exist.

    Raises:
        ValueError: there are none, or some that the index names are missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"model: {folder} is half there: {index.name} names {len(names)} files, missing: {', '.join(missing)}; "
                "download it again"
            )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(
            f"model: {folder} has neither model.safetensors nor {index.name}; found {_listing(folder)}. Weights in "
            "pickle files (pytorch_model.bin) are not read: convert them to safetensors"
        )
    return [single]


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "nothing"


def _shape(config: dict[str, Any], path: Path) -> ModelShape:
    found = config.get("architectures") or ["none"]
    architecture = str(found[0])
    if architecture not in SUPPORTED:
        supported = ", ".join(SUPPORTED)
        raise ValueError(f"model: {path}: architecture {architecture} is not supported; supported: {supported}")
    is_moe = architecture == "Qwen3MoeForCausalLM"
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    _only(path, "rope type", scaling.get("rope_type", scaling.get("type", "default")), ("default",))
    _only(path, "hidden_act", config.get("hidden_act", "silu"), ("silu",))
    _only(path, "use_sliding_window", bool(config.get("use_sliding_window")), (False,))
    if not is_qwen2:
        _only(path, "attention_bias", bool(config.get("attention_bias")), (False,))
    if is_moe:
        _only(path, "decoder_sparse_step", config.get("decoder_sparse_step", 1), (1,))
        _only(path, "mlp_only_layers", list(config.get("mlp_only_layers") or []), ([],))

    def key(*names: str) -> int:
        found = next((config[name] for name in names if name in config), None)
        if not isinstance(found, int):
            raise ValueError(f"model: {path}: {' or '.join(names)} is {found!r}, expected an integer")
        return found

    heads = key("num_attention_heads")
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
        ffn_size=key("moe_intermediate_size") if is_moe else key("intermediate_size"),
        vocab_size=key("vocab_size"),
        max_positions=key("max_position_embeddings"),
        rope_theta=float(theta),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=is_qwen2,
        has_qk_norm=not is_qwen2,
        num_experts=key("num_experts", "num_local_experts") if is_moe else 0,
        experts_per_token=key("num_experts_per_tok") if is_moe else 0,
        normalises_top_k=bool(config.get("norm_topk_prob", False)),
    )


def _only(path: Path, name: str, found: object, supported: tuple[object, ...]) -> None:
    if found not in supported:
        raise ValueError(f"model: {path}: {name} is {found!r}; supported: {', '.join(map(repr, supported))}")
