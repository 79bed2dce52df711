"""The choice of layers and fused operations, and TransformerEngine's layers, with stand-ins on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron_models import learner, save_model, sequences
from torch import Tensor

from marsrl.commands.doctor import examine
from marsrl.trainer.data.packing import pack
from marsrl.trainer.learner.megatron import layer_choice
from marsrl.trainer.learner.megatron.layer_choice import LayerChoice, choose_fusions, choose_layers


def stand_in(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Install a stand-in for transformer_engine whose pytorch.fp8 has these names, and simulate a machine with a GPU."""
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
    findings = {finding.name: (finding.is_used, finding.detail) for finding in examine()}
    assert findings["layer spec: TransformerEngine"] == (False, "PyTorch sees no CUDA device")
    assert findings["megatron's fused gradient accumulation"] == (False, "PyTorch sees no CUDA device")


def test_transformer_engine_is_chosen_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "FP8GlobalStateManager", "fp8_autocast")
    assert choose_layers("transformer_engine").layers == "transformer_engine"
    assert choose_layers("ours").layers == choose_layers().layers == "ours"
    assert choose_layers().why == "policies.<name>.layers=transformer_engine would use it; not tested on GPUs"
    stand_in(monkeypatch, "fp8_autocast")
    chosen = choose_layers()
    assert chosen.layers == "ours" and "cannot be imported: cannot import name 'FP8GlobalStateManager'" in chosen.why
    assert choose_fusions(chosen).rope is not None
    monkeypatch.delitem(sys.modules, "transformer_engine")
    monkeypatch.setattr(layer_choice, "find_spec", lambda name: None)
    assert choose_layers().why == "transformer_engine is not installed"


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2"])
def test_transformer_engine_layers_give_equal_log_probs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own layers and our norm stand in for TransformerEngine's classes; the code that connects them is real."""
    folder, batch = save_model(kind, tmp_path / "m"), pack(sequences(3))
    ours = learner(folder)
    names, (expected,) = [name for name, _ in ours.model.named_parameters()], ours.score([batch])
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from marsrl.trainer.learner.megatron import model
    from marsrl.trainer.learner.megatron.attention import RMSNorm

    real = {"TEColumnParallelLinear": ColumnParallelLinear, "TERowParallelLinear": RowParallelLinear, "TENorm": RMSNorm}
    for name, module in real.items():
        monkeypatch.setattr(extension, name, type(name, (module,), {}))
    monkeypatch.setattr(model, "choose_layers", lambda wanted: LayerChoice("transformer_engine", "stand-in"))
    theirs = learner(folder)
    found = Counter(type(module).__name__ for module in theirs.model.decoder.modules())
    linear = 2 * len(theirs.model.decoder.layers) * (1 if kind == "qwen3_moe" else 2)
    assert found["TEColumnParallelLinear"] + found["TERowParallelLinear"] == linear
    assert not found.keys() & {module.__name__ for module in real.values()}
    assert [name for name, _ in theirs.model.named_parameters()] == names
    assert torch.equal(theirs.score([batch])[0], expected)


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_gets_longest_sequence_and_determinism(
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
