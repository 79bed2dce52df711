"""The one layer spec of every policy: which module serves which part of a transformer layer.

                      TransformerEngine             ours
    norms             TENorm                        RMSNorm (attention.py) on kernels.rms_norm
    of q and k        HeadNorm on the same, with the rotation by position
    linear layers     TE{Column,Row}ParallelLinear  megatron's
    attention         PackedAttention: packed sequences and context parallelism on kernels.attention_varlen (flash-attn's
                      kernels where it is installed)
    activation        kernels.swiglu: of an MLP as Swiglu below, of experts with the router's weights
    experts           GroupedExperts on kernels.grouped_linear, with both
    tokens to experts TokenDispatcher (experts.py) on kernels.moe_permute, with both; model.py puts it there

Both norms are one kernel each way, or two, that keep their input and a number a row; neither was timed beside the other, and
where linear layers are TransformerEngine's its norm is taken with them.

TransformerEngine's modules are taken unfused, so that every parameter has one name with both: checkpoints, conversion and
export do not know which was chosen. Not run on a GPU.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from marsrl.kernels import swiglu
from marsrl.trainer.learner.megatron.attention import HeadNorm, NormedAttention, PackedAttention, RMSNorm
from marsrl.trainer.learner.megatron.experts import GroupedExperts


class Swiglu(MegatronModule):
    """The activation of a dense layer's MLP, where megatron would put TransformerEngine's (use_te_activation_func)."""

    def forward(self, products: Tensor) -> Tensor:
        """products [T, 1, 2 F] of this rank, the gate first; returns [T, 1, F]."""
        return swiglu(products)


def layer_spec(config: TransformerConfig, *, has_mlp_bias: bool) -> TransformerBlockSubmodules:
    """megatron's local spec with our attention and experts, and norms and linear layers as config.transformer_impl says.

    has_mlp_bias: the layers of a dense MLP have a bias; config.add_bias_linear speaks of the attention.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.sharded_state_dict_keys_map = {}  # it renames norms as TransformerEngine fuses them
    layer.self_attention.submodules.core_attention = PackedAttention
    if config.num_moe_experts:
        layer.mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=GroupedExperts))
    else:
        layer.mlp.submodules.activation_func = Swiglu
    if config.transformer_impl == "transformer_engine":
        norm = _take_transformer_engine(layer)
    else:
        norm = RMSNorm
    if has_mlp_bias != config.add_bias_linear and not config.num_moe_experts:
        mlp = layer.mlp.submodules
        mlp.linear_fc1, mlp.linear_fc2 = (_biased(each, has_mlp_bias) for each in (mlp.linear_fc1, mlp.linear_fc2))
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if config.qk_layernorm:
        layer.self_attention.module = NormedAttention
        attention = layer.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=norm)


def _biased(linear: Any, has_bias: bool) -> type:
    """The class of linear layers with a bias, or without: megatron's add_bias_linear is one for the attention and the MLP."""

    class Linear(linear):
        def __init__(self, *sizes: int, bias: bool, **options: Any) -> None:
            super().__init__(*sizes, bias=has_bias, **options)

    return Linear


def _take_transformer_engine(layer: Any) -> type:
    """Put its linear layers into the layer; returns its norm."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    attention = layer.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = TEColumnParallelLinear, TERowParallelLinear
    dense = getattr(layer.mlp.submodules, "linear_fc1", None)
    if dense is not None:
        layer.mlp.submodules.linear_fc1 = TEColumnParallelLinear
        layer.mlp.submodules.linear_fc2 = TERowParallelLinear
    norm: type = TENorm
    return norm
