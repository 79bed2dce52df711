"""Layers and fused operations: which are chosen, and that a step with them is the step without: by stand-ins, on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron_models import gradients, largest_difference, learner, micro_batches, save_model, sequences, step
from torch import Tensor

from marsrl.trainer.checks.doctor import examine
from marsrl.trainer.data.packing import pack
from marsrl.trainer.learner.megatron import layer_choice
from marsrl.trainer.learner.megatron.layer_choice import APEX, Fusions, LayerChoice, choose_fusions, choose_layers

OURS, THEIRS = LayerChoice("ours", "asked for"), LayerChoice("transformer_engine", "installed")
TE = "transformer_engine.pytorch"


def stand_in(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A module transformer_engine whose pytorch.fp8 has these names, and a machine with a GPU."""
    modules = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    fp8 = modules["transformer_engine.pytorch.fp8"] = ModuleType("transformer_engine.pytorch.fp8")
    for name in names:
        setattr(fp8, name, object())
    for name, module in modules.items():
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_a_gpu_ours_are_chosen_and_doctor_says_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert choose_layers().layers == "ours"
    fusions = choose_fusions(choose_layers(), has_experts=True)
    assert fusions.gradient_accumulation == "PyTorch sees no CUDA device" and fusions.words.startswith("none; off: ")
    told = {finding.name: (finding.is_used, finding.detail) for finding in examine()}
    assert told["layer spec: TransformerEngine"] == (False, "PyTorch sees no CUDA device")
    assert told["megatron's fused operations"] == (False, fusions.words)
    with pytest.raises(
        ValueError, match="layers is transformer_engine, but PyTorch sees no CUDA device; set auto or ours"
    ):
        choose_layers("transformer_engine")


def test_transformer_engine_is_chosen_where_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "FP8GlobalStateManager", "fp8_autocast")
    assert choose_layers().layers == choose_layers("transformer_engine").layers == "transformer_engine"
    assert choose_layers("ours").layers == "ours"


def test_an_installation_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "fp8_autocast")
    chosen = choose_layers()
    assert chosen.layers == "ours" and "does not import: cannot import name 'FP8GlobalStateManager'" in chosen.why
    assert f"no {APEX}.wgrad_gemm_accum_fp32" in str(choose_fusions(chosen, has_experts=True).gradient_accumulation)
    monkeypatch.delitem(sys.modules, "transformer_engine")
    monkeypatch.setattr(layer_choice, "find_spec", lambda name: None)
    assert choose_layers().why == "transformer_engine is not installed"


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2"])
def test_a_model_of_its_layers_has_the_same_parameters_and_log_probs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron's own layers and our norm in the place of TransformerEngine's, under its names; the wiring is the real one."""
    folder, batch = save_model(kind, tmp_path / "m"), pack(sequences(3))
    ours = learner(folder)
    names, (expected,) = [name for name, _ in ours.model.named_parameters()], ours.score([batch])
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from marsrl.trainer.learner.megatron import model
    from marsrl.trainer.learner.megatron.attention import RMSNorm

    class Column(ColumnParallelLinear): ...

    class Row(RowParallelLinear): ...

    class Norm(RMSNorm): ...

    for name, module in (("TEColumnParallelLinear", Column), ("TERowParallelLinear", Row), ("TENorm", Norm)):
        monkeypatch.setattr(extension, name, module)
    monkeypatch.setattr(utils, "is_te_min_version", lambda version: True)
    monkeypatch.setattr(model, "choose_layers", lambda wanted: LayerChoice("transformer_engine", "stand-in"))
    theirs = learner(folder)
    modules: list[Any] = list(theirs.model.decoder.modules())
    linear = 2 * len(theirs.model.decoder.layers) * (1 if kind == "qwen3_moe" else 2)
    assert sum(isinstance(each, Column | Row) for each in modules) == linear
    assert not [m for m in modules if type(m) in (ColumnParallelLinear, RowParallelLinear, RMSNorm)]
    assert [name for name, _ in theirs.model.named_parameters()] == names
    assert torch.equal(theirs.score([batch])[0], expected)


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

    def stepped() -> tuple[dict[str, Tensor], Any]:
        policy = learner(folder)
        step(policy, micro_batches(samples, 2))
        return gradients(policy), policy.model.config

    plain, config = stepped()
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
    fused, config = stepped()
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
    assert asked == [(int(batch.cu_seqlens.diff().max()), deterministic)] * policy.model.config.num_layers
