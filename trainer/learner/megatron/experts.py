"""Experts of a MoE layer as two grouped linear layers after megatron's router, and the dispatch of tokens to them.

moe_permute     a row for each expert of a token, sorted by expert
  all-to-all    over expert parallelism, all-gather over the experts' tensor parallelism     (megatron's)
    moe_permute received rows, sorted by this rank's experts
      GroupedExperts, with the router's weights
    moe_unpermute
  reduce-scatter, all-to-all                                                                 (megatron's)
moe_unpermute   the sum of a token's rows

TokenDispatcher does these steps. With policies.<name>.dispatcher=deepep, DeepEP does the outer steps and sends a token once to
each rank (DeepEPExchange); with hybridep, DeepEP's HybridEP does all steps around GroupedExperts. Both are megatron's "flex"
dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, _DeepepManager
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.parameter import Parameter

from marsrl.kernels import RowOrder, grouped_linear, moe_permute, moe_unpermute, swiglu


class GroupedExperts(MegatronModule):
    """SwiGLU experts: down(silu(gate x) * up x), weighted by the router.

    Parameters; E is the number of this rank's experts, F this rank's part of an expert's width:
        gate_up: [E, 2, F, H], gate first. The separate dimension keeps gate and up apart under any cut, so that
            checkpoints reshard between layouts without knowing about SwiGLU.
        down: [E, H, F].
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, name: str | None = None
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.recomputes_activation = config.recompute_granularity == "selective"
        self.expert_group, self.tensor_group = pg_collection.ep, pg_collection.expt_tp
        self.data_group = pg_collection.expt_dp
        width = config.moe_ffn_hidden_size // self.tensor_group.size()
        options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.gate_up = Parameter(torch.empty(num_local_experts, 2, width, config.hidden_size, **options))
        self.down = Parameter(torch.empty(num_local_experts, config.hidden_size, width, **options))
        # The adapter's part of these matrices' output (adapter.py).
        self.adapted: Callable[[Sequence[str], Tensor, Tensor], Tensor | None] = lambda names, rows, counts: None
        for weight, dimension in ((self.gate_up, 2), (self.down, 2)):
            # Otherwise the gradient norm counts only one rank's part.
            set_tensor_model_parallel_attributes(weight, True, dimension, 1)
            weight.allreduce = self.expert_group.size() == 1  # type: ignore[attr-defined]  # selects DDP's group

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Compute [R, H] from rows [R, H] sorted by expert, tokens_per_expert [E] and the router's weights [R]; no bias.

        With selective recompute, the activation's output is dropped and recomputed from `gate x` and `up x`. Megatron's moe_act
        does the same, but only for megatron's own experts.
        """
        products = self._linear(rows, self.gate_up, tokens_per_expert, "gate_proj", "up_proj")
        if not (self.recomputes_activation and torch.is_grad_enabled()):
            return self._linear(swiglu(products, weights), self.down, tokens_per_expert, "down_proj"), None
        activation = CheckpointWithoutOutput(fp8=None)  # megatron treats fp8=False as enabled.
        inner = activation.checkpoint(swiglu, products, weights)
        output = self._linear(inner, self.down, tokens_per_expert, "down_proj")
        activation.discard_output_and_register_recompute(output)
        return output, None

    def _linear(self, rows: Tensor, weight: Parameter, tokens_per_expert: Tensor, *names: str) -> Tensor:
        """Return rows times weight, plus the adapter's part.

        The weight's gradient is accumulated directly in DDP's float32 buffer if there is one.
        """
        is_trained = torch.is_grad_enabled() and weight.requires_grad
        main_grad = getattr(weight, "main_grad", None) if is_trained else None
        out = grouped_linear(rows, weight, tokens_per_expert, main_grad=main_grad)
        adapted = self.adapted(names, rows, tokens_per_expert)
        return out if adapted is None else out.add_(adapted)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        """Return [experts, ...] tensors sharded over EP along the experts and over ETP along the width."""
        first = len(sharded_offsets)
        expert_cut = (first, self.expert_group.rank(), self.expert_group.size())
        width_cut = (first + 2, self.tensor_group.rank(), self.tensor_group.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                weight,
                *sharded_offsets,
                expert_cut,
                width_cut,
                replica_id=(0, 0, self.data_group.rank()),
                prepend_axis_num=first,
            )
            for name, weight in (("gate_up", self.gate_up), ("down", self.down))
        }


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's token dispatcher with kernels.moe_permute.

    The kernel sums in float32 and copies each row once per permutation. The dispatcher synchronises with the GPU only to read
    row counts before the all-to-all. Megatron's own dispatcher does so in every layer, and without TransformerEngine also to
    index by masks. State of a forward pass is dropped at its end.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of this rank's tokens by expert, and weights, from hidden_states [..., H], routing_map and probs [T, E]."""
        self.hidden_shape, self.sums_dtype = hidden_states.shape, probs.dtype
        self.tokens_per_expert = self.preprocess(routing_map)
        self.order = RowOrder.of_map(routing_map, self.num_out_tokens)
        self.order_of_received: RowOrder | None = None
        if self.ep_size * self.tp_size > 1:
            if self.num_local_experts > 1:
                self.counts_on_device = self.num_global_tokens_per_local_expert  # The next line copies it to the host.
            self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        return moe_permute(hidden_states.flatten(0, -2), probs, self.order)

    def dispatch_postprocess(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows for this rank's experts, sorted by expert, the rows per expert, and the weights."""
        if self.tp_size > 1:
            splits = self.output_splits_tp.tolist()
            rows, weights = (
                gather_from_sequence_parallel_region(tensor, group=self.tp_group, output_split_sizes=splits)
                for tensor in (rows, weights)
            )
        if self.ep_size * self.tp_size > 1 and self.num_local_experts > 1:
            counts = self.counts_on_device  # [senders, local experts]
            experts = torch.arange(self.num_local_experts, device=counts.device).expand_as(counts)
            of_row = experts.flatten().repeat_interleave(counts.flatten(), output_size=rows.shape[0])
            self.order_of_received = order = RowOrder.of_experts(of_row)
            rows, weights = moe_permute(rows, weights, order)
        return rows, self.tokens_per_expert, weights

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        """Restore the order in which rows arrived; sum over the ranks that share the experts."""
        if self.order_of_received is not None:
            rows = moe_unpermute(rows, self.order_of_received)
        if self.tp_size > 1:
            splits = self.output_splits_tp.tolist()
            summed = reduce_scatter_to_sequence_parallel_region(
                rows.to(self.sums_dtype), group=self.tp_group, input_split_sizes=splits
            )
            rows = summed.to(rows.dtype)
        return rows

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Sum each token's results, [..., H]."""
        if self.config.overlap_moe_expert_parallel_comm:
            for index in self.order:  # Its memory must not be reused before the current stream has read it.
                index.record_stream(torch.cuda.current_stream())
        out = moe_unpermute(rows, self.order).view(self.hidden_shape)
        del self.order, self.order_of_received, self.tokens_per_expert
        return out


class DeepEPExchange(_DeepepManager):
    """Megatron's exchange of tokens by DeepEP, with kernels.moe_permute between received tokens and rows of experts.

    A token's rows on a rank are summed in float32 and rounded once; DeepEP sums over ranks. Megatron's own permutation waits for
    the GPU in every layer, and sums in the dtype of the rows. Not run with DeepEP.
    """

    dispatched_indices: Any
    dispatched_probs: Any

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows, sorted by this rank's experts, and the rows' weights, from received tokens [R, H]."""
        chosen, probs = self.dispatched_indices, self.dispatched_probs  # [R, top-k]; -1: the expert is on another rank
        shape = (len(hidden_states), self.num_local_experts + 1)
        experts = torch.where(chosen < 0, self.num_local_experts, chosen)  # the last column is left out
        routing_map = torch.zeros(shape, dtype=torch.bool, device=chosen.device).scatter_(1, experts, True)
        weights = probs.new_zeros(shape).scatter(1, experts, probs)
        self.order = RowOrder.of_map(routing_map[:, :-1].contiguous(), int(self.tokens_per_expert.sum()))
        self.dispatched_indices = self.dispatched_probs = None
        return moe_permute(hidden_states, weights[:, :-1].contiguous(), self.order)

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of each received token's rows, [R, H]."""
        out = moe_unpermute(hidden_states, self.order)
        del self.order
        return out


def install_dispatcher(layer: MoELayer, backend: str) -> None:
    """Replace megatron's dispatcher of the layer, or its DeepEP manager, by ours."""
    if backend == "alltoall":
        layer.token_dispatcher.__class__ = TokenDispatcher
    elif backend == "deepep":
        layer.token_dispatcher._comm_manager.__class__ = DeepEPExchange
