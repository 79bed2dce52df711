"""Neither packing nor the forward of the model asks the device for anything: the host knows every size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import learner, micro_batches, save_model, sequences, step
from torch.utils._python_dispatch import TorchDispatchMode

import marsrl.kernels
import marsrl.rollout
import marsrl.trainer
from marsrl.trainer.config import MptConfig

OURS = tuple(Path(room.__file__).parent for room in (marsrl.kernels, marsrl.rollout, marsrl.trainer))
WAITS = {torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense, torch.ops.aten.masked_select}


class Waits(TorchDispatchMode):
    """Operations for which a host waits for a GPU, by the line of ours, or of megatron, that called them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func.overloadpacket in WAITS or is_mask:
            self.found.append(caller())
        return func(*args, **(kwargs or {}))


def caller() -> str:
    """The innermost place in our code or in megatron's: file:line, ours from its room on."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = Path(frame.f_code.co_filename)
        if file.name != "shim.py":  # all goes through that
            for room in OURS:
                if file.is_relative_to(room):
                    return f"{file.relative_to(room.parent)}:{frame.f_lineno}"
            if "/megatron/core/" in str(file):
                return f"{'/'.join(file.parts[-4:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@pytest.mark.parametrize("scope", ["sample", "batch"])
def test_the_head_knows_its_rows_without_the_device(scope: str, tmp_path: Path) -> None:
    policy = learner(save_model("qwen3_moe", tmp_path / "m"), mpt=MptConfig.model_validate({"scope": scope}))
    samples = sequences(6)
    with Waits() as waits:
        batches = micro_batches(samples, 1)
        policy.score(batches)
        stats = step(policy, batches)
    assert stats.is_updated
    # The rest is our kernels' for a CPU, which has nothing to wait for, and the step's own: it waits for what decides whether
    # it is made, and for what it returns.
    files = {place.split(":")[0] for place in waits.found}
    of_model = {f"trainer/learner/megatron/{name}.py" for name in ("head", "attention", "context", "experts", "model")}
    assert not files & {"trainer/data/packing.py", *of_model}
    assert not any("/transformer/" in file for file in files), files  # megatron's layers, with the way to the experts
    assert any(file.endswith(("/step_stats.py", "/optimizer.py")) for file in files), files  # the test sees such waits
