"""A sleeping learner (trainer.sleep) has empty storages, and exports and trains as when awake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_models as tiny
import pytest
import torch

from marsrl.kernels import PolicyObjective
from marsrl.trainer.data.packing import pack
from marsrl.trainer.learner.learner import Learner, groups

KL = PolicyObjective(kl="k3", kl_coef=0.1)
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def sizes(learner: Learner) -> Iterator[int]:
    """Yield the bytes of the storages of weights, reference, gradients, moments and float32 weights."""
    reference = learner.passes.reference
    for module in (learner.model, learner.adapter, reference and reference.module):
        yield from (p.untyped_storage().nbytes() for p in module.parameters()) if module is not None else ()
    holder = learner.optimizer if learner.base is None else learner.base
    state = [each for each in holder.state_tensors() if each.dim()]
    assert len(state) > 2 * len(
        list(learner.model.parameters()) if learner.base is None else learner.base.trained.adapters
    )
    yield from (each.untyped_storage().nbytes() for each in (*state, *holder.gradient_tensors()))


def trained(learner: Learner, folder: Path) -> list[Any]:
    """Return the losses and weights of three steps, with a sleep after each, and of a fourth step after a load."""
    results: list[Any] = []
    batches = tiny.micro_batches(tiny.sequences(6), 2)
    for number in range(4):
        results.append(tiny.step(learner, batches).loss)
        awake = tiny.weights(learner)
        results.append(awake)
        if number == 2:
            tiny.save(learner, folder)
        learner.sleep()
        if learner.sleeps:
            assert not any(sizes(learner))
            asleep = tiny.weights(learner)  # as in a publish
            assert all(torch.equal(asleep[name], tensor) for name, tensor in awake.items())
            assert not any(sizes(learner))
        if number == 2:
            learner.load(folder)
            assert any(sizes(learner)) == (not learner.sleeps or learner.base is not None)
    results.append(learner.score(batches))
    assert all(sizes(learner))
    return results


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16", "objective": KL, "reference_dir": "m"},
        {"dtype": "bfloat16", "optimizer": tiny.OPTIMIZER.model_copy(update={"distributed": False})},
        {"dtype": "float32", "optimizer": tiny.OPTIMIZER.model_copy(update=OVERLAPPED)},
        {"dtype": "bfloat16", "adapter": {"targets": ["attention", "experts"]}, "objective": KL},
        {"dtype": "bfloat16", "adapter": {}, "objective": KL, "reference_dir": "m"},
    ],
    ids=["reference", "not distributed", "overlapped", "adapter", "adapter and reference"],
)
def test_a_learner_that_sleeps_trains_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    if "reference_dir" in settings:
        settings = {**settings, "reference_dir": tmp_path / settings["reference_dir"]}
    learners = [tiny.learner(folder, sleeps=sleeps, **settings) for sleeps in (False, True)]
    learners[1].sleep()  # as before engines start
    expected, found = (trained(each, tmp_path / str(i)) for i, each in enumerate(learners))
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_adapters_of_one_base_sleep_and_wake_together(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3", tmp_path / "m")
    names = ("solver", "verifier")
    optimizers = dict.fromkeys(names, tiny.OPTIMIZER)
    learners = tiny.on_one_base(folder, {name: {} for name in names}, optimizers, sleeps=True)
    for each in learners.values():
        each.sleep()
    assert not any(size for each in learners.values() for size in sizes(each))
    learners["solver"].wake()
    assert all(size for each in learners.values() for size in sizes(each))
    learners["verifier"].sleep()
    assert not any(size for each in learners.values() for size in sizes(each))
    (group,) = groups(learners, names)
    group.score(pack(sorted(tiny.sequences(4), key=lambda sample: sample.agent)))
    assert all(size for each in learners.values() for size in sizes(each))
