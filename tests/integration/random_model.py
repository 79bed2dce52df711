"""Small models with random weights, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def write_model(kind: str, folder: Path, **shape: int) -> Path:
    """A random qwen2 or qwen3moe, hidden 64, made by transformers. shape: its vocab_size, and what is to be otherwise."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "initializer_range": 0.08,
        **shape,
    }  # fmt: skip
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(intermediate_size=96, **common))
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(head_dim=32, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, **common)
        )
    with torch.no_grad():
        for _, parameter in model.named_parameters():  # norms of exactly 1 and biases of 0 would hide a lost tensor
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder
