"""Shapes of published models, for planning where the checkpoint is not at hand. Read from their config.json files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from marsrl.rollout.model_shape import ModelShape, read_shape
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.schools.schools import school_of

_MOE_30B = ModelShape(
    architecture="Qwen3MoeForCausalLM",
    num_layers=48,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_size=128,
    ffn_size=768,
    vocab_size=151936,
    max_positions=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    is_tied=False,
    has_qkv_bias=False,
    has_qk_norm=True,
    num_experts=128,
    experts_per_token=8,
)
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
_SMALL = replace(_DENSE_8B, num_layers=28, num_heads=16, is_tied=True)
_QWEN25_7B = replace(
    _DENSE_8B,
    architecture="Qwen2ForCausalLM",
    num_layers=28,
    hidden_size=3584,
    num_heads=28,
    num_kv_heads=4,
    ffn_size=18944,
    vocab_size=152064,
    max_positions=131072,
    has_qkv_bias=True,
    has_qk_norm=False,
)
_QWEN25_3B = replace(
    _QWEN25_7B,
    num_layers=36,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=2,
    ffn_size=11008,
    vocab_size=151936,
    max_positions=32768,
    is_tied=True,
)

KNOWN = {
    "Qwen3-30B-A3B": _MOE_30B,
    "Qwen3-30B-A3B-Thinking-2507": replace(_MOE_30B, max_positions=262144, rope_theta=1e7),
    "Qwen3-8B": _DENSE_8B,
    "Qwen3-4B": replace(_DENSE_8B, hidden_size=2560, ffn_size=9728, is_tied=True),
    "Qwen3-1.7B": replace(_SMALL, hidden_size=2048, ffn_size=6144),
    "Qwen3-0.6B": replace(_SMALL, hidden_size=1024, ffn_size=3072),
    "Qwen2.5-7B": _QWEN25_7B,
    "Qwen2.5-7B-Instruct": replace(_QWEN25_7B, max_positions=32768),
    "Qwen2.5-3B": _QWEN25_3B,
}


def warm_start_shape(shape: str | None = None, tokenizer: str = "arithmetic") -> ModelShape:
    """The shape of the model that a policy without one starts from; shape: policies.<name>.shape; tokenizer: its school's."""
    from marsrl.rollout.tasks.registry import TOKENIZERS
    from marsrl.trainer.models.init_model import SHAPES
    from marsrl.trainer.schools.warm_start import SHAPE

    made = SHAPES[shape or SHAPE]
    return replace(
        _MOE_30B,
        num_layers=made.num_layers,
        hidden_size=made.hidden,
        num_heads=made.num_heads,
        num_kv_heads=made.num_kv_heads,
        head_size=made.head_dim,
        ffn_size=made.expert_width,
        vocab_size=made.vocab_size or len(TOKENIZERS[tokenizer].vocabulary),
        max_positions=made.max_positions,
        num_experts=made.num_experts,
        experts_per_token=made.experts_per_token,
    )


def taught_shape(config: RunConfig, policy: PolicyConfig) -> ModelShape | None:
    """The shape of this policy, which has no model; None: nobody teaches the team of these settings."""
    school = school_of(config)
    return None if school is None else warm_start_shape(policy.shape, school.tokenizer)


def find_shape(model: str) -> ModelShape:
    """The shape of a directory's model (config.json is enough), else of a published one by its name.

    Raises:
        ValueError: neither a directory nor a name that is known; with the names.
    """
    if Path(model).is_dir():
        return read_shape(model, needs_weights=False)
    name = Path(model).name
    if name not in KNOWN:
        raise ValueError(
            f"model: {model} is not a directory here, and {name} is none of the models whose shape is known: "
            f"{', '.join(KNOWN)}; give a directory with its config.json"
        )
    return KNOWN[name]
