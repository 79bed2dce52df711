"""Construction of a policy's Megatron model: transformer config, layer spec, data-parallel wrapper.

The module that serves each part of a transformer layer:

                      TransformerEngine             ours
    norms             TENorm                        RMSNorm (attention.py) on kernels.rms_norm
    q, k norms        HeadNorm on the same kernel, with the rotation by position
    linear layers     TE{Column,Row}ParallelLinear  megatron's
    attention         PackedAttention: packed sequences and context parallelism on kernels.attention_varlen (flash-attn's
                      kernels where it is installed)
    activation        kernels.swiglu: Swiglu below for an MLP; with the router's weights for experts
    experts           GroupedExperts on kernels.grouped_linear, in both columns
    tokens to experts TokenDispatcher (experts.py) on kernels.moe_permute, in both columns, or DeepEP; bare_model installs it

Each norm takes one or two kernels in each pass, and keeps its input and one number per row for the backward pass. We have not
compared the speed of the two norms. TransformerEngine's norm is used whenever its linear layers are used.

TransformerEngine's modules are used unfused, so that every parameter has the same name in both columns: checkpoints, conversion
and export do not depend on the choice. Not run on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from marsrl.kernels import swiglu
from marsrl.rollout.engines.local.model import rotary_frequencies
from marsrl.rollout.model_shape import ModelShape, read_shape
from marsrl.trainer.config import PolicyConfig
from marsrl.trainer.learner.megatron.attention import HeadNorm, NormedAttention, PackedAttention, RMSNorm, Segments
from marsrl.trainer.learner.megatron.balance import BalancedRouter
from marsrl.trainer.learner.megatron.convert import Converter
from marsrl.trainer.learner.megatron.experts import GroupedExperts, install_dispatcher
from marsrl.trainer.learner.megatron.head import PolicyModel
from marsrl.trainer.learner.megatron.layer_choice import PADS_HYBRIDEP, choose_fusions, choose_layers
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.learner.megatron.mapping import padded_rows

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # Recomputes norms, and the whole MLP of a dense layer; experts.py adds the experts' activation. Fused attention keeps no
    # scores, so recomputing it would save little.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
_RECOMPUTE["full_offload"] = _RECOMPUTE["full"]  # OffloadingBlock does the rest.
_RECOMPUTE["full_but_attention"] = _RECOMPUTE["full"]  # AttentionKeepingBlock does the rest.


class OffloadingBlock(TransformerBlock):
    """Transformer block that recomputes layers from their inputs, which are kept in host memory until the backward pass.

    megatron-core 0.16.1 has two ways to offload, and both need TransformerEngine: cpu_offloading excludes recomputation, and
    fine_grained_activation_offloading keeps pinned buffers by shape and expects the same number of micro-batches in each step.
    """

    def _checkpointed_forward(self, hidden_states: Tensor, **others: Any) -> Any:
        """Offload every layer's input: the kept tensors that have the shape of the first layer's input.

        The other kept tensors are the rotary angles, which all layers share; they stay on the device.
        """
        shape = hidden_states.shape  # The hook outlives this call, so it must not hold the tensor.

        def keep(tensor: Tensor) -> Tensor | tuple[Tensor, torch.device]:
            return (to_host(tensor), tensor.device) if tensor.shape == shape else tensor

        def give(kept: Tensor | tuple[Tensor, torch.device]) -> Tensor:
            return kept if isinstance(kept, Tensor) else to_device(*kept)

        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            return super()._checkpointed_forward(hidden_states=hidden_states, **others)


class AttentionKeepingBlock(TransformerBlock):
    """Transformer block that recomputes layers from their inputs, except for attention's output (attention.py)."""

    def _checkpointed_forward(self, *args: Any, packed_seq_params: Segments, **others: Any) -> Any:
        # Outputs are kept per micro-batch, because each has its own segments; without gradients, no layer is recomputed.
        packed_seq_params.kept = {} if torch.is_grad_enabled() else None
        return super()._checkpointed_forward(*args, packed_seq_params=packed_seq_params, **others)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned memory, asynchronously on the GPU's stream."""
    host_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host_tensor.copy_(tensor.detach(), non_blocking=True)


