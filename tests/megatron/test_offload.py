"""Offloading to host memory changes no result: the optimizer's state (offload), inputs of layers (full_offload).

No GPU is needed: TwoMemories makes Megatron's hybrid optimizer treat CPU tensors as GPU tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import megatron_models as tiny
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from marsrl.trainer.config import OptimizerConfig
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import shim

GRAD_CLIP = 0.01


class TwoMemories(TorchFunctionMode):
    """Makes Megatron's offloading code take every tensor for a GPU tensor, except results of .cpu().

    These host tensors and their copies have the attribute `in_host_memory`. Nothing is moved: only is_cuda differs in that code.
    """

    COPIES = (Tensor.detach, Tensor.clone, Tensor.float, Tensor.pin_memory)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            asks_offloading = "cpu_offloading" in sys._getframe(1).f_code.co_filename
            return asks_offloading and not hasattr(args[0], "in_host_memory")
        # Pinning memory would need a GPU's driver, so it is skipped.
        out = args[0] if func is Tensor.pin_memory else func(*args, **(kwargs or {}))
        if func is Tensor.cpu and out is args[0]:
            # .cpu() of a CPU tensor returns the tensor itself, which must keep counting as a GPU tensor.
            out = out.clone()
        if func is Tensor.cpu or (func in self.COPIES and hasattr(args[0], "in_host_memory")):
            out.in_host_memory = True
        return out


def offload_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make new learners offload their optimizer's state, although `offload` is refused without a GPU.

    The setting is changed after the learner has checked it.
    """
    from marsrl.trainer.learner.megatron import optimizer

    options, offloading = optimizer.optimizer_options, {"offload": True}
    monkeypatch.setattr(
        optimizer, "optimizer_options", lambda config, dtype: options(config.model_copy(update=offloading), dtype)
    )


def new_learner(folder: Path) -> Learner:
    settings = OptimizerConfig(lr=1e-2, grad_clip=GRAD_CLIP, weight_decay=0.1)
    return tiny.learner(folder, dtype="bfloat16", optimizer=settings)


def steps(learner: Learner, count: int) -> list[float]:
    """Return the gradient norms of this many steps on the same samples."""
    return [tiny.step(learner, tiny.micro_batches(tiny.sequences(6), 2)).grad_norm for _ in range(count)]


def norm_of_first_moments(learner: Learner) -> float:
    """Return the norm of AdamW's first moments, which shows clipping.

    Steps do not show it, because AdamW divides by the size of gradients.
    """
    states = [state["exp_avg"] for part in learner.optimizer.parts() for state in part.optimizer.state.values()]
    return float(torch.cat([each.flatten() for each in states]).norm())


def test_an_offloaded_optimizer_steps_as_one_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim.install()  # before anything imports megatron
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    folder = tiny.save_model("qwen3_moe", tmp_path / "m", num_hidden_layers=1)
    on_gpu = new_learner(folder)
    norms = steps(on_gpu, 3)
    assert min(norms) > 3 * GRAD_CLIP  # every step is clipped

    offload_from_now_on(monkeypatch)
    with TwoMemories():
        offloaded = new_learner(folder)
        hybrids = [part.optimizer for part in offloaded.optimizer.parts()]
        assert hybrids and all(isinstance(each, HybridDeviceOptimizer) for each in hybrids)
        assert not any(each.gpu_optimizer for each in hybrids)  # no state is left on the GPU
        held = [tensor for each in hybrids for group in each.cpu_param_groups for tensor in group["params"]]
        assert all(each.dtype == torch.float32 and each.in_host_memory for each in held)
        assert steps(offloaded, 3)[:2] == pytest.approx(norms[:2], rel=1e-3)  # rounding errors grow with every step
        assert norm_of_first_moments(offloaded) == pytest.approx(norm_of_first_moments(on_gpu), rel=1e-2)
        torch.testing.assert_close(tiny.weights(offloaded), tiny.weights(on_gpu), atol=1e-3, rtol=1e-2)


def test_an_offloaded_optimizer_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim.install()
    offload_from_now_on(monkeypatch)
    folder = tiny.save_model("qwen3_moe", tmp_path / "m", num_hidden_layers=1)
    with TwoMemories():
        unbroken = new_learner(folder)
        untrained = tiny.weights(unbroken)
        tiny.save(unbroken, tmp_path / "before")
        steps(unbroken, 2)
        tiny.save(unbroken, tmp_path / "after")
        steps(unbroken, 1)

        resumed = new_learner(folder)
        resumed.load(tmp_path / "after")
        steps(resumed, 1)
        assert tiny.largest_difference(tiny.weights(resumed), tiny.weights(unbroken)) == 0.0
        resumed.load(tmp_path / "before")  # saved before any state existed
        assert tiny.largest_difference(tiny.weights(resumed), untrained) == 0.0


def test_layers_recomputed_from_host_inputs_give_equal_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim.install()
    from marsrl.trainer.learner.megatron import model

    num_layers = 3
    folder = tiny.save_model("qwen3_moe", tmp_path / "m", num_hidden_layers=num_layers)
    batches = tiny.micro_batches(tiny.sequences(6), 2)

    def gradients() -> dict[str, Tensor]:
        learner = tiny.learner(folder, recompute="full")
        tiny.step(learner, batches)
        return tiny.gradients(learner)

    expected = gradients()

    # Set full_offload only in the model, because the learner refuses it without a GPU.
    build_model, to_host, moved = model.build_model, model.to_host, list[Tensor]()
    offloading = {"recompute": "full_offload"}
    monkeypatch.setattr(
        model, "build_model", lambda shape, layout, p: build_model(shape, layout, p.model_copy(update=offloading))
    )
    monkeypatch.setattr(model, "to_host", lambda tensor: moved.append(to_host(tensor)) or moved[-1])
    found = gradients()

    assert expected and all(torch.equal(gradient, found[name]) for name, gradient in expected.items())
    # One tensor per layer and micro-batch was moved: hidden states [tokens, 1, hidden size], but no rotary angles.
    assert [each.shape[0] for each in moved] == [batch.num_tokens for batch in batches for _ in range(num_layers)]
    assert {each.shape[1:] for each in moved} == {moved[0].shape[1:]} and moved[0].dim() == 3
