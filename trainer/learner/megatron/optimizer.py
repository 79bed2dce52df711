"""Megatron's distributed AdamW: the schedule, the guarded step, and fixes for checkpoints without TransformerEngine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamGroupOverride, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate

from marsrl.trainer.config import OptimizerConfig


def optimizer_options(config: OptimizerConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    """Convert our optimizer settings to Megatron's.

    Offloading needs three settings: its fraction is 0 by default, and without the precision-aware optimizer the float32
    copies of the weights stay on the GPU.
    """
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.grad_clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.distributed,
        overlap_param_gather=config.overlap_param_gather,
        optimizer_cpu_offload=config.offload,
        optimizer_offload_fraction=1.0 if config.offload else 0.0,
        use_precision_aware_optimizer=config.offload,
    )


class Optimizer:
    """AdamW over a DDP model, its state sharded over data-parallel ranks unless configured otherwise.

    Vectors (norms, biases) get no weight decay.
    """

    def __init__(self, model: DistributedDataParallel, config: OptimizerConfig) -> None:
        self._model = model
        options = optimizer_options(config, model.config.params_dtype)
        is_precision_aware = options.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        self._gradients_in = "decoupled_grad" if is_precision_aware else "grad"
        self._clip, self._weight_decay = config.grad_clip, config.weight_decay
        # On CPUs scaling is a separate pass, which keeps results bitwise the same: the fused AdamW divides by 1 / shrink.
        self._clips_inside = next(model.parameters()).is_cuda
        vectors = ParamKey(predicate=ParamPredicate(name="vector", fn=lambda parameter: parameter.ndim == 1))
        self._whole = get_megatron_optimizer(options, [model], {vectors: ParamGroupOverride(wd_mult=0.0)})
        self._prime()
        for part in self.parts() if config.distributed else ():
            gathered = part.get_parameter_state_dp_zero
            part.get_parameter_state_dp_zero = functools.partial(_where_parameters_are, part.buffers, gathered)

    def zero_grad(self) -> None:
        self._model.zero_grad_buffer()
        self._whole.zero_grad()

    def grad_norm(self) -> float:
        """Return the norm of the summed gradient over all ranks; the same on each, non-finite if any gradient is."""
        self._whole.prepare_grads()
        return float(self._whole.get_grad_norm())

    def apply(self, grad_norm: float, lr: float) -> None:
        """Clip to the config's norm and update the weights; call after grad_norm()."""
        shrink = self._clip / (grad_norm + 1e-6)
        for part in self.parts():
            for group in part.optimizer.param_groups:
                group["lr"] = lr
                # megatron's scheduler applies wd_mult; without one, norms and biases would be decayed.
                group["weight_decay"] = self._weight_decay * group.get("wd_mult", 1.0)
                if isinstance(part.optimizer, torch.optim.AdamW | HybridDeviceOptimizer):
                    # A fused update takes one pass without copies; set here, because a load replaces the groups.
                    group["fused"] = True
            if self._clips_inside and isinstance(part.optimizer, torch.optim.AdamW):
                # The fused update divides gradients by grad_scale while it reads them.
                fused: Any = part.optimizer
                fused.grad_scale = torch.tensor(1 / shrink) if shrink < 1 else None
                continue
            for parameter in part.get_parameters() if shrink < 1 else ():
                # Scale in place: without TransformerEngine megatron's function makes a scaled copy and copies it back.
                if (gradient := getattr(parameter, self._gradients_in, None)) is not None:
                    gradient.mul_(shrink)
        self._whole.step_with_ready_grads()

    def gather_weights(self) -> None:
        """Gather every rank's updated weights now, if this is deferred to the next forward pass. Collective."""
        if self._model.ddp_config.overlap_param_gather:
            self._model.start_param_sync(force_sync=True)

    def reload_weights(self) -> None:
        """Refresh the float32 copies of bfloat16 weights from the model after a load."""
        self._whole.reload_model_params()

    def sharded_state_dict(self, model_state: Any, metadata: dict[str, Any], *, is_loading: bool) -> Any:
        return self._whole.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)

    @torch.no_grad()
    def load_state_dict(self, state: Any) -> None:
        with _step_from_groups():
            self._whole.load_state_dict(state)
        for part in self.parts():
            for state_of in part.optimizer.state.values():
                # A load gives all parameters one shared `step`, which AdamW would advance once per parameter.
                if "step" in state_of:
                    state_of["step"] = state_of["step"].to(state_of["exp_avg"].device, copy=True)

    def parts(self) -> list[Any]:
        """Megatron's optimizers on this rank, for dense parameters and for experts."""
        parts = getattr(self._whole, "chained_optimizers", [self._whole])
        return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]

    def _prime(self) -> None:
        """Create AdamW's zero state now.

        megatron's state_dict asserts on an empty state, and loading into an offloaded optimizer starts with a step along random
        gradients.
        """
        for part in self.parts():
            # HybridDeviceOptimizer uses torch's AdamW on the CPU, regardless of what is installed.
            is_hybrid = isinstance(part.optimizer, HybridDeviceOptimizer)
            if HAVE_APEX_OR_TE and not is_hybrid:
                continue
            for adam in part.optimizer.sub_optimizers if is_hybrid else [part.optimizer]:
                for group in adam.param_groups:
                    for parameter in group["params"]:
                        adam.state[parameter] = {
                            "step": torch.tensor(
                                0.0, device=parameter.device
                            ),  # The fused update expects `step` on this device.
                            "exp_avg": torch.zeros_like(parameter),
                            "exp_avg_sq": torch.zeros_like(parameter),
                        }
            if is_hybrid:
                part.optimizer._sync_sub_optimizers_state_to_hdo()


def _where_parameters_are(buffers: Sequence[Any], gathered: Callable[..., Any], *words: Any, **options: Any) -> Any:
    """Gather optimizer state for saving as megatron does, with padding between buckets restored.

    megatron-core 0.16.1 omits this padding, and then reads at offsets that include it. After a padded bucket (tied embeddings
    under pipeline parallelism, or many buckets) it saved wrong states without an error.
    """
    state = gathered(*words, **options)
    for index, buffer in enumerate(buffers if state is not None else ()):
        if all(bucket.offset + bucket.numel_unpadded <= buffer.numel_unpadded for bucket in buffer.buckets):
            continue  # No padding, or only after the last bucket.
        for of_dtype in state[index].values():
            for name in ("param", "exp_avg", "exp_avg_sq"):
                if name not in of_dtype:  # Another rank holds it.
                    continue
                parts = of_dtype[name].split([bucket.numel_unpadded for bucket in buffer.buckets])
                full_state = of_dtype[name] = parts[0].new_zeros(buffer.numel)
                for bucket, part in zip(buffer.buckets, parts, strict=True):
                    full_state[bucket.offset : bucket.offset + bucket.numel_unpadded] = part
    return state


@contextlib.contextmanager
def _step_from_groups() -> Iterator[None]:
    """Take AdamW's 0-dim `step` from the parameter groups while loading; megatron expects it among the moments."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(optimizer: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        original(optimizer, parameter, {**tensors, "step": state["step"]} if "step" in state else tensors)

    if not HAVE_APEX_OR_TE:
        DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
