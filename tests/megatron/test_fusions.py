"""Megatron's fused operations: on where their modules are, and a step with them is the step without: by stand-ins, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import micro_batches, num_trained, save_model, sequences
from test_learner import gradients, largest_difference, learner
from torch import Tensor

from marsrl.trainer.checks.doctor import examine
from marsrl.trainer.data.packing import pack
from marsrl.trainer.learner.megatron import fusions
from marsrl.trainer.learner.megatron.fusions import APEX, Fusions, choose_fusions
from marsrl.trainer.learner.megatron.layer_choice import LayerChoice

OURS, THEIRS = LayerChoice("ours", "asked for"), LayerChoice("transformer_engine", "installed")
TE = "transformer_engine.pytorch"


@pytest.mark.parametrize(
    ("layers", "there", "words"),
    [
        (THEIRS, {APEX, f"{TE}.attention.rope", f"{TE}.permutation"}, "gradient accumulation, rope, permute"),
        (THEIRS, {f"{TE}.attention"}, f"rope; off: gradient accumulation (no {APEX}); permute (no {TE}.permutation)"),
        (
            OURS,
            {APEX, f"{TE}.attention.rope", f"{TE}.permutation"},
            "gradient accumulation; off: rope, permute (TransformerEngine's, and the layers are ours)",
        ),
    ],
)
def test_each_is_on_where_its_module_is(layers: LayerChoice, there: set[str], words: str) -> None:
    def why_not(module: str, name: str) -> str | None:
        return None if module in there else f"no {module}"

    assert choose_fusions(layers, has_experts=True, why_not=why_not).words == words
    assert choose_fusions(layers, has_experts=False, why_not=why_not).permute == "the model has no experts"


def test_without_a_gpu_none_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fusions.why_not_on_gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = choose_fusions(OURS, has_experts=True)
    assert found.gradient_accumulation == "PyTorch sees no CUDA device" and found.words.startswith("none; off: ")
    (line,) = [finding for finding in examine() if finding.name == "megatron's fused operations"]
    assert not line.is_used and line.detail == found.words
    fusions.why_not_on_gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert f"no {APEX}.wgrad_gemm_accum_fp32" in str(choose_fusions(OURS, has_experts=True).gradient_accumulation)
    fusions.why_not_on_gpu.cache_clear()


class Apex:
    """apex's kernel in the words that megatron calls it with."""

    num_calls = 0

    @classmethod
    def wgrad_gemm_accum_fp32(cls, rows: Tensor, of_output: Tensor, main_grad: Tensor) -> None:
        cls.num_calls += 1
        main_grad += of_output.flatten(0, -2).t() @ rows.flatten(0, -2)


def permute_with_weights(
    tokens: Tensor, weights: Tensor, routed: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """TransformerEngine's moe_permute_with_probs: its map is its own, only moe_unpermute reads it."""
    expert, token = routed.t().nonzero(as_tuple=True)
    assert len(token) == num_out_tokens
    return tokens[token], weights[token, expert], token


def unpermute(rows: Tensor, places: Tensor, merging_probs: None, restore_shape: torch.Size) -> Tensor:
    assert merging_probs is None
    return torch.zeros(restore_shape, dtype=rows.dtype).index_add(0, places, rows)


def sort_chunks(rows: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    chunks = rows.split(sizes.tolist())
    return torch.cat([chunks[i] for i in order.tolist()])


def sort_chunks_with_weights(rows: Tensor, weights: Tensor, sizes: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return sort_chunks(rows, sizes, order), sort_chunks(weights, sizes, order)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2"])
def test_a_step_with_all_of_them_has_the_same_gradients(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """qwen2's embedding is tied: the head's part of main_grad, and the embedding's, both stay."""
    folder, samples = save_model(kind, tmp_path / "m", tie_word_embeddings=kind == "qwen2"), sequences(6)

    def step() -> tuple[dict[str, Tensor], Any]:
        policy = learner(folder)
        policy.step(micro_batches(samples, 2), normaliser=num_trained(samples))
        return gradients(policy), policy._model.config

    plain, config = step()
    assert not (config.gradient_accumulation_fusion or config.apply_rope_fusion or config.moe_permute_fusion)

    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import moe_utils

    from marsrl.trainer.learner.megatron import model

    def rotate(t: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)

    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", Apex, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", rotate, raising=False)
    monkeypatch.setattr(moe_utils, "HAVE_TE", True, raising=False)
    monkeypatch.setattr(moe_utils, "fused_permute_with_probs", permute_with_weights, raising=False)
    monkeypatch.setattr(moe_utils, "fused_unpermute", unpermute, raising=False)
    monkeypatch.setattr(moe_utils, "fused_permute", permute_with_weights, raising=False)
    monkeypatch.setattr(moe_utils, "fused_sort_chunks_by_index", sort_chunks, raising=False)
    monkeypatch.setattr(moe_utils, "fused_sort_chunks_by_index_with_probs", sort_chunks_with_weights, raising=False)
    on = Fusions(None, None, None if kind == "qwen3_moe" else "no experts")
    monkeypatch.setattr(model, "choose_fusions", lambda layers, *, has_experts: on)
    Apex.num_calls = 0
    fused, config = step()
    assert config.gradient_accumulation_fusion and config.apply_rope_fusion
    assert config.moe_permute_fusion == (kind == "qwen3_moe")
    of_layer = 2 if kind == "qwen3_moe" else 4
    assert Apex.num_calls == of_layer * config.num_layers * len(micro_batches(samples, 2))
    assert min(float(each.norm()) for each in plain.values()) > 0
    assert largest_difference(fused, plain) < 1e-6


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_is_told_the_longest_sequence_and_whether_to_repeat_bitwise(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = learner(save_model("qwen2", tmp_path / "m"), deterministic=deterministic)
    from marsrl.trainer.learner.megatron import attention

    asked, compute = [], attention.attention_varlen

    def recorded(*words: Any, **options: Any) -> Tensor:
        asked.append((options["max_seqlen"], options["deterministic"]))
        return compute(*words, **options)

    monkeypatch.setattr(attention, "attention_varlen", recorded)
    batch = pack(sequences(3))
    policy.score([batch])
    assert asked == [(int(batch.cu_seqlens.diff().max()), deterministic)] * policy._model.config.num_layers
