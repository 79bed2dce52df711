"""AdamW in two forms: Megatron's distributed optimizer, and one for all adapters of a base.

Megatron's optimizer is patched so that its checkpoints work without TransformerEngine.

optimizer.zero_grad()
...                                        # backward passes
norms = optimizer.grad_norms()             # of each policy
optimizer.apply(norms, rates)              # learning rates; None: the policy keeps its weights
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamGroupOverride, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate
from torch import Tensor

from marsrl.trainer.config import OptimizerConfig
from marsrl.trainer.learner.megatron.adapter import Bank, FrozenBase


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

    Vectors (norms, biases) get no weight decay. Norms and rates are lists of one number, at index `slot`;
    BankOptimizer has one number for each adapter.
    """

    slot = 0

    def __init__(self, model: DistributedDataParallel, config: OptimizerConfig) -> None:
        self._model = model
        options = optimizer_options(config, model.config.params_dtype)
        is_precision_aware = options.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        self._gradients_in = "decoupled_grad" if is_precision_aware else "grad"
        self._clip, self._weight_decay = config.grad_clip, config.weight_decay
        # On CPUs gradients are scaled in a separate pass; the fused AdamW would divide by 1 / shrink, which rounds differently.
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

    @property
    def joint(self) -> Optimizer:
        return self

    def grad_norms(self) -> list[float]:
        """Return the norm of the summed gradient over all ranks; the same on each, non-finite if any gradient is."""
        self._whole.prepare_grads()
        return [float(self._whole.get_grad_norm())]

    def apply(self, norms: Sequence[float], rates: Sequence[float | None]) -> None:
        """Clip the gradients and update the weights at this learning rate; call it after grad_norms()."""
        (grad_norm,), (lr,) = norms, rates
        shrink = self._clip / (grad_norm + 1e-6)
        for part in self.parts():
            for group in part.optimizer.param_groups:
                group["lr"] = lr
                # Without megatron's scheduler, nothing else applies wd_mult, which exempts norms and biases from decay.
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

    def state_tensors(self) -> Iterator[Tensor]:
        """Yield AdamW's moments and the weights that it updates: float32 copies, or the model's own."""
        for part in self.parts():
            yield from (parameter for group in part.optimizer.param_groups for parameter in group["params"])
            states = part.optimizer.state.values()
            yield from (value for state in states for value in state.values() if isinstance(value, Tensor))

    def gradient_tensors(self) -> list[Tensor]:
        """Return DDP's flat gradient buffers."""
        return [buffer.grad_data for buffer in (*self._model.buffers, *self._model.expert_parallel_buffers)]

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
                            # The fused update expects `step` on this device.
                            "step": torch.tensor(0.0, device=parameter.device),
                            "exp_avg": torch.zeros_like(parameter),
                            "exp_avg_sq": torch.zeros_like(parameter),
                        }
            if is_hybrid:
                part.optimizer._sync_sub_optimizers_state_to_hdo()


