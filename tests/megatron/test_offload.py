"""optimizer.offload: Megatron's hybrid optimizer on a machine without a GPU, whose tensors pass for a GPU's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import megatron_models as tiny
import pytest
import torch
from torch.overrides import TorchFunctionMode

from marsrl.trainer.config import OptimizerConfig
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import shim

SETTINGS = {"dtype": "bfloat16", "optimizer": OptimizerConfig(lr=1e-2, grad_clip=0.01, weight_decay=0.1)}


class TwoMemories(TorchFunctionMode):
    """Tells Megatron's hybrid optimizer that a tensor is on a GPU, unless it came of .cpu()."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return "cpu_offloading" in caller and not hasattr(args[0], "in_host_memory")
        out = args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))
        copies = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float, torch.Tensor.pin_memory)
        if func is torch.Tensor.cpu or (func in copies and hasattr(args[0], "in_host_memory")):
            out = out.clone() if out is args[0] and func is torch.Tensor.cpu else out
            out.in_host_memory = True
        return out


def stepped(learner: Learner, num_steps: int) -> list[float]:
    return [tiny.step(learner, tiny.micro_batches(tiny.sequences(6), 2)).grad_norm for _ in range(num_steps)]


def moments(learner: Learner) -> float:
    """The norm of all first moments, which clipping scales (AdamW's step hides it)."""
    states = [state["exp_avg"] for part in learner.optimizer.parts() for state in part.optimizer.state.values()]
    return float(torch.cat([each.flatten() for each in states]).norm())


def test_an_offloaded_optimizer_steps_and_resumes_as_one_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim.install()
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    from marsrl.trainer.learner.megatron import optimizer

    folder = tiny.save_model("qwen3_moe", tmp_path / "m", num_hidden_layers=1)
    here = tiny.learner(folder, **SETTINGS)
    norms = stepped(here, 3)
    assert min(norms) > 3 * 0.01  # so that every step is clipped

    ours, offloaded = optimizer.optimizer_options, {"offload": True}
    monkeypatch.setattr(optimizer, "optimizer_options", lambda c, dtype: ours(c.model_copy(update=offloaded), dtype))
    with TwoMemories():
        away = tiny.learner(folder, **SETTINGS)
        hybrids = [part.optimizer for part in away.optimizer.parts()]
        assert hybrids and all(isinstance(each, HybridDeviceOptimizer) for each in hybrids)
        of_cpu = [group for each in hybrids for group in each.cpu_param_groups]
        assert not any(each.gpu_optimizer for each in hybrids)  # nothing of the state is left on the GPU
        assert all(p.dtype == torch.float32 and p.in_host_memory for group in of_cpu for p in group["params"])
        tiny.save(away, tmp_path / "before")
        assert stepped(away, 2) == pytest.approx(norms[:2], rel=1e-3)
        tiny.save(away, tmp_path / "after")
        stepped(away, 1)
        assert moments(away) == pytest.approx(moments(here), rel=1e-2)
        torch.testing.assert_close(tiny.weights(away), tiny.weights(here), atol=1e-3, rtol=1e-2)

        back = tiny.learner(folder, **SETTINGS)
        back.load(tmp_path / "after")
        stepped(back, 1)
        assert tiny.largest_difference(tiny.weights(back), tiny.weights(away)) == 0.0
        back.load(tmp_path / "before")
        assert tiny.largest_difference(tiny.weights(back), tiny.weights(tiny.learner(folder, **SETTINGS))) == 0.0


def test_layers_that_start_again_from_inputs_on_the_host_have_the_same_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim.install()
    from marsrl.trainer.learner.megatron import model

    folder = tiny.save_model("qwen3_moe", tmp_path / "m", num_hidden_layers=3)
    batches, kept = tiny.micro_batches(tiny.sequences(6), 2), list[torch.Tensor]()

    def stepped() -> dict[str, torch.Tensor]:
        own = tiny.learner(folder, recompute="full")
        tiny.step(own, batches)
        return tiny.gradients(own)

    here, build, to_host = stepped(), model.build_model, model.to_host
    offloading = {"recompute": "full_offload"}
    monkeypatch.setattr(model, "build_model", lambda s, layout, p: build(s, layout, p.model_copy(update=offloading)))
    monkeypatch.setattr(model, "to_host", lambda tensor: kept.append(to_host(tensor)) or kept[-1])
    away = stepped()
    assert here and all(torch.equal(gradient, away[name]) for name, gradient in here.items())
    assert [each.shape[0] for each in kept] == [batch.num_tokens for batch in batches for _ in range(3)]
    assert {each.shape[1:] for each in kept} == {kept[0].shape[1:]} and kept[0].dim() == 3  # hidden states, no angles
