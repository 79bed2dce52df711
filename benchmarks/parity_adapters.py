"""Comparison of adapters with PEFT on transformers in float64. parity.py calls it and explains the columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIMITS = {"loss": 2e-6, "gradient": 5e-6, "logprobs": 2e-5, "norm": 1e-5}
ADAPTERS = {
    "moe": {"rank": 8, "expert_rank": 4, "alpha": 16, "targets": ["attention", "experts"]},
    "dense": {"rank": 8, "alpha": 16, "targets": ["attention", "mlp"]},
}


def random_adapter(model_dir: Path, settings: dict[str, Any], folder: Path, seed: int = 1) -> Path:
    """Write a PEFT adapter directory for the model, with random A and B."""
    from marsrl.rollout.adapter import AdapterConfig, tensor_shapes, write_adapter
    from marsrl.rollout.model_shape import read_shape

    shape, adapter = read_shape(model_dir), AdapterConfig.model_validate(settings)
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: 0.05 * torch.randn(size, generator=generator) for n, size in tensor_shapes(shape, adapter).items()}
    folder.mkdir(parents=True)
    write_adapter(folder, shape, adapter, tensors, str(model_dir))
    return folder


def peft_reference(model_dir: Path, adapter: Path, sequences: list[Any], loss_of: Callable[..., Any]) -> dict[str, Any]:
    """Run PEFT on transformers in float64. Return samples, loss, gradients of A and B, their norm, and log-probs by sample.

    loss_of: parity.loss_of.
    """
    import transformers
    from peft import PeftModel

    from marsrl.rollout.adapter import PEFT_PREFIX

    bare = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, experts_implementation="eager"
    )
    model = PeftModel.from_pretrained(bare, adapter, is_trainable=True).double()
    out, loss, masked, logprobs = loss_of(model, sequences, torch.float64)
    loss.backward()
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert parameter.grad is not None
            plain = name.removeprefix(PEFT_PREFIX).replace(".default", "")
            gradients |= (
                by_expert(plain, parameter.grad, bare.config) if ".experts." in name else {plain: parameter.grad}
            )
    norm = float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())
    results = {"samples": out, "loss": float(loss.detach()), "masked": masked, "logprobs": logprobs}
    return {**results, "gradient": gradients, "norm": norm}


def by_expert(name: str, gradient: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Split PEFT's gradients into pairs (A, B) per expert. Expert e has rows e r + i of PEFT's A and columns i E + e of its B.

    PEFT treats gate and up as one matrix, with an adapter of twice the rank: half of its rank serves gate, the other half up.
    """
    prefix, letter, num = name.split(".experts.")[0] + ".experts", name[-len("A.weight")], config.num_experts
    by_rank = gradient.unflatten(0, (num, -1)) if letter == "A" else gradient.unflatten(1, (-1, num)).permute(2, 0, 1)
    parts = {"down_proj": by_rank}
    if ".base_layer." in name:
        first, second = by_rank.chunk(2, 1)
        if letter == "B":
            first, second = first.chunk(2, 2)[0], second.chunk(2, 2)[1]
        parts = {"gate_proj": first, "up_proj": second}
    return {
        f"{prefix}.{e}.{part}.lora_{letter}.weight": gradients[e]
        for part, gradients in parts.items()
        for e in range(num)
    }


def line_of(expected: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return the differences from PEFT."""
    gradient, logprobs = expected["gradient"], expected["logprobs"]
    assert results["gradient"].keys() == gradient.keys() and results["logprobs"].keys() == logprobs.keys(), (
        "something is missing"
    )
    off = {
        "loss": abs(results["loss"] - expected["loss"]),
        "gradient": max(float((results["gradient"][n] - g).abs().max() / g.abs().max()) for n, g in gradient.items()),
        "logprobs": max(float((results["logprobs"][uid] - values).abs().max()) for uid, values in logprobs.items()),
        "norm": abs(results["norm"] - expected["norm"]) / expected["norm"],
    }
    is_ok = all(off[name] <= limit for name, limit in LIMITS.items()) and results["masked"] == expected["masked"]
    return {**off, "is_ok": is_ok}