class BankOptimizer:
    """AdamW over all adapters: each has its own norm, clipping, learning rate, step count and skipped steps.

    With optimizer.distributed the data-parallel ranks divide the columns of a row among themselves. Two settings apply to all
    adapters at once: `distributed` if every adapter sets it, `offload` if any adapter sets it.
    """

    def __init__(self, bank: Bank, configs: Sequence[OptimizerConfig]) -> None:
        bank.join()
        self.bank, self._clips = bank, [config.grad_clip for config in configs]
        self.is_distributed = all(config.distributed for config in configs)
        is_offloaded = any(config.offload for config in configs)
        self.main: dict[bool, Tensor] = {}  # This rank's columns of the weights, in float32.
        for kind, rows in bank.buffers.items():
            own = self.own(kind, rows.weights).detach()
            self.main[kind] = own.to("cpu" if is_offloaded else own.device, torch.float32)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [
                {
                    "params": [self.main[kind][row] for kind, _, row in bank.rows_of(slot)],
                    "betas": config.betas,
                    "eps": config.eps,
                    "weight_decay": config.weight_decay,
                }
                for slot, config in enumerate(configs)
            ],
            fused=True,
        )
        for row in (row for group in self.optimizer.param_groups for row in group["params"]):
            self.optimizer.state[row] = {  # Checkpoints hold this state from the start.
                "step": torch.tensor(0.0, device=row.device),
                "exp_avg": torch.zeros_like(row),
                "exp_avg_sq": torch.zeros_like(row),
            }

    def state_tensors(self) -> Iterator[Tensor]:
        """Yield AdamW's moments and the weights that it updates: float32 copies, or the adapters' own."""
        yield from self.main.values()
        for state in self.optimizer.state.values():
            yield from state.values()

    def own(self, kind: bool, rows: Tensor) -> Tensor:
        """Return the columns of rows [..., P] whose state this rank has."""
        group = self.bank.buffers[kind].group
        return rows.chunk(group.size(), -1)[group.rank()] if self.is_distributed else rows

    def zero_grad(self) -> None:
        for rows in self.bank.buffers.values():
            rows.gradients.zero_()

    def finalize(self) -> None:
        """Sum the gradients over data-parallel ranks, and those of whole matrices over tensor-parallel ranks. Collective."""
        tensor = parallel_state.get_tensor_model_parallel_group()
        for kind, rows in self.bank.buffers.items():
            gradient = rows.gradients
            if tensor.size() > 1 and rows.num_whole:
                whole = gradient[:, : rows.num_whole].contiguous()
                dist.all_reduce(whole, group=tensor)
                gradient[:, : rows.num_whole] = whole
            if rows.group.size() == 1:
                continue
            if not self.is_distributed:
                dist.all_reduce(gradient, group=rows.group)
                continue
            own = self.own(kind, gradient)
            for handle in [
                dist.reduce_scatter_tensor(own[slot], row, group=rows.group, async_op=True)
                for slot, row in enumerate(gradient)
            ]:
                handle.wait()

    def grad_norms(self) -> list[float]:
        """Return the norm of each adapter's summed gradient over all ranks; the same on each, non-finite if any gradient is."""
        squares = torch.zeros(len(self._clips), device=self.bank.scales.device)
        for kind, rows in self.bank.buffers.items():
            if not self.is_distributed and rows.group.rank():
                continue  # Another rank counts the same numbers.
            own = self.own(kind, rows.gradients)
            first = rows.num_whole if parallel_state.get_tensor_model_parallel_rank() else 0
            start = rows.group.rank() * own.shape[-1]
            squares[rows.slots] += torch.linalg.vector_norm(own[:, max(0, first - start) :], dim=1).square()
        dist.all_reduce(squares)
        norms: list[float] = squares.sqrt().tolist()
        return norms

    def apply(self, norms: Sequence[float], rates: Sequence[float | None]) -> None:
        """Clip each adapter to its config's norm and update it at its learning rate; None: it keeps weights and moments.

        Call after grad_norms().
        """
        for slot, (rate, group) in enumerate(zip(rates, self.optimizer.param_groups, strict=True)):
            group["lr"], shrink = rate, self._clips[slot] / (norms[slot] + 1e-6)
            for main, (kind, rows, row) in zip(group["params"], self.bank.rows_of(slot), strict=True):
                main.grad = None  # AdamW skips a row without a gradient.
                if rate is not None:
                    gradient = self.own(kind, rows.gradients)[row]
                    main.grad = (gradient.mul_(shrink) if shrink < 1 else gradient).to(main.device)
        self.optimizer.step()
        for slot in (slot for slot, rate in enumerate(rates) if rate is not None):
            self._write(slot)

    def _write(self, slot: int) -> None:
        """Write the float32 copies, gathered from all ranks that have a part, to the weights."""
        for kind, rows, row in self.bank.rows_of(slot):
            weights, main = rows.weights[row], self.main[kind][row]
            own = self.own(kind, weights)
            if own.data_ptr() != main.data_ptr():
                own.copy_(main)
            if self.is_distributed and rows.group.size() > 1:
                dist.all_gather_into_tensor(weights, own, group=rows.group)


