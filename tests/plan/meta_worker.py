"""Parameters of the real model classes on the meta device, as one rank of many: run alone, it replaces process groups.

python meta_worker.py '[["Qwen3-30B-A3B", 64, {"tensor": 4, "expert": 8}, 0], ...]' prints [[dense, expert], ...].
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from marsrl.trainer.config import LayoutConfig, PolicyConfig
from marsrl.trainer.learner.megatron import shim
from marsrl.trainer.learner.megatron.layout import check, resolve
from marsrl.trainer.plan.models import find_shape


def count(model: str, world_size: int, sizes: dict[str, int], stage: int) -> list[int]:
    """[dense, expert] numbers on the first rank of a pipeline stage."""
    from megatron.core import parallel_state

    from marsrl.trainer.learner.megatron.model import bare_model, transformer_config

    config, shape = LayoutConfig(**sizes), find_shape(model)
    layout = resolve(config)
    check(layout, shape, world_size)
    # pipeline stages lie outermost: the first rank of stage s is s * world / PP
    rank = stage * world_size // layout.pipeline
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
    )
    built = bare_model(shape, layout, transformer_config(shape, layout, PolicyConfig(layout=config)))
    experts = sum(p.numel() for name, p in built.named_parameters() if ".experts." in name)
    total = sum(p.numel() for p in built.parameters())
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return [total - experts, experts]


def main() -> None:
    shim.install()
    meta = torch.device("meta")
    current: Any = torch.cuda
    current.current_device = lambda: meta  # where the model's classes put what they make
    from megatron.core.tensor_parallel import random

    class NoSeeds:
        """Nothing is drawn on the meta device."""

        def fork(self, name: str = "") -> Any:
            import contextlib

            return contextlib.nullcontext()

    random._CUDA_RNG_STATE_TRACKER = NoSeeds()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    print(json.dumps([count(*each) for each in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
