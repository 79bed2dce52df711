"""Shim that makes megatron-core run on CPU tensors and gloo.

It also hides the differences between versions 0.16.1 and 0.19.2.

Call `install()` before megatron is imported. With CUDA it leaves tensors and collectives alone. No file of megatron is edited;
every entry states what breaks without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.jit._builtins import _register_builtin
from torch.utils._device import _device_constructors

from marsrl.rollout.imports import imports_for_good

_CPU = torch.device("cpu")
# Functions of torch that megatron calls with device="cuda" or pin_memory=True. They are listed because a TorchFunctionMode would
# intercept every operation and shape access of the process, which takes a quarter of a small model's step.
_FACTORIES = (
    "arange", "empty", "empty_like", "full", "full_like", "ones", "ones_like", "rand", "randn", "tensor", "zeros", "zeros_like"
)  # fmt: skip
_TO, _TYPE = torch.Tensor.to, torch.Tensor.type
_is_installed = False


def install() -> bool:
    """Prepare this process for megatron; True if the CPU shim is active, False if CUDA is used as is.

    Idempotent. On every machine it defines names that megatron-core leaves undefined without TransformerEngine or apex,
    and those that differ between its versions.

    Raises RuntimeError if megatron was imported earlier, without the shim.
    """
    if torch.cuda.is_available():
        _mend_on_every_machine()
        return False
    global _is_installed
    if not _is_installed:
        if "megatron.core" in sys.modules:
            raise RuntimeError(
                "megatron shim: megatron.core was imported before shim.install(), so its functions are already compiled; "
                "call marsrl.trainer.learner.megatron.shim.install() first"
            )
        with imports_for_good():
            _before_import()
            _is_installed = True
            _after_import()
    _mend_on_every_machine()
    return True


def _before_import() -> None:
    # Megatron would compile functions with jit_fuser, which is torch.compile, at import: a step takes 21.7 s instead of 0.03 s.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch._dynamo.config.disable = True
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU  # used as device= for nearly every buffer and parameter
    cuda.set_device = lambda device: None  # called by rank initialisation
    cuda.Stream = cuda.Event = _HostStream  # the token dispatcher and DDP create side streams
    cuda.current_stream = cuda.default_stream = lambda device=None: _STREAM
    cuda.stream = lambda stream=None: contextlib.nullcontext()  # gradient buffers are reduced on a side stream
    cuda.synchronize = lambda device=None: None  # called when a checkpoint is saved
    cuda.nvtx.range_push = lambda message: None  # the schedule of overlap_moe_expert_parallel_comm names its parts
    cuda.nvtx.range_pop = lambda: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()  # RNG tracker
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    _device_constructors()  # caches torch's own factories, which `with torch.device(...)` recognises by object
    for name in _FACTORIES:
        make = _on_cpu(getattr(torch, name))
        setattr(torch, name, make)
        _register_builtin(make, f"aten::{name}")  # other libraries' TorchScript functions call these factories
    tensor: Any = torch.Tensor
    tensor.cuda = lambda tensor, *args, **kwargs: tensor
    tensor.record_stream = lambda tensor, stream: None  # called by the schedule of overlap_moe_expert_parallel_comm
    tensor.to = _to  # accepts "cuda"
    tensor.type = _type


def _after_import() -> None:
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    # The RNG tracker writes CUDA generator states.
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # megatron warns if weights drawn under a "GPU" state advance the CPU's generator, which here is the same one.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    # Set before the first dispatcher creates it from torch.cuda.Stream, which vLLM on a CPU replaces by a stream without events.
    dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _STREAM
    # megatron returns CPU tensors unchanged, but all_to_all needs Python numbers.
    move = dispatcher.maybe_move_tensor_to_cpu

    def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else move(tensor, as_numpy, record_stream)

    dispatcher.maybe_move_tensor_to_cpu = move_to_host
    # gloo lacks all-gather and reduce-scatter of unequal parts, needed by ETP > 1 with EP > 1.
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def uneven_gather(
        x: Tensor, group: Any, output_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, output_split_sizes, use_global_buffer)
        padded = x.new_zeros((max(output_split_sizes), *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def uneven_scatter(
        x: Tensor, group: Any, input_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(x, group, input_split_sizes, use_global_buffer)
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split(list(input_split_sizes))[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = uneven_gather, uneven_scatter


def _mend_on_every_machine() -> None:
    """Define names that megatron-core lacks without TransformerEngine or apex, or in one of its versions; also on GPUs."""
    import megatron.core.distributed.distributed_data_parallel as data_parallel
    import megatron.core.models.gpt.gpt_model as gpt_model
    import megatron.core.optimizer.optimizer_config as optimizer_config
    import megatron.core.tensor_parallel as tensor_parallel
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.transformer_block as block
    import megatron.core.utils as utils

    from marsrl.kernels import main_grad

    if not hasattr(block.TransformerBlock, "_checkpointed_forward"):
        # 0.19 calls a function of the module, which a subclass of TransformerBlock cannot override.
        block.TransformerBlock._checkpointed_forward = block.checkpointed_forward
        block.checkpointed_forward = lambda self, **inputs: self._checkpointed_forward(**inputs)
        # Drop advice that 0.19 logs at every start: to use HybridModel, and to pass full_param_layout, which it computes itself.
        for module in (gpt_model, data_parallel):
            logging.getLogger(module.__name__).addFilter(_is_no_advice)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # Otherwise every MoE forward pass raises NameError.
    if utils.get_te_version() is None:
        # The precision-aware optimizer, needed for offloading, compares a missing version: TypeError.
        optimizer_config.is_te_min_version = lambda version, check_equality=True: False
    if not hasattr(random, "FP8GlobalStateManager"):
        # megatron treats its default fp8=False as true, so recomputing norms raises NameError.
        tensor_parallel.CheckpointWithoutOutput = partial(random.CheckpointWithoutOutput, fp8=None)
    if not layers._grad_accum_fusion_available:
        # Otherwise gradient_accumulation_fusion is refused without apex.
        layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = main_grad, True


def _is_no_advice(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "GPTModel IS DEPRECATED" not in message and "full_param_layout not provided" not in message


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory to return pageable CPU tensors instead of GPU tensors."""

    @wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return make


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args:
        args = (_to_cpu(args[0]), *args[1:])
    elif "device" in kwargs:
        kwargs["device"] = _to_cpu(kwargs["device"])
    return _TO(tensor, *args, **kwargs)


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    result = _TYPE(tensor, *args, **kwargs)
    if args or kwargs:
        return result
    # Megatron's optimizer groups parameters by the names of CUDA types; other callers get the true names.
    caller = sys._getframe(1).f_code.co_filename.replace("\\", "/")
    return result.replace("torch.", "torch.cuda.", 1) if "megatron/core/optimizer" in caller else result


def _to_cpu(device: Any) -> Any:
    is_cuda = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return _CPU if is_cuda else device


class _HostStream:
    """Single in-order stream of a host; its events are always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


_STREAM = _HostStream()
