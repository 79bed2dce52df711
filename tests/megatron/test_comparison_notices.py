"""Megatron's log-probs beside those of our local engine, whose arithmetic is spoiled: what a weight sync's comparison notices.

The same with the real vLLM, more models and more sizes: benchmarks/probe.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from megatron_models import learner, save_model
from torch import Tensor

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.local.rope import rotary_frequencies
from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.weights.comparison import EngineComparison, TrainerScores, comparison_sequences, trainer_scores


def shapes(shape: ModelShape) -> dict[str, ModelShape]:
    """Shapes with which a program computes otherwise."""
    wrong = {
        "rope theta x 5": {"rope_theta": 5 * shape.rope_theta},
        "norm eps x 100": {"norm_eps": 100 * shape.norm_eps},
        "no q/k norm": {"has_qk_norm": False},
        "rope not stretched": {"rope_scaling": None},
        "top-k + 1": {"experts_per_token": shape.experts_per_token + 1},
        "top-k - 1": {"experts_per_token": shape.experts_per_token - 1},
    }
    made = {name: dataclasses.replace(shape, **each) for name, each in wrong.items()}  # type: ignore[arg-type]
    return {name: each for name, each in made.items() if each != shape and ("top-k" not in name or shape.num_experts)}


def older(weights: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    """Layer 0 before an update of that size of each of its numbers."""
    torch.manual_seed(1)
    coins = {name: (torch.randint(2, tensor.shape) * 2 - 1).to(tensor.dtype) for name, tensor in weights.items()}
    return {n: w + size * coins[n] if "layers.0." in n else w for n, w in weights.items()}


def swapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts 0 and 1 of the last layer in each other's place."""
    last = {n: w for n, w in weights.items() if "layers.1.mlp.experts." in n}
    return weights | {n: torch.cat([w[1:2], w[:1], w[2:]]) for n, w in last.items()}


def notices(trainer: TrainerScores, engine: LocalEngine) -> bool:
    try:
        EngineComparison().compare(trainer, [engine.score(comparison_sequences(61))], 0)
    except RuntimeError as error:
        assert "disagree on the probe" in str(error)
        return True
    return False


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in ("qwen3", "qwen3_moe") for dtype in ("float32", "bfloat16")] + [("llama", "float32")],
)
def test_what_another_program_computes_is_noticed_and_what_it_rounds_is_not(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    folder = save_model(kind, tmp_path / "model", initializer_range=0.03)
    trainer = trainer_scores(learner(folder, dtype=dtype), getattr(torch, dtype))
    engine = LocalEngine(folder, dtype=dtype, max_model_len=128)
    model = engine._model
    assert not notices(trainer, engine)
    shape, weights = model.shape, model.weights
    for what, wrong in shapes(shape).items():
        model.shape = wrong
        model._frequencies = rotary_frequencies(wrong, torch.device("cpu"))
        assert notices(trainer, engine), what
    model.shape = shape
    model._frequencies = rotary_frequencies(shape, torch.device("cpu"))
    if shape.num_experts:
        model.weights = swapped(weights)
        assert notices(trainer, engine), "experts swapped"
    model.weights = older(weights, 1e-5 if dtype == "float32" else 5e-3)
    assert notices(trainer, engine), "an older layer"
    model.weights = weights
    assert not notices(trainer, engine)


def test_an_engine_in_a_coarser_dtype_than_the_trainer_differs_by_that_dtypes_rounding(tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "model")
    policy, engine = learner(folder), LocalEngine(folder, dtype="bfloat16", max_model_len=128)
    assert not notices(trainer_scores(policy, torch.bfloat16), engine)
    assert notices(trainer_scores(policy, torch.float32), engine)
