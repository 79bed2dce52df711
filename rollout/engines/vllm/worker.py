"""Methods added to vLLM's worker, to load new weights and report checksums of the weights that the kernels hold.

vLLM mixes `WorkerExtension` into its worker (`worker_extension_cls`) and calls the methods by name.

On a CPU vLLM computes with packed copies: a linear layer passes its weight to oneDNN and keeps an empty tensor, and experts are
reordered for the grouped GEMM. Checksums of the parameters would then prove little. So a linear layer's weight is recovered as
its product with the identity, and packed experts are compared with a new packing of the received ones. The cost on a CPU is
2 * rows * columns^2 FLOP per linear layer; none of this applies to a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from marsrl.rollout.engines.vllm.worker_adapters import held_checksums, repair_mixed_batches
from marsrl.rollout.engines.vllm.worker_fp8 import Fp8Weight, holds, is_fp8, why_not_written
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.state import decode
from marsrl.rollout.types import FloatArray
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.connections import TransferBroken
from marsrl.rollout.weights.direct import ReceivePlan, WeightReceiver
from marsrl.rollout.weights.files import WeightFiles
from marsrl.rollout.weights.layout import EngineShard, fuse, shard_layout

if TYPE_CHECKING:
    from marsrl.rollout.engines.vllm.sampling import DrawTokens


class WorkerExtension:
    """Methods mixed into vLLM's worker. Their arguments are small (paths, plans, keys), never tensors."""

    model_runner: Any
    vllm_config: Any
    rank: int  # among the engine's workers
    distributed_init_method: str

    def marsrl_started(self) -> str:
        """Patch bugs of vLLM's CPU build; return the workers' rendezvous file, or ""."""
        model = self.model_runner.get_model()
        if next(model.parameters()).device.type == "cpu":
            _heed_expert_maps(model)
            wait_asleep()
            _reduce_asleep()
            if self.vllm_config.lora_config is not None:
                repair_mixed_batches()
        method = self.distributed_init_method
        return method.removeprefix("file://") if method.startswith("file://") else ""

    def marsrl_shard(self) -> EngineShard:
        """Return this worker's part of the model."""
        parallel, parts = self.vllm_config.parallel_config, self.vllm_config.parallel_config.tensor_parallel_size
        num_kv_heads = self.vllm_config.model_config.get_total_num_kv_heads()
        spreads = parts > 1 and parallel.enable_expert_parallel
        return EngineShard.of(self.rank, parts, num_kv_heads, spreads_experts=spreads)

    def marsrl_load(self, path: str) -> None:
        """Load this worker's part of the safetensors files layer by layer into the tensors in use."""
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=iter(WeightFiles(path).items()))
        if next(model.parameters()).device.type == "cpu":
            _pack_experts(model, path, self.marsrl_shard(), self.vllm_config.model_config.dtype)
            _pack_heads(model)

    def marsrl_checksums(self, path: str) -> dict[str, int]:
        """Return {fused name: checksum}, equal to a received tensor's checksum only if the kernels compute with this tensor."""
        model = self.model_runner.get_model()
        dtype = self.vllm_config.model_config.dtype
        with torch.no_grad():
            sent = fuse(WeightFiles(path), dtype, shard=self.marsrl_shard())
            return _with_the_rest(model, {name: _held_checksum(model, name, received) for name, received in sent})

    def marsrl_adapter_checksums(self, number: int, path: str) -> dict[str, int]:
        """Return {tensor: checksum of the held weight} of the adapter loaded from this path."""
        return held_checksums(self.model_runner.lora_manager._adapter_manager, number, path, self.marsrl_shard())

    def marsrl_receive(self, plans: list[bytes]) -> str:
        """Receive weights by this worker's encoded ReceivePlan directly into the parameters. Not run on a GPU yet.

        Returns the reason if the transfer broke, else "". An exception would make vLLM return the other workers' results to the
        next call.
        """
        plan = decode(ReceivePlan, plans[self.rank])
        model = self.model_runner.get_model()
        if not hasattr(self, "_marsrl_receiver"):
            self._marsrl_receiver = WeightReceiver(next(model.parameters()).device)
        in_fp8 = {
            name: Fp8Weight(*of_layer, name, shape)
            for name, shape in shard_layout(plan.shapes, plan.shard).shapes.items()
            if is_fp8(*(of_layer := _module_of(model, name)))
        }
        try:
            shapes = self._marsrl_receiver.receive(plan, lambda name: in_fp8.get(name) or _held(model, name).data)
        except TransferBroken as error:
            return str(error) or "no reason"
        self._marsrl_received = shapes, plan.rendezvous.torch_dtype, in_fp8
        return ""

    def marsrl_received_checksums(self) -> dict[str, int]:
        """Return {fused name: checksum of the held weight} after marsrl_receive, without padding rows."""
        model, (shapes, dtype, in_fp8) = self.model_runner.get_model(), self._marsrl_received
        found = {
            name: in_fp8[name].checksum() if name in in_fp8 else checksum(_held(model, name)[: shape[0]].to(dtype))
            for name, shape in shapes.items()
        }
        return _with_the_rest(model, found)

    def marsrl_why_no_receive(self) -> str:
        """Explain why marsrl_receive cannot write into this worker's model; "" if it can."""
        model = self.model_runner.get_model()
        if next(model.parameters()).device.type == "cpu":
            return "vLLM on a CPU computes with packed copies of its weights; set sync.backend=shm"
        return why_not_written(model)

    def marsrl_keep_draft(self) -> None:
        """Copy the draft's weights to host memory, because sleep level 2 drops them and no update restores them.

        A draft without its own embedding or head uses the policy's, which updates restore.
        """
        shared = {id(parameter) for parameter in self.model_runner.get_model().parameters()}
        own = [each for each in self.model_runner.get_draft_model().parameters() if id(each) not in shared]
        self._marsrl_draft = [(each, each.data.to("cpu", copy=True)) for each in own]

    def marsrl_restore_draft(self) -> None:
        """Copy the weights of marsrl_keep_draft back; a no-op without them."""
        for parameter, kept in vars(self).pop("_marsrl_draft", ()):
            parameter.data.copy_(kept)

    def marsrl_settings(self) -> dict[str, tuple[float, ...]]:
        """Return EngineInfo.settings, read from the layers in use, without those whose attributes vLLM has renamed."""
        values_of: dict[str, set[float]] = {}
        for module in self.model_runner.get_model().modules():
            settings = {
                "norm_eps": getattr(module, "variance_epsilon", None),
                "rope_theta": module.base if hasattr(module, "cos_sin_cache") else None,
                "rope_factor": getattr(module, "scaling_factor", None),  # four attributes of Llama3RotaryEmbedding
                "rope_low_freq_factor": getattr(module, "low_freq_factor", None),
                "rope_high_freq_factor": getattr(module, "high_freq_factor", None),
                "rope_original_positions": getattr(module, "orig_max_position", None),
                "has_qk_norm": hasattr(module, "q_norm") if hasattr(module, "rotary_emb") else None,
                "experts_per_token": getattr(getattr(module, "router", None), "top_k", None),
                "normalises_top_k": getattr(getattr(module, "router", None), "renormalize", None),
            }
            for name, value in settings.items():
                if value is not None:
                    values_of.setdefault(name, set()).add(float(value))
        return {name: tuple(sorted(values)) for name, values in values_of.items()}

    def marsrl_divide_logits(self, temperature: float) -> None:
        """Divide the model's logits by the temperature from now on, since vLLM's prompt_logprobs ignore the temperature."""
        model = self.model_runner.get_model()
        vars(model).pop("compute_logits", None)
        compute = model.compute_logits

        def divided(*args: Any, **options: Any) -> Tensor | None:
            logits = compute(*args, **options)
            return None if logits is None else logits.float() / temperature  # None: another rank has the logits

        if temperature != 1:
            model.compute_logits = divided

    def marsrl_take_draws(self, keys: list[str], lengths: list[int]) -> list[tuple[FloatArray, KeptTokens | None]]:
        """Return (log-probs [n] in nats, kept tokens) for the first n tokens of each finished request that DrawTokens sampled."""
        return self._drawer().take(keys, lengths)

    def marsrl_forget_draws(self, keys: list[str]) -> None:
        """Free the slots of aborted requests in DrawTokens."""
        self._drawer().alive.forget(keys)

    def _drawer(self) -> DrawTokens:
        from marsrl.rollout.engines.vllm.sampling import DrawTokens

        return next(each for each in self.model_runner.input_batch.logitsprocs.all if isinstance(each, DrawTokens))


