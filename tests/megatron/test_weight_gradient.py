"""torch adds the weight gradients of linear layers to Megatron's float32 buffers, as apex's kernel would."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron_models as tiny
import pytest
import torch
from torch import Tensor

from marsrl.kernels.main_grad import wgrad_gemm_accum_fp32
from marsrl.trainer.learner.megatron import layer_choice, shim
from marsrl.trainer.learner.megatron.layer_choice import APEX, Fusions, LayerChoice, choose_fusions

OURS = LayerChoice("ours", "")
ADDMM = torch.addmm


def device_addmm(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    """Stand in for addmm with out_dtype, which CPUs lack: multiply in 16 bits and sum in 32."""
    assert total is out and total.dtype == out_dtype == torch.float32 and a.dtype == b.dtype == torch.bfloat16
    return ADDMM(total, a.float(), b.float(), out=out)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with a GPU and without apex; its tensors are CPU tensors."""
    shim.install()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "addmm", device_addmm)
    monkeypatch.setitem(sys.modules, APEX, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("on_gpu")
def test_products_are_added_without_rounding_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dy = (torch.randn(300, size).to(dtype) for size in (24, 40))
    total = torch.randn(40, 24)
    expected = total.double() + dy.double().T @ x.double()
    bound = 1e-6 * (total.double().abs() + dy.double().abs().T @ x.double().abs())
    wgrad_gemm_accum_fp32(x, dy, total)
    assert ((total - expected).abs() <= bound).all()


@pytest.mark.usefixtures("on_gpu")
def test_fusion_needs_a_gpu_that_adds_products_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_fusions(OURS).gradient_accumulation is None
    monkeypatch.setattr(torch, "addmm", lambda total, a, b, *, out_dtype, out: out.add_(1))
    assert "wrongly here" in str(choose_fusions(OURS).gradient_accumulation)
    monkeypatch.setattr(torch, "addmm", ADDMM)
    assert "cannot add bfloat16 products to float32 here" in str(choose_fusions(OURS).gradient_accumulation)
    monkeypatch.setitem(sys.modules, APEX, SimpleNamespace(wgrad_gemm_accum_fp32=None))
    assert choose_fusions(OURS).gradient_accumulation is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_fusions(OURS).gradient_accumulation == layer_choice._NO_GPU


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_accumulation_gives_the_gradient(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without fusion each micro-batch's gradient would be rounded to bfloat16. The gradients of other weights keep their bits."""
    shim.install()
    from marsrl.trainer.learner.megatron import model

    monkeypatch.setattr(torch, "addmm", lambda *a, **b: (device_addmm if "out_dtype" in b else ADDMM)(*a, **b))
    folder = tiny.save_model(kind, tmp_path / "m")
    batches = tiny.micro_batches(tiny.sequences(6), 3)
    optimizer = tiny.OPTIMIZER.model_copy(update={"overlap_grad_reduce": True, "grad_clip": 1e9})

    def stepped(**policy: Any) -> tuple[dict[str, Tensor], set[str]]:
        learner = tiny.learner(folder, optimizer=optimizer, **policy)
        tiny.step(learner, batches)
        added = {name for name, w in learner.model.named_parameters() if w.grad_added_to_main_grad}
        return tiny.gradients(learner), added

    plain, alone = stepped(dtype=dtype)
    monkeypatch.setattr(model, "choose_fusions", lambda layers: Fusions(None, "off"))
    fused, together = stepped(dtype=dtype)
    linear = {name for name in plain if name.endswith(("linear_qkv.weight", "linear_proj.weight"))}
    linear |= {name for name in plain if name.endswith(("linear_fc1.weight", "linear_fc2.weight"))}
    assert linear and not alone & linear and together == alone | linear
    scale = max(float(gradient.abs().max()) for gradient in plain.values())
    assert tiny.largest_difference(fused, plain) <= (1e-6 if dtype == "float32" else 1e-2) * scale
    assert all(torch.equal(fused[name], plain[name]) for name in plain.keys() - linear)
