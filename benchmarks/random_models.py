"""Small random models of each family, for parity.py and probe.py, and a tokenizer of Qwen's size."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from marsrl.rollout.agents.byte_tokenizer import write_byte_tokenizer

VOCABULARY = 151_643  # size of Qwen's vocabulary without control tokens

_ROPE = {"rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "moe": ("qwen3_moe", _EXPERTS),
    "llama": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 64, **_ROPE},
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
}
"""{name: (model_type of transformers, the model's config without sizes)}"""


def write_model(kind: str, layers: int, folder: Path, **sizes: int) -> Path:
    """Write a model of width 64 whose vectors (norms, biases) are perturbed by 0.1. sizes: replace sizes of the config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    name, sizes_of_family = FAMILIES[kind]
    shape: dict[str, Any] = {
        "vocab_size": 160, "hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 256,
        "initializer_range": 0.05, "tie_word_embeddings": False,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**shape, **sizes_of_family, **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def write_large_tokenizer(folder: str) -> None:
    """Write a tokenizer of the size of Qwen's. It encodes each byte as one token, and can decode every id."""
    rng, pieces = random.Random(0), dict[str, None]()
    while len(pieces) < VOCABULARY - 256:
        piece = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7)))
        pieces[rng.choice(("", "\u0120")) + piece] = None
    write_byte_tokenizer(folder, pieces)
