"""Shapes of published models, from their config.json files, for planning without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from marsrl.rollout.model_shape import ModelShape, RopeScaling, read_shape
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.supervised.tutors import tutor_of

_DENSE_8B = ModelShape(
    architecture="Qwen3ForCausalLM",
    num_layers=36,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    ffn_size=12288,
    vocab_size=151936,
    max_positions=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    is_tied=False,
    has_qkv_bias=False,
    has_qk_norm=True,
)


def _like(
    shape: ModelShape, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **others: Any
) -> ModelShape:
    return replace(
        shape, num_layers=layers, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, ffn_size=ffn, **others
    )


_MOE = {"architecture": "Qwen3MoeForCausalLM", "num_experts": 128, "experts_per_token": 8}
_MOE_30B = _like(_DENSE_8B, 48, 2048, 32, 4, 768, **_MOE)
_QWEN2 = replace(_DENSE_8B, architecture="Qwen2ForCausalLM", has_qkv_bias=True, has_qk_norm=False, max_positions=32768)
_QWEN25_7B = _like(_QWEN2, 28, 3584, 28, 4, 18944, vocab_size=152064)
_MISTRAL_7B = _like(
    replace(_DENSE_8B, architecture="MistralForCausalLM", has_qk_norm=False, max_positions=32768, norm_eps=1e-5),
    *(32, 4096, 32, 8, 14336),
    vocab_size=32768,
)
_LLAMA_8B = replace(
    _MISTRAL_7B,
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    max_positions=131072,
    rope_theta=5e5,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192.0),
)
_LLAMA_SMALL = replace(_LLAMA_8B, is_tied=True, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192.0))

_DENSE_4B = _like(_DENSE_8B, 36, 2560, 32, 8, 9728, is_tied=True)
KNOWN = {
    "Qwen3-30B-A3B": _MOE_30B,
    "Qwen3-30B-A3B-Thinking-2507": replace(_MOE_30B, max_positions=262144, rope_theta=1e7),
    "Qwen3-32B": _like(_DENSE_8B, 64, 5120, 64, 8, 25600),
    "Qwen3-8B": _DENSE_8B,
    "Qwen3-4B": _DENSE_4B,
    "Qwen3-4B-Instruct-2507": replace(_DENSE_4B, max_positions=262144, rope_theta=5e6),
    "Qwen3-1.7B": _like(_DENSE_8B, 28, 2048, 16, 8, 6144, is_tied=True),
    "Qwen3-0.6B": _like(_DENSE_8B, 28, 1024, 16, 8, 3072, is_tied=True),
    "Qwen2.5-7B": replace(_QWEN25_7B, max_positions=131072),
    "Qwen2.5-7B-Instruct": _QWEN25_7B,
    "Qwen2.5-3B": _like(_QWEN2, 36, 2048, 16, 2, 11008, is_tied=True),
    "Llama-3.1-8B-Instruct": _LLAMA_8B,
    "Llama-3.2-1B-Instruct": _like(_LLAMA_SMALL, 16, 2048, 32, 8, 8192, head_size=64),
    "Llama-3.2-3B-Instruct": _like(_LLAMA_SMALL, 28, 3072, 24, 8, 8192),
    "Llama-3.3-70B-Instruct": _like(_LLAMA_8B, 80, 8192, 64, 8, 28672),
    "Mistral-7B-Instruct-v0.3": _MISTRAL_7B,
}


def taught_shape(config: RunConfig, policy: PolicyConfig) -> ModelShape | None:
    """Return the shape of the random model that a policy without `model` starts from; None if the team has no warm start."""
    from marsrl.rollout.tasks.registry import TOKENIZERS
    from marsrl.trainer.models.init_model import SHAPES
    from marsrl.trainer.supervised.warm_start import SHAPE

    if (tutor := tutor_of(config)) is None:
        return None
    return replace(SHAPES[policy.shape or SHAPE], vocab_size=len(TOKENIZERS[tutor.tokenizer].vocabulary))


def find_shape(model: str) -> ModelShape:
    """Return the shape of the model in a directory (config.json suffices), or of a published model, by name.

    Raises ValueError, with the known names, if `model` is neither a directory nor a known name.
    """
    if Path(model).is_dir():
        return read_shape(model, needs_weights=False)
    name = Path(model).name
    if name not in KNOWN:
        raise ValueError(
            f"model: {model} is not a directory here, and {name} is not among the models with a known shape: "
            f"{', '.join(KNOWN)}; give a directory with its config.json"
        )
    return KNOWN[name]