def to_device(kept: Tensor, device: torch.device) -> Tensor:
    return torch.empty(kept.shape, dtype=kept.dtype, device=device).copy_(kept, non_blocking=True)


class Swiglu(MegatronModule):
    """Activation of a dense layer's MLP, in place of TransformerEngine's (use_te_activation_func)."""

    def forward(self, products: Tensor) -> Tensor:
        """Return [T, 1, F] from this rank's products [T, 1, 2 F], gate first."""
        return swiglu(products)


def layer_spec(config: TransformerConfig, *, has_mlp_bias: bool) -> TransformerBlockSubmodules:
    """Return megatron's local spec with our attention and experts; norms and linear layers follow config.transformer_impl.

    has_mlp_bias: True if the linear layers of a dense MLP have a bias; config.add_bias_linear is for attention only.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.sharded_state_dict_keys_map = {}  # Megatron's map is for norms that TransformerEngine fuses into linear layers.
    layer.self_attention.submodules.core_attention = PackedAttention
    if config.num_moe_experts:
        layer.mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=GroupedExperts, router=BalancedRouter))
    else:
        linears = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
        layer.mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(**linears, activation_func=Swiglu))
    norm = _take_transformer_engine(layer) if config.transformer_impl == "transformer_engine" else RMSNorm
    if has_mlp_bias != config.add_bias_linear and not config.num_moe_experts:
        mlp = layer.mlp.submodules
        mlp.linear_fc1, mlp.linear_fc2 = (_biased(linear, has_mlp_bias) for linear in (mlp.linear_fc1, mlp.linear_fc2))
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if config.qk_layernorm:
        layer.self_attention.module = NormedAttention
        attention = layer.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=norm)


def _biased(linear: Any, has_bias: bool) -> type:
    """Return the linear layer's class with or without a bias; megatron's add_bias_linear is shared by attention and MLP."""

    class Linear(linear):
        def __init__(self, *sizes: int, bias: bool, **options: Any) -> None:
            super().__init__(*sizes, bias=has_bias, **options)

    return Linear


def _take_transformer_engine(layer: Any) -> type:
    """Put TransformerEngine's linear layers into the layer; return its norm."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    attention = layer.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = TEColumnParallelLinear, TERowParallelLinear
    if hasattr(layer.mlp.submodules, "linear_fc1"):  # True for a dense MLP.
        layer.mlp.submodules.linear_fc1 = TEColumnParallelLinear
        layer.mlp.submodules.linear_fc2 = TERowParallelLinear
    norm: type = TENorm
    return norm


def transformer_config(shape: ModelShape, layout: Layout, policy: PolicyConfig) -> TransformerConfig:
    dtype = torch.bfloat16 if policy.decided_dtype == "bfloat16" else torch.float32
    layers = choose_layers(policy.layers)
    fusions = choose_fusions(layers)
    # The default rejects variable lengths, also without experts.
    moe: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    if shape.num_experts:
        moe |= {
            "num_moe_experts": shape.num_experts,
            "moe_ffn_hidden_size": shape.ffn_size,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_pre_softmax": not shape.normalises_top_k,
            "moe_router_load_balancing_type": "none",  # BalancedRouter has its own loss.
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": layout.expert,
            "expert_tensor_parallel_size": layout.expert_tensor,
            "overlap_moe_expert_parallel_comm": policy.overlap_dispatch,
        }
        if policy.dispatcher != "alltoall":
            moe |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": policy.dispatcher}
        if policy.dispatcher == "hybridep" and PADS_HYBRIDEP in TransformerConfig.__dataclass_fields__:
            moe[PADS_HYBRIDEP] = True  # Ranks' micro-batches differ in length.
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_size,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        use_te_activation_func=not shape.num_experts,  # Calls our Swiglu, which layer_spec installs.
        add_bias_linear=shape.has_proj_bias,
        add_qkv_bias=shape.has_qkv_bias,
        qk_layernorm=shape.has_qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=fusions.gradient_accumulation is None,
        apply_rope_fusion=fusions.rope is None,
        deterministic_mode=policy.deterministic,
        # Every parameter is read from the HF directory, but without this megatron does not mark parameters cut over TP
        # ranks, and the gradient norm silently counts one rank's part of them.
        perform_initialization=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        sequence_parallel=layout.tensor > 1,  # megatron's MoE needs it with TP; it also saves activations.
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,  # Micro-batches differ in length, so pipeline stages exchange shapes.
        transformer_impl="transformer_engine" if layers.layers == "transformer_engine" else "local",
        calculate_per_token_loss=True,  # The loss is already divided by the global normaliser.
        **moe,
        **_RECOMPUTE[policy.recompute],
    )


