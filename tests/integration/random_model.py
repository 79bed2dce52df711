"""Small models with random weights, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"intermediate_size": 96}),
    "qwen3moe": (
        "qwen3_moe",
        {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama": ("llama", {"intermediate_size": 96, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"intermediate_size": 96}),
}


def write_model(kind: str, folder: Path, **shape: int) -> Path:
    """A random qwen2, qwen3moe, llama with every bias, or mistral, hidden 64, made by transformers. shape: its vocab_size, and
    what is to be otherwise."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    name, others = _KINDS[kind]
    common: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "initializer_range": 0.08,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**common, **others, **shape}))
    with torch.no_grad():
        for _, parameter in model.named_parameters():  # norms of exactly 1 and biases of 0 would hide a lost tensor
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder
