"""A directory that looks like a published model: config.json, and weight files with only headers."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from marsrl.rollout.agents.byte_tokenizer import write_byte_tokenizer
from marsrl.rollout.model_shape import ModelShape, read_shape
from marsrl.trainer.learner.megatron.mapping import hf_shapes, units

SHARD_BYTES = 2 << 30


def save_published(shape: ModelShape, folder: Path) -> Path:
    """Write the directory, with a byte tokenizer. The tensors are holes in the file, which take no space on the disk."""
    is_moe = shape.num_experts > 0
    config: dict[str, Any] = {
        "architectures": [shape.architecture],
        "model_type": "qwen3_moe" if is_moe else "qwen3",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "moe_intermediate_size" if is_moe else "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.is_tied,
        "torch_dtype": "bfloat16",
    }
    if is_moe:
        config |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "norm_topk_prob": True,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_headers(read_shape(folder, needs_weights=False), folder)
    write_byte_tokenizer(folder)
    return folder


def _write_headers(shape: ModelShape, folder: Path) -> None:
    """Write several files of a few GB each, as published models have.

    A small machine could not map a single large file.
    """
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    num_bytes = 0
    for unit in units(shape, 1):
        for name, size in zip(unit.hf, hf_shapes(shape, unit), strict=True):
            if num_bytes > SHARD_BYTES:
                shards.append({})
                num_bytes = 0
            shards[-1][name] = size
            num_bytes += 2 * prod(size)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(shard, folder / name)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def _write_shard(shard: dict[str, tuple[int, ...]], path: Path) -> None:
    header, at = {}, 0
    for name, size in shard.items():
        end = at + 2 * prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
