"""The shape of a Qwen2.5 / Qwen3 / Qwen3-MoE model, read from its HF config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model; num_experts 0 = dense everywhere, otherwise moe_layers says which layers have experts."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    has_qk_norm: bool
    is_tied: bool
    num_experts: int
    experts_per_token: int
    renormalises: bool  # the chosen experts' weights sum to 1
    moe_layers: tuple[bool, ...]


def read_shape(model_dir: str | Path) -> ModelShape:
    """The shape that config.json states.

    Raises:
        ValueError: the file is missing, or the architecture, its rotary scaling or its attention window is not
        supported.
    """
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"model: {path} is missing; expected an HF model directory")
    config: dict[str, Any] = json.loads(path.read_text())
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED:
        raise ValueError(
            f"model: {path} is of architecture {architecture}; the local engine supports {', '.join(SUPPORTED)}"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"model: {path} scales rotary positions by {kind!r}; the local engine supports the default only"
        )
    if config.get("use_sliding_window"):
        raise ValueError(f"model: {path} has use_sliding_window true; the local engine attends to everything")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"model: {path} has hidden_act {config['hidden_act']!r}; the local engine supports silu")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    named = config.get("num_experts", config.get("num_local_experts", 0))  # transformers 5 writes the second name
    experts = named if architecture == "Qwen3MoeForCausalLM" else 0
    dense = set(config.get("mlp_only_layers") or ())
    every = config.get("decoder_sparse_step", 1)
    return ModelShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        has_qk_norm=architecture != "Qwen2ForCausalLM",
        is_tied=bool(config.get("tie_word_embeddings", False)),
        num_experts=experts,
        experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
        renormalises=bool(config.get("norm_topk_prob", False)),
        moe_layers=tuple(bool(experts) and i not in dense and (i + 1) % every == 0 for i in range(layers)),
    )
