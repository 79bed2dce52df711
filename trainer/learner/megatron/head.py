"""GPTModel over packed micro-batches with a fused loss, which never materialises logits.

Nothing here synchronises with the device: the number of scored rows is known from packing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from marsrl.kernels import LossInputs, PolicyLoss, linear_logprob, linear_policy_loss, mpt_gate
from marsrl.trainer.config import MptConfig
from marsrl.trainer.data.packing import PackedBatch
from marsrl.trainer.learner.megatron.attention import Segments, gather_rows


@dataclass(frozen=True)
class HeadResult:
    """Loss of a micro-batch, its gate ([S] bool, samples that mask mastered tokens; None: no gate) and its inputs."""

    policy: PolicyLoss
    gate: Tensor | None
    inputs: LossInputs


class FusedHead(ColumnParallelLinear):
    """Output layer that passes its shard to a fused op; names and checkpoint format are megatron's.

    It is called as a module, so that hooks which gather parameters before use still run.
    """

    def forward(self, input_: Tensor, weight: Tensor | None, compute: Callable[[Tensor, Tensor], Any]) -> Any:
        """Return compute(hidden [T, H], weight [V / TP, H])."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        return compute(hidden.flatten(0, 1), self.weight if weight is None else weight)


class PolicyModel(GPTModel):
    """GPTModel whose forward pass takes a PackedBatch.

    On the last pipeline stage it returns HeadResult if a loss is given (mpt: the settings of its gate), else log-probs
    [T] float32; on other stages the hidden states [T / TP, 1, H].
    active: adapters to add to the layers (adapter.py: ActiveAdapters).
    """

    def __init__(self, *args: Any, real_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.real_vocab_size = real_vocab_size
        self.active: Any = None  # Adapters that the layers currently add.
        if self.post_process:
            self.output_layer.__class__ = FusedHead

    def forward(
        self, batch: PackedBatch, loss: LossInputs | None = None, mpt: MptConfig | None = None, active: Any = None
    ) -> Any:
        self.active, inputs = active, self._inputs(batch)
        embedded, angles, *_, padding_mask = self._preprocess(**inputs)
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=inputs["packed_seq_params"],
            padding_mask=padding_mask,
        )
        if active is not None and hidden.requires_grad:
            # Recomputed layers must use this micro-batch's adapters.
            hidden.register_hook(lambda gradient: setattr(self, "active", active))
        return self._scored(hidden, batch, loss, mpt) if self.post_process else hidden

    def plan(
        self, batch: PackedBatch, loss: LossInputs, mpt: MptConfig, active: Any
    ) -> tuple[Any, Callable[[Tensor], Any]]:
        """Return megatron's plan of a forward and backward pass, and the function that ends the forward pass.

        By the plan (combined_1f1b.py), parts of each layer run between those of another micro-batch.
        """
        self.active, inputs, results = active, self._inputs(batch), list[HeadResult]()

        def compute(hidden: Tensor) -> Tensor:
            results.append(self._scored(hidden, batch, loss, mpt))
            return results[0].policy.loss

        for layer in self.decoder.layers:
            layer.mlp.router.padding_mask = inputs["padding_mask"].t()  # The plan calls routers without the mask.
        plan = self.build_schedule_plan(**inputs, attention_mask=None, extra_block_kwargs={"compute": compute})
        return plan, lambda total: (total.clone(), torch.zeros((), dtype=torch.int, device=total.device), results[0])

    def _inputs(self, batch: PackedBatch) -> dict[str, Any]:
        return {
            "input_ids": batch.token_ids[None],
            "position_ids": batch.position_ids[None],
            "packed_seq_params": Segments.of(batch, self.pg_collection.cp),
            "padding_mask": self._padding(batch) if self.config.num_moe_experts else None,
        }

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packed_seq_params: Segments,
        padding_mask: Tensor | None,
        **unused: Any,
    ) -> tuple[Tensor | None, Tensor, None, None, None, Tensor | None]:
        """Return embeddings, angles and padding_mask in the places where megatron's plan expects them."""
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        if embedded is not None and self.active is not None and torch.is_grad_enabled():
            embedded.requires_grad_()  # Otherwise recomputed layers, and the parts of megatron's plan, would have no gradient.
        # Gather each token's angles, [T, 1, 1, D], from those of the longest sequence; each angle is stored twice.
        angles = self.rotary_pos_emb(packed_seq_params.max_seqlen, packed_seq=True)[position_ids[0]]
        if self.config.qk_layernorm:  # NormedAttention applies the rotation.
            once = angles.flatten(1).chunk(2, dim=-1)[0]
            angles = torch.cat((once.cos(), once.sin()), dim=-1)
        return embedded, angles, None, None, None, padding_mask

    def _postprocess(self, hidden_states: Tensor, extra_block_kwargs: dict[str, Any], **unused: Any) -> Tensor:
        """End megatron's plan of a forward pass."""
        loss: Tensor = extra_block_kwargs["compute"](hidden_states)
        return loss

    def _scored(self, hidden: Tensor, batch: PackedBatch, loss: LossInputs | None, mpt: MptConfig | None) -> Any:
        """Return HeadResult if a loss is given, else log-probs."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

        def compute(rows: Tensor, shard: Tensor) -> HeadResult | Tensor:
            if batch.paths is not None:
                rows = gather_rows(rows, batch.paths.predicting)
            if loss is None or mpt is None:
                return self._logprobs(batch, rows, shard)
            return self._loss(batch, loss, mpt, rows, shard)

        return self.output_layer(hidden, weight, compute)

    def _padding(self, batch: PackedBatch) -> Tensor:
        """Return [1, T / TP] bool, True for padding of this rank; megatron-core 0.16.1's docstrings say the opposite."""
        is_padding = batch.is_padding[None]
        if self.config.sequence_parallel:
            is_padding = is_padding.chunk(self.pg_collection.tp.size(), dim=1)[self.pg_collection.tp.rank()]
        return is_padding

    def _logprobs(self, batch: PackedBatch, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return log-probs [T] float32, nats; 0 outside the mask, where nothing is computed."""
        rows = batch.trained_rows
        logprobs = torch.zeros(batch.num_tokens, device=hidden.device)
        if rows.numel():
            logprobs[rows] = self._statistics(batch, hidden, weight, rows).logprobs
        return logprobs

    def _statistics(
        self,
        batch: PackedBatch,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor,
        temperature: Tensor | float | None = None,
    ) -> Any:
        """Return log-probs and entropy [R] of these rows, at `temperature` over the whole vocabulary.

        temperature None: at the sampling temperature, over the tokens that the sampler kept.
        """
        support = None
        if temperature is None:
            support = None if batch.support is None else batch.support.take(rows)
            temperature = batch.temperature[rows] if isinstance(batch.temperature, Tensor) else batch.temperature
        with torch.no_grad():
            return linear_logprob(
                hidden.detach()[rows],
                weight,
                batch.targets[rows],
                temperature=temperature,
                tp_group=self.pg_collection.tp,
                real_vocab_size=self.real_vocab_size,
                support=support,
            )

    def _loss(self, batch: PackedBatch, loss: LossInputs, mpt: MptConfig, hidden: Tensor, weight: Tensor) -> HeadResult:
        gate, dropped = self._gate(batch, mpt, hidden, weight)
        inputs = replace(loss, gate=gate if dropped is None else None, dropped=dropped)
        policy = linear_policy_loss(
            hidden,
            weight,
            batch.targets,
            inputs,
            temperature=batch.temperature,
            # The kernel accumulates into DDP's float32 gradient buffer of the head.
            main_grad=weight.main_grad if torch.is_grad_enabled() and weight.requires_grad else None,  # type: ignore[attr-defined]
            tp_group=self.pg_collection.tp,
            real_vocab_size=self.real_vocab_size,
            support=batch.support,
        )
        return HeadResult(policy, gate, inputs)

    def _gate(
        self, batch: PackedBatch, mpt: MptConfig, hidden: Tensor, weight: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return (gate [S] bool, dropped [T] bool): sequences whose mastered tokens are masked; these tokens.

        The gate is None with scope `off`, and may be None without positive samples. `dropped` is None unless mpt.temperature=1:
        by default the loss finds the tokens itself, at the sampling temperature. The gate takes one pass over the hidden states.

        Scope `sample` reads only positive samples, if there are any. Other samples are never gated, so their entropy
        stays 0. A sample's entropy is summed over the context-parallel ranks that hold its parts. Scope `batch` reads all
        tokens of all ranks; the learner checks that each rank has one micro-batch.
        """
        if mpt.scope == "off":
            return None, None
        if mpt.scope == "batch":
            rows, group = batch.trained_rows, parallel_state.get_data_parallel_group(with_context_parallel=True)
        else:
            rows, group = batch.positive_rows, self.pg_collection.cp if self.pg_collection.cp.size() > 1 else None
        if not rows.numel() and group is None:
            return None, None
        entropy = torch.zeros(batch.num_tokens, device=hidden.device)
        is_mastered = torch.zeros(batch.num_tokens, dtype=torch.bool, device=hidden.device)
        is_own = mpt.temperature == 1
        if rows.numel():
            statistics = self._statistics(batch, hidden, weight, rows, 1.0 if is_own else None)
            entropy[rows] = statistics.entropy
            if is_own:
                is_mastered[rows] = statistics.logprobs.exp() >= mpt.probability
        gate = mpt_gate(
            entropy,
            batch.mask,
            batch.cu_seqlens,
            batch.is_positive,
            entropy_threshold=mpt.entropy,
            scope=mpt.scope,
            process_group=group,
        )
        if not is_own:
            return gate, None
        return gate, is_mastered & batch.of_tokens(gate)