def wait_asleep() -> None:
    """Make this process's readers of vLLM's inter-process queues sleep until a message arrives.

    By default they spin for a second after each message, which is harmless with a GPU; on a CPU it takes cores from the
    engine's other processes and the trainer. vLLM's notification with each message wakes sleeping readers.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def note_read(condition: SpinCondition) -> None:
        condition.last_read = -math.inf  # vLLM would spin until `busy_loop_s` after this time

    SpinCondition.record_read = note_read  # type: ignore[method-assign]


def _reduce_asleep() -> None:
    """All-reduce over a CPU engine's processes with gloo, because vLLM's shared-memory version spins while waiting."""
    from vllm.distributed import parallel_state

    communicator: Any = parallel_state.get_tp_group().device_communicator
    if communicator is not None:  # several processes
        communicator.dist_module = torch.distributed


def _with_the_rest(model: nn.Module, sent: dict[str, int]) -> dict[str, int]:
    """Add the checksums of parameters that were not sent."""
    others = {_our_name(name): parameter for name, parameter in model.named_parameters()}
    unsent = others.keys() - sent.keys() - {f"{name}_scale_inv" for name in sent}
    return sent | {name: checksum(others[name]) for name in unsent}


def _our_name(name: str) -> str:
    """Convert vLLM's parameter name to our layout: drop the modules in which vLLM wraps experts and adapted layers."""
    return name.replace(".base_layer.", ".").replace(".mlp.experts.routed_experts.", ".mlp.experts.")


