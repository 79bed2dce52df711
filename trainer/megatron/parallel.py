"""Process groups from a policy's layout, with guards that name the numbers which do not fit."""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.config import LayoutConfig
from marsrl.trainer.megatron import shim

_current: list[Layout] = []  # the layout whose groups stand; megatron has one set of groups a process


@dataclass(frozen=True)
class Layout:
    """The sizes with their defaults filled in; the product of tensor, pipeline and context divides the world."""

    tensor: int
    expert: int
    expert_tensor: int
    pipeline: int
    context: int

    @property
    def uses_sequence_parallel(self) -> bool:
        """Megatron's MoE under tensor parallelism needs it; it also saves activations."""
        return self.tensor > 1


def resolve(config: LayoutConfig) -> Layout:
    """expert_tensor's default: `tensor` for expert 1, else 1."""
    expert_tensor = config.expert_tensor or (config.tensor if config.expert == 1 else 1)
    return Layout(config.tensor, config.expert, expert_tensor, config.pipeline, config.context)


def check(layout: Layout, shape: ModelShape, world_size: int) -> None:
    """Refuse a layout that does not fit the model or the number of ranks, or that trains wrongly in silence.

    Raises:
        ValueError: naming the keys of policies.<name>.layout and both numbers.
    """
    tp, ep, etp, pp, cp = layout.tensor, layout.expert, layout.expert_tensor, layout.pipeline, layout.context
    if cp > 1:
        raise ValueError(f"layout.context is {cp}: context parallelism is not supported yet; set 1, use layout.tensor")
    _divides("layout.tensor", tp, "attention heads", shape.num_heads)
    _divides("layout.tensor", tp, "key/value heads", shape.num_kv_heads)
    _divides("layout.pipeline", pp, "layers", shape.num_layers)
    if shape.num_experts:
        _divides("layout.expert", ep, "experts", shape.num_experts)
        _divides("layout.expert_tensor", etp, "units of an expert", shape.ffn_size)
        if ep == 1 and etp != tp:
            # Measured on megatron-core 0.16.1: up to 140 % off, no error.
            raise ValueError(
                f"layout: expert 1 with expert_tensor {etp} and tensor {tp}: Megatron reduces the experts' gradients "
                "over the wrong group; set layout.expert_tensor equal to layout.tensor, or layout.expert above 1"
            )
    elif ep > 1:
        raise ValueError(f"layout.expert is {ep}, but {shape.architecture} has no experts; set 1")
    else:
        _divides("layout.tensor", tp, "units of the MLP", shape.ffn_size)
    _divides("layout.tensor x layout.pipeline x layout.context", tp * pp * cp, "ranks", world_size)
    if shape.num_experts:
        _divides("layout.expert x layout.expert_tensor x layout.pipeline", ep * etp * pp, "ranks", world_size)


def _divides(keys: str, size: int, what: str, number: int) -> None:
    if number % size:
        raise ValueError(f"{keys} is {size}, which does not divide the {number} {what}")


def world_size() -> int:
    """Ranks of this run, before or after the process group stands."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def start(layout: Layout, seed: int) -> None:
    """Make the default process group (gloo without CUDA, nccl with it) and megatron's groups for `layout`.

    Without torchrun this process is rank 0 of 1 on a free port. Policies share one layout: a second call with the same
    one does nothing.

    Raises:
        ValueError: groups stand for another layout.
    """
    shim.install()
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=10))
    if _current:
        if _current[0] != layout:
            raise ValueError(f"layout: {layout} differs from {_current[0]}; all policies of a run share one layout")
        return
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    _current.append(layout)


def _free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def stop(*, keep_world: bool = False) -> None:
    """Tear the groups down; keep_world leaves the default process group for another layout."""
    if _current:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        parallel_state.destroy_model_parallel()
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False  # else the next layout keeps this one's seeds
        _current.clear()
    if dist.is_initialized() and not keep_world:
        dist.destroy_process_group()