def bare_model(shape: ModelShape, layout: Layout, policy: PolicyConfig) -> PolicyModel:
    """Build this rank's part of the model on the current device, with uninitialised parameters."""
    config = transformer_config(shape, layout, policy)
    model = PolicyModel(
        config=config,
        transformer_layer_spec=layer_spec(config, has_mlp_bias=shape.has_mlp_bias),
        vocab_size=padded_rows(shape.vocab_size, layout.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type="rope",
        real_vocab_size=shape.vocab_size,
    )
    rope = model.rotary_pos_emb  # megatron's llama3 scaling has a single factor for all models.
    rope.inv_freq = rotary_frequencies(shape, rope.inv_freq.device)
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            install_dispatcher(layer.mlp, policy.dispatcher)
    if policy.recompute == "full_offload":
        model.decoder.__class__ = OffloadingBlock
    elif policy.recompute == "full_but_attention":
        model.decoder.__class__ = AttentionKeepingBlock
    return model


def as_run(model: PolicyModel) -> torch.nn.Module:
    """Return the model in the form that megatron's schedule runs."""
    return Float16Module(model.config, model) if model.config.bf16 else model


def _nothing_to_sync(**_: object) -> None:
    """Do nothing, in place of megatron's collectives in a group of one rank."""


def skip_syncs_alone(ddp: DistributedDataParallel) -> None:
    """Leave out the collectives of a rank without data-parallel peers: they would copy gradients and weights onto themselves."""
    if ddp.ddp_config.overlap_grad_reduce:
        return  # megatron waits for the handles of these collectives.
    for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
        if ddp.ddp_config.use_distributed_optimizer:
            is_alone = group.intra_distributed_optimizer_instance_size == 1
        else:
            is_alone = group.data_parallel_group.size() == 1
        if is_alone:
            group.start_grad_sync = group.start_param_sync = _nothing_to_sync


def build_model(shape: ModelShape, layout: Layout, policy: PolicyConfig) -> tuple[PolicyModel, DistributedDataParallel]:
    """Build the bare model; return it, and the same model wrapped for training."""
    model = bare_model(shape, layout, policy)
    config = model.config
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=policy.optimizer.distributed,
            overlap_grad_reduce=policy.optimizer.overlap_grad_reduce,
            overlap_param_gather=policy.optimizer.overlap_param_gather,
        ),
        as_run(model),
    )
    if policy.optimizer.overlap_grad_reduce:
        config.no_sync_func = ddp.no_sync  # All micro-batches but the last only accumulate.
    skip_syncs_alone(ddp)
    # Drop the number of tokens that megatron would divide the gradient by: the loss is divided already.
    config.finalize_model_grads_func = lambda chunks, num_tokens=None, **options: finalize_model_grads(
        chunks, None, **options
    )
    return model, ddp


def frozen_model(model_dir: str | Path, layout: Layout, policy: PolicyConfig) -> Any:
    """Load the frozen KL reference on the policy's layout and dtype, without gradients or optimizer.

    The reference takes only the memory of its weights' shard on each rank.
    """
    shape = read_shape(model_dir)
    model = bare_model(shape, layout, policy.model_copy(update={"recompute": "none"}))
    Converter(model, shape).load(model_dir)
    return as_run(model).requires_grad_(False).eval()