@dataclass(frozen=True)
class AdapterOptimizer:
    """One adapter's part of its base's optimizer, `joint`, which takes the steps of all adapters together."""

    base: FrozenBase
    slot: int

    @property
    def joint(self) -> BankOptimizer:
        if self.base.optimizer is None:
            self.base.optimizer = BankOptimizer(self.base.trained, self.base.optimizer_configs)
        return self.base.optimizer

    @property
    def bank(self) -> Bank:
        return self.base.trained

    def parts(self) -> list[BankOptimizer]:
        return [self.joint]

    def gather_weights(self) -> None:
        """Do nothing: `apply` gathers them."""

    def reload_weights(self) -> None:
        """Refresh the float32 copies of bfloat16 weights from the adapter after a load."""
        for kind, rows, row in self.bank.rows_of(self.slot):
            self.joint.main[kind][row].copy_(self.joint.own(kind, rows.weights[row]))

    def sharded_state_dict(self, model_state: Any, metadata: dict[str, Any], *, is_loading: bool) -> Any:
        """Return the adapter's optimizer state in the format of Megatron's optimizer. Collective."""
        state = {}
        for key, rows in self._rows().items():
            whole = {kind: self._whole(kind, row, is_loading=is_loading) for kind, row in rows.items()}
            for name, view in self._named_views(whole):
                state[f"{key}.{name}"] = make_sharded_optimizer_tensor(
                    model_state[name], view, f"optimizer.state.{key}"
                )
        return {"state": state, "param_groups": [{"step": float(self._steps()[0])}]}

    @torch.no_grad()
    def load_state_dict(self, state: Any) -> None:
        rows_of = self._rows()
        for key, rows in rows_of.items():
            whole = {kind: torch.zeros_like(self.bank.buffers[kind].weights[0], dtype=torch.float32) for kind in rows}
            for name, view in self._named_views(whole):
                view.copy_(state["state"][f"{key}.{name}"])
            for kind, row in rows.items():
                row.copy_(self.joint.own(kind, whole[kind]))
        for step in self._steps():
            step.fill_(state["param_groups"][0]["step"])
        if len(rows_of) == 2:
            self.reload_weights()

    def _whole(self, kind: bool, row: Tensor, *, is_loading: bool) -> Tensor:
        """Return a row [P] with the columns of all ranks; with is_loading, an uninitialised row."""
        buffer = self.bank.buffers[kind]
        whole = torch.empty_like(buffer.weights[0], dtype=torch.float32)
        if is_loading:
            return whole
        self.joint.own(kind, whole).copy_(row)
        if self.joint.is_distributed and buffer.group.size() > 1:
            dist.all_gather_into_tensor(whole, self.joint.own(kind, whole), group=buffer.group)
        return whole.cpu()

    def _named_views(self, rows: Mapping[bool, Tensor]) -> Iterator[tuple[str, Tensor]]:
        adapter = self.bank.adapters[self.slot]
        names = {weight: name for name, weight in adapter.named_parameters()}
        for (_, _, weight), view in zip(adapter.matrices(), self.bank.views(adapter, rows), strict=True):
            yield names[weight], view

    def _rows(self) -> dict[str, dict[bool, Tensor]]:
        """Return this rank's columns of the float32 weights and the moments, by Megatron's names for them."""
        optimizer, kinds = self.joint.optimizer, [kind for kind, *_ in self.bank.rows_of(self.slot)]
        rows = dict(zip(kinds, optimizer.param_groups[self.slot]["params"], strict=True))
        states = {
            key: {kind: optimizer.state[row][key] for kind, row in rows.items()} for key in ("exp_avg", "exp_avg_sq")
        }
        if self.joint.is_distributed:
            return {"param": rows, **states}
        is_copy = next(iter(self.bank.buffers.values())).weights.dtype != torch.float32
        return {"fp32_param": rows, **states} if is_copy else states

    def _steps(self) -> list[Tensor]:
        optimizer = self.joint.optimizer
        return [optimizer.state[row]["step"] for row in optimizer.param_groups[self.slot]["params"]]


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
