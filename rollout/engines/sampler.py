"""Drawing tokens with counter-based noise: the draw of a row depends on (seed, position) and its logits alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from marsrl.rollout.engines.protocol import Sampling


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each row of a batch is drawn, on the model's device. temperature 0 takes the most likely token."""

    temperature: Tensor  # [B] float32
    top_p: Tensor  # [B] float32
    top_k: Tensor  # [B] int64; -1 off
    seeds: Tensor  # [B] int64
    truncates: bool  # does any row?

    @staticmethod
    def of(samplings: Sequence[Sampling], seeds: Sequence[int], device: torch.device) -> RowSampling:
        """One row a request; of a seed the low 64 bits count."""
        return RowSampling(
            temperature=torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device),
            top_p=torch.tensor([s.top_p for s in samplings], dtype=torch.float32, device=device),
            top_k=torch.tensor([s.top_k for s in samplings], dtype=torch.int64, device=device),
            seeds=torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device),
            truncates=any(s.truncates for s in samplings),
        )

    def select(self, rows: Tensor) -> RowSampling:
        return RowSampling(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.seeds[rows], self.truncates)

    def put(self, rows: Tensor, others: RowSampling) -> None:
        """Write others to these rows, in place; `truncates` stays as it is."""
        self.temperature[rows], self.top_p[rows] = others.temperature, others.top_p
        self.top_k[rows], self.seeds[rows] = others.top_k, others.seeds


def draw(logits: Tensor, sampling: RowSampling, positions: Tensor) -> tuple[Tensor, Tensor]:
    """draw_from what `truncated` makes of logits [B, V] float32."""
    return draw_from(truncated(logits, sampling), sampling, positions)


def truncated(logits: Tensor, sampling: RowSampling) -> Tensor:
    """[B, V] float32: logits over temperature, -inf for the tokens that top_k and top_p leave out."""
    scaled = logits / torch.where(sampling.temperature <= 0, 1.0, sampling.temperature)[:, None]
    return _truncate(scaled, sampling.top_k, sampling.top_p) if sampling.truncates else scaled


def draw_from(scaled: Tensor, sampling: RowSampling, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [B] int64, their log-probs [B] float32, nats, of the distribution that they were drawn from).

    Args:
        scaled: [B, V] float32, as `truncated` gives it.
        positions: [B] int64, place of the drawn token in its sequence.
    """
    greedy = sampling.temperature <= 0
    logprobs = scaled.log_softmax(-1)
    cumulative = logprobs.exp().double().cumsum(-1)
    point = uniform(sampling.seeds, positions)[:, None] * cumulative[:, -1:]
    # the first token whose cumulative probability passes the point; one of probability 0 never is
    tokens = torch.searchsorted(cumulative, point, right=True)[:, 0].clamp(max=scaled.shape[1] - 1)
    tokens = torch.where(greedy, scaled.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def kept_ids(scaled: Tensor) -> list[npt.NDArray[np.int32]]:
    """The tokens that could be drawn in each row of `scaled` [B, V] (`truncated` made it), ascending, on the host."""
    is_kept = scaled > -torch.inf
    counts = is_kept.sum(-1).cpu().numpy()
    ids = is_kept.nonzero()[:, 1].cpu().numpy().astype(np.int32)
    return np.split(ids, counts.cumsum()[:-1])


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[B] float64 in [0, 1): 53 bits of SplitMix64 over (seed, position)."""
    x = _splitmix(_splitmix(seeds) + positions)
    return ((x >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _signed(seed: int) -> int:
    """The seed's low 64 bits as a signed integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _splitmix(x: Tensor) -> Tensor:
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ (_shift(x, 30))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ (_shift(x, 27))) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside of the top k, then outside of the smallest set whose probability reaches top_p."""
    ordered, index = logits.sort(-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    drop = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    ordered = ordered.masked_fill(drop, -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # mass of the more likely ones: the first is always kept
    drop = (before >= top_p[:, None]) & (top_p[:, None] < 1)
    return torch.empty_like(logits).scatter(-1, index, ordered.masked_fill(drop, -torch.inf))
