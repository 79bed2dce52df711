"""Process groups of a policy's layout."""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from marsrl.trainer import torchrun
from marsrl.trainer.learner.megatron import shim
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.runs.collective import COLLECTIVE_S, Routes

_current: list[Layout] = []  # Layout of the existing groups; megatron has one set per process.
# Not empty if start() created the default process group; vLLM in this process may have created it instead.
_own_world: list[bool] = []


def world_size() -> int:
    """Return the number of ranks, before or after the process group exists."""
    return dist.get_world_size() if dist.is_initialized() else torchrun.world_size()


def start(layout: Layout, seed: int) -> None:
    """Create the default process group (gloo without CUDA, nccl with it) and megatron's groups for `layout`.

    Without torchrun this process is rank 0 of 1. Policies share one layout: a second call with the same
    layout does nothing.

    Raises ValueError if groups exist for another layout.
    """
    shim.install()
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        timeout = datetime.timedelta(seconds=COLLECTIVE_S)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:  # Without torchrun a HashStore needs no port, and no environment variables that child processes would inherit.
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
        _own_world.append(True)
    if _current:
        if _current[0] != layout:
            raise ValueError(f"layout: {layout} differs from {_current[0]}; all policies of a run share one layout")
        return
    with _groups_of_one_rank_shared():
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            distributed_timeout_minutes=math.ceil(COLLECTIVE_S / 60),
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    _current.append(layout)


def routes() -> Routes:
    """Return the routes from rank 0 to every data-parallel replica: first to its first rank, then to its other ranks."""
    from megatron.core import parallel_state

    across = parallel_state.get_data_parallel_group(with_context_parallel=True)
    has_rank_0 = 0 in dist.get_process_group_ranks(across)
    return Routes(across if has_rank_0 else None, parallel_state.get_model_parallel_group())


@contextlib.contextmanager
def _groups_of_one_rank_shared() -> Iterator[None]:
    """Share one group for all single-rank groups in the body: megatron would create about twenty in a run of one rank.

    A gloo group has three threads, one of which wakes up 100 times a second while it exists.
    """
    make: Any = dist.new_group
    group_of: dict[tuple[Any, ...], Any] = {}

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        members = range(dist.get_world_size()) if ranks is None else ranks
        if len(members) > 1:
            return make(ranks, *args, **options)
        key = (*members, options.get("backend"))
        if key not in group_of:
            group_of[key] = make(ranks, *args, **options)
        return group_of[key]

    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = make


def stop(*, keep_world: bool = False) -> None:
    """Destroy the groups; keep_world (collective) keeps the default process group for another layout."""
    if _current:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        if keep_world:
            # destroy_model_parallel only drops its references: every gloo group has threads that poll 100 times a
            # second while it exists. A group must not be closed while another rank still receives from it.
            dist.barrier()
            # The first is the default group.
            for group in dict.fromkeys(parallel_state._global_process_group_list[1:]):
                dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
        if keep_world:
            gc.collect()  # An unreachable learner may hold groups in reference cycles.
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False  # Otherwise the next layout inherits these seeds.
        _current.clear()
    if _own_world and not keep_world:
        _own_world.clear()
        if dist.is_initialized():  # A closing engine may have destroyed it.
            dist.destroy_process_group()
