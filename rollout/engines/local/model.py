"""Forward pass of the supported models (model_shape.py) for packed tokens, on fused weights. The caller computes attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.weights.layout import EMBEDDING, HEAD, fuse

Pairs = Mapping[str, Tensor]
"""Tensors of an adapter by name, from rollout.adapter.held_by_shard, so that B is already scaled."""

Adapted = Sequence[tuple[Pairs, Tensor]]
"""Adapters of a forward pass, each with the rows [n] int64 of its tokens; other tokens use the weights alone."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention: (layer, q [T, heads, D], k [T, kv heads, D], v [T, kv heads, D]) -> output [T, heads, D]"""


class LocalModel:
    """Weights in the fused layout (rollout/weights/layout.py) and pure functions over them."""

    def __init__(
        self, shape: ModelShape, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Fuse tensors with Hugging Face names; the model then owns them. Names and shapes must follow config.json."""
        self.shape, self.dtype, self.device = shape, dtype, device
        self.weights = dict(fuse(tensors, dtype, device))
        self._frequencies = rotary_frequencies(shape, device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        experts: Tensor | None = None,
        adapted: Adapted = (),
    ) -> Tensor:
        """Return final hidden states [T, H] of token_ids [T] int64 at positions [T].

        experts: [T, layers, top_k], integers, filled with each token's experts; None: not requested.
        """
        w, shape = self.weights, self.shape
        angle = positions[:, None].float() * self._frequencies
        cos = torch.cat([angle, angle], -1).cos()[:, None].to(self.dtype)  # [T, 1, D]
        sin = torch.cat([angle, angle], -1).sin()[:, None].to(self.dtype)
        q_rows, kv_rows = shape.num_heads, shape.num_kv_heads
        x = F.embedding(token_ids, w[EMBEDDING])
        for layer in range(shape.num_layers):
            at = f"model.layers.{layer}"
            y = self._norm(x, f"{at}.input_layernorm.weight")
            qkv = self._linear(y, f"{at}.self_attn.qkv_proj")
            _add_pairs(qkv, y, [f"{at}.self_attn.{part}_proj" for part in "qkv"], adapted)
            q, k, v = qkv.view(len(x), -1, shape.head_size).split([q_rows, kv_rows, kv_rows], dim=1)
            if shape.has_qk_norm:
                q = self._norm(q, f"{at}.self_attn.q_norm.weight")
                k = self._norm(k, f"{at}.self_attn.k_norm.weight")
            q, k = q * cos + _rotate(q) * sin, k * cos + _rotate(k) * sin
            y = attend(layer, q, k, v).reshape(len(x), -1)
            x = x + _add_pairs(self._linear(y, f"{at}.self_attn.o_proj"), y, [f"{at}.self_attn.o_proj"], adapted)
            y = self._norm(x, f"{at}.post_attention_layernorm.weight")
            record = None if experts is None else experts[:, layer]
            x = x + (self._experts(y, at, record, adapted) if shape.num_experts else self._mlp(y, at, adapted))
        return self._norm(x, "model.norm.weight")

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [T, V] float32."""
        return F.linear(hidden, self.weights[HEAD]).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        return self.weights[name] * (x.float() * scale).to(x.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _mlp(self, x: Tensor, at: str, adapted: Adapted) -> Tensor:
        y = self._linear(x, f"{at}.mlp.gate_up_proj")
        gate, up = _add_pairs(y, x, [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"], adapted).chunk(2, -1)
        y = F.silu(gate) * up
        return _add_pairs(self._linear(y, f"{at}.mlp.down_proj"), y, [f"{at}.mlp.down_proj"], adapted)

    def _experts(self, x: Tensor, at: str, record: Tensor | None, adapted: Adapted) -> Tensor:
        """Send each token through its top experts: sort by expert, run a GEMM per expert, sum by router weight."""
        w13, w2 = self.weights[f"{at}.mlp.experts.w13_weight"], self.weights[f"{at}.mlp.experts.w2_weight"]
        router = F.linear(x, self.weights[f"{at}.mlp.gate.weight"]).float().softmax(-1)
        weight, expert = router.topk(self.shape.experts_per_token, -1)  # [T, K]
        if record is not None:
            record.copy_(expert)
        if self.shape.normalises_top_k:
            weight = weight / weight.sum(-1, keepdim=True)
        order = expert.flatten().argsort(stable=True)  # slots t*K + k, expert by expert
        counts = torch.bincount(expert.flatten(), minlength=len(w13)).tolist()
        tokens = (order // expert.shape[1]).split(counts)
        done = [
            self._expert(x[rows], f"{at}.mlp.experts.{e}", w13[e], w2[e], _among(rows, adapted))
            for e, rows in enumerate(tokens)
            if len(rows)
        ]
        slots = torch.empty_like(x.repeat_interleave(expert.shape[1], 0))
        slots[order] = torch.cat(done)
        return (slots.view(len(x), -1, x.shape[1]) * weight[..., None].to(x.dtype)).sum(1)

    @staticmethod
    def _expert(x: Tensor, at: str, w13: Tensor, w2: Tensor, adapted: Adapted) -> Tensor:
        gate, up = _add_pairs(F.linear(x, w13), x, [f"{at}.gate_proj", f"{at}.up_proj"], adapted).chunk(2, -1)
        y = F.silu(gate) * up
        return _add_pairs(F.linear(y, w2), y, [f"{at}.down_proj"], adapted)


def _add_pairs(out: Tensor, x: Tensor, names: Sequence[str], adapted: Adapted) -> Tensor:
    """Add the adapters' terms in place to out [T, ..], the concatenated outputs of the matrices `names`."""
    for pairs, rows in adapted:
        column, inputs = 0, x[rows]
        for name in names:
            if (b := pairs.get(f"{name}.lora_B.weight")) is None:
                break  # an adapter has all of these matrices or none
            delta = F.linear(F.linear(inputs, pairs[f"{name}.lora_A.weight"]), b)
            out[rows, column : column + len(b)] += delta
            column += len(b)
    return out


def _among(tokens: Tensor, adapted: Adapted) -> Adapted:
    """Restrict adapters to the tokens [n] int64; rows of the result are indices into this subset."""
    found = [(pairs, torch.isin(tokens, rows).nonzero()[:, 0]) for pairs, rows in adapted]
    return [(pairs, places) for pairs, places in found if len(places)]


def rotary_frequencies(shape: ModelShape, device: torch.device) -> Tensor:
    """Return frequencies of rotary embeddings (arXiv:2104.09864), [D/2] float32, radians per position.

    Frequency i is theta^(-2i/D). Rope type llama3 scales it by its wavelength w = 2 pi / frequency, with o = original_positions:
    frequencies with w below o / high_freq_factor stay, those with w above o / low_freq_factor are divided by `factor`, and in
    between they are interpolated linearly in o / w. Bitwise equal to transformers'
    modeling_rope_utils._compute_llama3_parameters.
    """
    half = torch.arange(0, shape.head_size, 2, dtype=torch.float32, device=device) / shape.head_size
    plain = 1.0 / shape.rope_theta**half
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    old, low, high = scaling.original_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    share = (old / wavelength - low) / (high - low)
    between = (1 - share) * plain / scaling.factor + share * plain
    stretched = torch.where(wavelength > old / low, plain / scaling.factor, between)
    return torch.where(wavelength < old / high, plain, stretched)


def _rotate(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)
