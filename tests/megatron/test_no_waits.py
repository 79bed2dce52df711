"""Packing and the model's forward never wait for the device: the host knows every size."""

from __future__ import annotations

import sys
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest
import torch
from megatron_models import learner, save_model, sequences, step
from torch.utils._python_dispatch import TorchDispatchMode

import marsrl.kernels
from marsrl.trainer.config import MptConfig, SharedPrefixes
from marsrl.trainer.data.scatter import micro_batches

ROOT = f"{Path(marsrl.kernels.__file__).parents[1]}/"
OURS = tuple(f"{ROOT}{room}/" for room in ("kernels", "rollout", "trainer"))
WAITS = {torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense, torch.ops.aten.masked_select}


class Waits(TorchDispatchMode):
    """Records which of our or megatron's files call operations that make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func.overloadpacket in WAITS or is_mask:
            self.found.add(caller())
        return func(*args, **(kwargs or {}))


def caller() -> str:
    """Return the innermost calling file of ours (path from the repository on) or of megatron's."""
    for frame, _ in walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        is_ours = file.startswith(OURS) and not file.endswith("/shim.py")  # every operation passes through the shim
        if is_ours or "/megatron/core/" in file:
            return file.removeprefix(ROOT)
    return "elsewhere"


@pytest.mark.parametrize(("scope", "shared_prefixes"), [("sample", "off"), ("batch", "off"), ("sample", "on")])
def test_the_head_knows_its_rows_without_the_device(
    scope: str, shared_prefixes: SharedPrefixes, tmp_path: Path
) -> None:
    policy = learner(save_model("qwen3_moe", tmp_path / "m"), mpt=MptConfig.model_validate({"scope": scope}))
    samples = sequences(6)
    with Waits() as waits:
        batches = micro_batches([*samples, *samples], policy.shard(1000, shared_prefixes))
        assert (batches[0].paths is None) == (shared_prefixes == "off")
        policy.score(batches)
        stats = step(policy, batches)
    assert stats.is_updated
    # Other files may wait: our CPU kernels, which have no device to wait for, and the step itself, which reads its results and
    # must know whether its update is applied.
    of_model = {f"trainer/learner/megatron/{name}.py" for name in ("head", "attention", "context", "experts", "model")}
    assert not waits.found & {"trainer/data/packing.py", *of_model}
    # Megatron's layers, including the dispatch to experts, never wait.
    assert not any("/transformer/" in file for file in waits.found), waits.found
    # Megatron reads the gradient's norm, and this wait was detected, so the test works.
    assert any(file.endswith("/clip_grads.py") for file in waits.found), waits.found