def _module_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, attribute = name.rsplit(".", 1)
    module = model.get_submodule(path)
    module = getattr(module, "base_layer", module)
    return getattr(module, "routed_experts", module) if path.endswith(".mlp.experts") else module, attribute


def _held(model: nn.Module, name: str) -> Tensor:
    """Return the tensor that the model computes with, by fused name."""
    module, attribute = _module_of(model, name)
    held = getattr(module, attribute)
    assert isinstance(held, Tensor), name
    return held


def _held_checksum(model: nn.Module, name: str, received: Tensor) -> int:
    module: Any
    module, attribute = _module_of(model, name)
    held = getattr(module, attribute)
    received = received.to(held.device)
    if is_fp8(module, attribute):
        # Inverted if they differ, as for experts below.
        return checksum(received) if holds(module, attribute, received) else ~checksum(held)
    if attribute in ("w13_weight", "w2_weight"):
        if held.device.type != "cpu":
            return checksum(held)
        same = held.shape == received.shape and torch.equal(_packed(module, received), held)
        # Inverted, because experts that were wrongly left unpacked have the expected checksum.
        return checksum(received) if same else ~checksum(held)
    if attribute == "weight" and hasattr(module, "cpu_linear") and not name.endswith("embed_tokens.weight"):
        identity = torch.eye(received.shape[1], dtype=received.dtype)
        product = module.cpu_linear(identity, module.weight, None).t()[: received.shape[0]]
        # Compare as numbers, since adding zeros turns -0.0 into 0.0.
        return checksum(received) if torch.equal(product.to(received.dtype), received) else checksum(product)
    held = held[: received.shape[0]]  # vLLM pads the vocabulary
    if held.dtype != received.dtype and torch.equal(held, received.to(held.dtype)):
        return checksum(received)  # the kernel keeps this tensor, a bias, in float32
    return checksum(held)


def _heed_expert_maps(model: nn.Module) -> None:
    """Patch vLLM's experts on a CPU with expert parallelism.

    vLLM 0.32's CPU kernel indexes a worker's experts by their number in the whole model and reads out of bounds. The patch routes
    tokens of other workers' experts to local expert 0 with weight 0; the owning worker adds their output.
    """
    layers = [module for module in model.modules() if getattr(module, "expert_map", None) is not None]
    for kind in {type(_experts_of(module)) for module in layers if hasattr(module, "w13_weight")}:
        kind.apply = _with_own_experts(kind.apply)


def _with_own_experts(apply: Callable[..., None]) -> Callable[..., None]:
    def apply_own(
        experts: Any, *, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, **others: Any
    ) -> None:
        if expert_map is not None:
            own = expert_map[topk_ids]
            topk_weights, topk_ids = topk_weights.masked_fill(own < 0, 0), own.clamp(min=0)
        apply(experts, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **others)

    return apply_own


def _packed(module: nn.Module, weight: Tensor) -> Tensor:
    """Pack the experts' weight for vLLM's CPU kernel."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(weight.contiguous(), _experts_of(module).isa)


def _experts_of(module: nn.Module) -> Any:
    return module.quant_method.moe_kernel.fused_experts  # type: ignore[union-attr]


def _pack_experts(model: nn.Module, path: str, shard: EngineShard, dtype: torch.dtype) -> None:
    """Patch vLLM's reload of experts on a CPU.

    vLLM 0.28-0.32 packs experts for its CPU kernel only at the first load: after a reload the kernel reads unpacked weights as
    packed ones, which gives garbage without an error. Experts that are still unpacked are packed here; a fixed vLLM makes this a
    no-op. The checksum verifies the result either way.
    """
    with torch.no_grad():
        received = WeightFiles(path)
        for name, weight in fuse({n: received[n] for n in received if ".mlp.experts." in n}, dtype, shard=shard):
            module, attribute = _module_of(model, name)
            held = getattr(module, attribute)
            if held.dtype == weight.dtype and held.shape == weight.shape and torch.equal(held, weight):
                held.copy_(_packed(module, weight))


def _pack_heads(model: nn.Module) -> None:
    """Patch vLLM's reload of a tied head on a CPU.

    The head shares the embedding's weight but computes with its own packed copy, which vLLM 0.32 refreshes only if the head
    itself was loaded, so a tied head would keep the old weights. Here layers with both a weight and a packed copy are repacked.
    """
    with torch.no_grad():
        module: Any
        for module in model.modules():
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
