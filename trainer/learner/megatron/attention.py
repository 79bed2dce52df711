"""Packed causal attention for megatron's layers, on kernels.attention_varlen; also for samples that share prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from marsrl.kernels import attention_varlen, rms_norm
from marsrl.trainer.data.packing import PackedBatch, Paths
from marsrl.trainer.learner.megatron.context import Keys


def gather_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return values[rows], whose gradient adds up repeated rows in float32, or in float64 for float64.

    values: [U, ...] float; rows: [R] int64. In 16 bits a GPU would round each partial sum, and lose
    small gradients among many.
    """
    result: Tensor = _GatherRows.apply(values, rows)
    return result


def save_ungathered(pairs: Sequence[tuple[Tensor, Tensor]], rows: Tensor) -> AbstractContextManager[None]:
    """In the body, save `values` for the backward pass instead of gather_rows(values, rows), which can be many times larger.

    pairs: (gather_rows(values, rows), values). The backward pass gathers the rows again.
    """
    gathered = [(result.data_ptr(), result.numel(), values.detach()) for result, values in pairs]

    def pack(saved: Tensor) -> Tensor | tuple[Tensor, Any, Any]:
        for pointer, size, values in gathered:
            if saved.data_ptr() == pointer and saved.numel() == size:  # The whole tensor, perhaps transposed.
                return values, saved.shape, saved.stride()
        return saved.detach()  # An output that holds its own graph would never be freed.

    def unpack(packed: Tensor | tuple[Tensor, Any, Any]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        values, shape, stride = packed
        return values.index_select(0, rows).as_strided(shape, stride)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_values = len(values)
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.num_values, *grad.shape[1:], dtype=dtype)
        return total.index_add_(0, rows, grad.to(dtype)).to(grad.dtype), None


@dataclass
class Segments(PackedSeqParams):
    """Sequence boundaries of a micro-batch, carried to every layer.

    The format is not "thd", because megatron's packed path would rotate q and k sequence by sequence. Here the angles are
    gathered by position once per micro-batch (head.py), and only attention uses the bounds.
    """

    qkv_format: str = "sbhd"
    cu_seqlens: Tensor | None = None  # [S+1] int32
    max_seqlen: int | None = None  # number of tokens of the longest sequence, over all context-parallel ranks
    keys: Keys | None = None  # Set only under context parallelism.
    paths: Paths | None = None  # Set only if samples share prefixes.
    kept: dict[int, KeptAttention] | None = None  # By layer number, kept until the layer is recomputed.

    @classmethod
    def of(cls, batch: PackedBatch, context_group: Any) -> Segments:
        """Build the segments of a micro-batch, or of this rank's part of it."""
        keys = None
        if context_group.size() > 1:
            keys = Keys.of(batch.cu_seqlens, batch.num_tokens, context_group)
        return cls(cu_seqlens=batch.runs, max_seqlen=batch.max_seqlen, keys=keys, paths=batch.paths)


