"""Draft model of an engine (EAGLE-3, arXiv:2503.01840): checks of its folder, and its size for the planner."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from marsrl.rollout.model_shape import ModelShape

_KEY = "rollout.vllm.draft_model"


@dataclass(frozen=True)
class DraftSize:
    """Memory of a draft. num_bytes: size of its weight files. kv_numbers: elements of K and V per token, over all layers."""

    num_bytes: int
    kv_numbers: int


def read_draft(folder: str, shape: ModelShape) -> DraftSize:
    """Read the draft for a model of this shape.

    Raises ValueError: no such folder or weight files, another kind of model, or a draft for another model.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{_KEY}: {folder} has no config.json; expected the folder of an EAGLE-3 draft")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architecture = str(config["architectures"][0])
        body = config.get("transformer_layer_config", config)  # drafts of the `speculators` library nest it
        vocab, hidden = int(body["vocab_size"]), int(body["hidden_size"])
        num_layers, num_heads = int(body["num_hidden_layers"]), int(body["num_attention_heads"])
        kv_heads = int(body.get("num_key_value_heads") or num_heads)
        head_size = int(body.get("head_dim") or hidden // num_heads)
        target_hidden = int(config.get("target_hidden_size") or hidden)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{_KEY}: {path} is not the config of an EAGLE-3 draft ({error!r})") from error
    if "eagle3" not in architecture.lower():
        raise ValueError(f"{_KEY}: {path} has the architecture {architecture}; expected an EAGLE-3 draft")
    if (vocab, target_hidden) != (shape.vocab_size, shape.hidden_size):
        raise ValueError(
            f"{_KEY}: {folder} is a draft for a model with a vocabulary of {vocab} and a hidden size of {target_hidden}, but the "
            f"policy's model has {shape.vocab_size} and {shape.hidden_size}; set a draft for this model in policies.<name>.vllm"
        )
    files = [*Path(folder).glob("*.safetensors")] or [*Path(folder).glob("*.bin")]
    if not files:
        raise ValueError(f"{_KEY}: {folder} has no weights; expected *.safetensors or *.bin")
    return DraftSize(sum(file.stat().st_size for file in files), 2 * num_layers * kv_heads * head_size)
