"""Random Qwen3-MoE models as Hugging Face directories, which transformers, vLLM and the trainer load."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from marsrl.rollout.agents.byte_tokenizer import write_byte_tokenizer
from marsrl.rollout.agents.render import load_tokenizer
from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.tasks.registry import TOKENIZERS
from marsrl.trainer.learner.megatron.mapping import hf_shapes, units

INIT_STD = 0.05


SMALL = ModelShape(
    "Qwen3MoeForCausalLM", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_size=32, ffn_size=48, vocab_size=0,
    max_positions=1024, rope_theta=10000.0, norm_eps=1e-6, is_tied=False, has_qkv_bias=False, has_qk_norm=True,
    num_experts=8, experts_per_token=2,
)  # fmt: skip
"""Shape for tests. vLLM on a CPU needs an expert's ffn_size to be a multiple of 32, and a head_size of at least 32. vocab_size is
the number of embedding rows; 0: one per token of the tokenizer."""

SHAPES = {
    "tiny": replace(SMALL, num_experts=4, ffn_size=32, max_positions=32768),
    "cpu_default": replace(SMALL, num_layers=3, hidden_size=96, ffn_size=64),
    "bench": replace(  # benchmarks/train_step.py
        SMALL,
        num_layers=4,
        hidden_size=256,
        num_heads=8,
        ffn_size=128,
        vocab_size=8192,
        num_experts=16,
        experts_per_token=4,
    ),
}


def init_model(
    shape: str | ModelShape,
    tokenizer: str | Path,
    out: str | Path,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Path:
    """Write the directory `out` and return it: weights, config, generation_config, tokenizer with chat template.

    tokenizer: "bytes", "arithmetic", "facts", "calls", or a Hugging Face directory whose tokenizer is copied. Matrices are normal
    with std 0.05; those that write into the residual stream (o_proj, down_proj) are scaled by 1 / sqrt(2 layers). The same seed
    gives the same weights.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"init: shape is {shape!r}; expected one of {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"init: {out} exists and is not an empty directory; name a new directory")
    out.mkdir(parents=True, exist_ok=True)
    vocab_size, eos_id, pad_id = _write_tokenizer(tokenizer, out)
    if shape.vocab_size:
        if shape.vocab_size < vocab_size:
            raise ValueError(
                f"init: the tokenizer has {vocab_size} tokens, but the shape's vocabulary is {shape.vocab_size}"
            )
        vocab_size = shape.vocab_size
    shape, torch_dtype = replace(shape, vocab_size=vocab_size), getattr(torch, dtype)
    weights = {name: tensor.to(torch_dtype) for name, tensor in _weights(shape, seed)}
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    _write_config(shape, eos_id, pad_id, dtype, out)
    return out


def _write_tokenizer(tokenizer: str | Path, out: Path) -> tuple[int, int, int]:
    """Write the tokenizer; return (vocabulary size including unused ids, id of the end token, id of the padding token)."""
    if tokenizer == "bytes":
        write_byte_tokenizer(out)
    elif tokenizer in TOKENIZERS:
        TOKENIZERS[str(tokenizer)].write(out)
    elif Path(tokenizer).is_dir():
        load_tokenizer(Path(tokenizer)).save_pretrained(str(out))
    else:
        raise ValueError(
            f"init: tokenizer is {str(tokenizer)!r}; expected bytes, arithmetic, facts, calls or a Hugging Face directory"
        )
    loaded = load_tokenizer(out)
    if loaded.eos_token_id is None:
        raise ValueError(f"init: the tokenizer of {tokenizer} names no eos_token; set it in tokenizer_config.json")
    pad_id = loaded.pad_token_id if loaded.pad_token_id is not None else loaded.eos_token_id
    return 1 + max(loaded.get_vocab().values()), int(loaded.eos_token_id), int(pad_id)


def _weights(shape: ModelShape, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, float32 tensor) in the order of sampling."""
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * shape.num_layers)
    for unit in units(shape, num_stages=1):
        for name, size in zip(unit.hf, hf_shapes(shape, unit), strict=True):
            if name.endswith("norm.weight"):
                yield name, torch.ones(size)
            else:
                std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else INIT_STD
                yield name, torch.randn(size, generator=generator) * std


def _write_config(shape: ModelShape, eos_id: int, pad_id: int, dtype: str, out: Path) -> None:
    """Write config.json, with all values that differ from Qwen3MoeConfig's defaults; importing that class would take 2 s."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size * shape.experts_per_token,  # Size of dense layers; the model has none.
        "moe_intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": True,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "initializer_range": INIT_STD,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
    }
    generation = {"eos_token_id": eos_id, "pad_token_id": pad_id, "do_sample": True, "temperature": 1.0}
    for name, values in (("config", config), ("generation_config", generation)):
        (out / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", "utf-8")