class PackedAttention(MegatronModule):
    """Core attention of the layer spec: maps a packed batch's queries [T, 1, N, D] to [T, 1, N * D]."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None, **unused: Any
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale
        self.is_deterministic = config.deterministic_mode

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, *, packed_seq_params: Segments, **unused: Any
    ) -> Tensor:
        assert packed_seq_params.cu_seqlens is not None
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        bounds, keys, paths = packed_seq_params.cu_seqlens, packed_seq_params.keys, packed_seq_params.paths
        cu_seqlens_k = None
        saving: AbstractContextManager[None] = nullcontext()
        if keys is not None:
            k, v = keys.gather(k), keys.gather(v)
            bounds, cu_seqlens_k = keys.cu_seqlens, keys.cu_seqlens_k
        elif paths is not None:  # Each sample's run sees the keys along its path.
            own_k, own_v, cu_seqlens_k = k, v, paths.cu_seqlens_k
            k, v = gather_rows(own_k, paths.tokens), gather_rows(own_v, paths.tokens)
            saving = save_ungathered(((k, own_k), (v, own_v)), paths.tokens)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention_varlen(
                q,
                k,
                v,
                bounds,
                cu_seqlens_k=cu_seqlens_k,
                scale=self.scale,
                max_seqlen=packed_seq_params.max_seqlen,
                deterministic=self.is_deterministic,
            )

        kept = packed_seq_params.kept
        if kept is None:
            with saving:
                output = attend(q, k, v)
        elif torch.is_grad_enabled():  # The layer is being recomputed for the backward pass.
            output = kept.pop(self.layer_number).resume(q, k, v)
        else:
            kept[self.layer_number] = KeptAttention(attend, q, k, v)
            output = kept[self.layer_number].output
        return output.reshape(output.shape[0], 1, -1)


class KeptAttention:
    """Attention of a layer that is recomputed: its output and statistics are kept, and q, k and v are recomputed.

    The autograd graph of the first forward pass is kept, but without the memory of q, k and v: its backward pass reads the
    recomputed ones. This works for every implementation of attention_varlen, and the gradient is that of the kept forward pass.
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
        inputs = [x.detach() for x in (q, k, v)]
        remade: list[Tensor] = []

        def pack(saved: Tensor) -> Tensor | tuple[int, Any, Any]:
            for index, x in enumerate(inputs):
                if saved.data_ptr() == x.data_ptr() and saved.dtype == x.dtype:  # q, k or v, perhaps transposed.
                    return index, saved.shape, saved.stride()
            return saved.detach()  # An output that holds its own graph would never be freed.

        def unpack(packed: Tensor | tuple[int, Any, Any]) -> Tensor:
            return packed if isinstance(packed, Tensor) else remade[packed[0]].as_strided(*packed[1:])

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            starts = _Start.apply(torch.empty(0, requires_grad=True), *inputs)
            # Keep only the edges of the graph: kept tensors would hold their memory.
            self._edges = [torch.autograd.graph.get_gradient_edge(start) for start in starts]
            self._graph = attend(*starts)
        self._strides, self._remade = [x.stride() for x in inputs], remade
        inputs.clear()  # The hook `pack`, which holds the list, may live as long as the graph.

    @property
    def output(self) -> Tensor:
        return self._graph.detach()

    def resume(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the kept output as a function of the recomputed q, k and v."""
        assert [x.stride() for x in (q, k, v)] == self._strides, "recomputed q, k or v have another memory layout"
        output: Tensor = _Resume.apply(self, q, k, v)
        return output

    def gradients(self, grad_output: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, and free the graph. inputs: the recomputed q, k and v."""
        self._remade[:] = inputs
        gradients = torch.autograd.grad(self._graph, self._edges, grad_output)
        self._remade.clear()
        return gradients


class _Start(torch.autograd.Function):
    """Copies that require a gradient but are not leaves, because a graph keeps the memory of its leaves."""

    @staticmethod
    def forward(ctx: Any, requires_grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in tensors)


class _Resume(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: KeptAttention, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.kept = kept
        return kept.output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.kept.gradients(grad_output, ctx.saved_tensors)


class RMSNorm(torch.nn.RMSNorm):
    """Norm by kernels.rms_norm with the interface of megatron's norms.

    megatron's own norm rejects sequence parallelism; this norm marks its weight for the reduction over TP ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self._eps, self.is_zero_centred = eps, config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by finalize_model_grads

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., N] of this rank's tokens; rows may be strided, as heads of keys are."""
        return rms_norm(x, self.weight, eps=self._eps, is_zero_centred=self.is_zero_centred)


class HeadNorm(RMSNorm):
    """Norm of queries or keys that also applies the rotary embedding, which saves a read and a write."""

    rotation: Tensor | None = None  # Rotation of the micro-batch, set by the layer's attention.

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and rotate [T, 1, N, D] of this rank's heads."""
        return rms_norm(x, self.weight, eps=self._eps, is_zero_centred=self.is_zero_centred, rotation=self.rotation)


class NormedAttention(SelfAttention):
    """Megatron's self-attention for queries and keys with a HeadNorm."""

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **options: Any) -> Any:
        """Run with rotary_pos_emb, the rotation [T, D] for kernels.rms_norm, instead of megatron's angles."""
        self.q_layernorm.rotation = self.k_layernorm.rotation = rotary_pos_emb
        return super().forward(*args, **options)
