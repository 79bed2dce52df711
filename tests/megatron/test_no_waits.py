"""Neither packing nor the forward of the model asks the device for anything: the host knows every size."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import learner, micro_batches, save_model, sequences, step
from torch.utils._python_dispatch import TorchDispatchMode

from marsrl.trainer.config import MptConfig

ROOMS = re.compile(r"/(kernels|rollout|trainer|megatron/core)/")
WAITS = {torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense, torch.ops.aten.masked_select}


class Waits(TorchDispatchMode):
    """Files of ours, or of megatron, that called an operation for which a host waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func.overloadpacket in WAITS or is_mask:
            self.found.add(innermost())
        return func(*args, **(kwargs or {}))


def innermost() -> str:
    """The innermost file of ours or of megatron's, without the shim that all goes through."""
    files = (frame.filename for frame in reversed(traceback.extract_stack()[:-2]))
    return next(each for each in files if ROOMS.search(each) and not each.endswith("/shim.py"))


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
    of_model = [f"/trainer/learner/megatron/{name}.py" for name in ("head", "attention", "context", "experts", "model")]
    assert not [each for each in waits.found if each.endswith(("/trainer/data/packing.py", *of_model))]
    assert not [
        each for each in waits.found if "/transformer/" in each
    ]  # megatron's layers, with the way to the experts
    assert [
        each for each in waits.found if each.endswith(("/step_stats.py", "/optimizer.py"))
    ]  # the test sees such waits
