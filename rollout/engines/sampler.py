"""Sampling with counter-based noise: a row's draw depends only on (seed, position) and its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.rollout.engines.protocol import Sampling

Seeds = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling settings of each row of a batch, on the model's device. temperature 0: greedy."""

    temperature: Tensor  # [B] float32
    top_p: Tensor  # [B] float32
    top_k: Tensor  # [B] int64; -1 off
    truncates: bool  # True if any row truncates
    is_greedy: bool  # True if any row has temperature 0

    @staticmethod
    def of(samplings: Sequence[Sampling], device: torch.device) -> RowSampling:
        """Build from the settings of the requests, one row per request."""
        return RowSampling(
            temperature=torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device),
            top_p=torch.tensor([s.top_p for s in samplings], dtype=torch.float32, device=device),
            top_k=torch.tensor([s.top_k for s in samplings], dtype=torch.int64, device=device),
            truncates=any(s.truncates for s in samplings),
            is_greedy=any(s.temperature <= 0 for s in samplings),
        )

    def select(self, rows: Tensor) -> RowSampling:
        chosen = (self.temperature[rows], self.top_p[rows], self.top_k[rows])
        return RowSampling(*chosen, self.truncates, self.is_greedy)


def truncated(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Return [B, V] float32: logits / temperature, -inf for tokens excluded by top_k and top_p."""
    temperature = sampling.temperature
    if sampling.is_greedy:
        temperature = torch.where(temperature <= 0, 1.0, temperature)
    scaled = logits / temperature[:, None]
    return _truncate(scaled, sampling.top_k, sampling.top_p) if sampling.truncates else scaled


def draw_from(scaled: Tensor, sampling: RowSampling, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens [B] int64 and return them with log-probs [B] float32, nats, under the truncated distribution.

    scaled: [B, V] float32, from `truncated`.
    noise: [B] float64 in [0, 1), from `uniform`, on the same device.
    """
    if scaled.device.type == "cpu" and scaled.dtype == torch.float32 and library.why_no_cpu_library() is None:
        return _draw_cpu(scaled, sampling, noise)
    return _draw_torch(scaled, sampling, noise)


def _draw_cpu(scaled: Tensor, sampling: RowSampling, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw in two passes over each row, without temporaries of its length: csrc/cpu/draw.cpp."""
    num_rows, num_columns = scaled.shape
    tokens, logprobs = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    scaled, noise = scaled.contiguous(), noise.contiguous()
    temperature = sampling.temperature.contiguous() if sampling.is_greedy else None
    library.cpu_library().marsrl_draw_tokens(
        *map(library.address, (scaled, temperature, noise)), num_rows, num_columns,
        *map(library.address, (tokens, logprobs)), torch.get_num_threads(),
    )  # fmt: skip
    return tokens, logprobs


def _draw_torch(scaled: Tensor, sampling: RowSampling, noise: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = scaled.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    whole = cumulative[:, -1:]
    # Keep the point below the total. The product may round up to the total, which no cumulative sum exceeds.
    point = torch.minimum(noise[:, None] * whole, whole.nextafter(torch.zeros_like(whole)))
    # The first token whose cumulative probability exceeds the point; a token of probability 0 is never drawn.
    tokens = torch.searchsorted(cumulative, point, right=True)[:, 0].clamp(max=scaled.shape[1] - 1)
    if sampling.is_greedy:
        tokens = torch.where(sampling.temperature <= 0, scaled.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def kept_ids(scaled: Tensor, rows: Sequence[int]) -> list[npt.NDArray[np.int32]]:
    """Return, on the host, the ascending ids of the tokens that can be drawn in each of these rows.

    scaled: [B, V] float32, from `truncated`.
    """
    is_kept = (scaled if len(rows) == len(scaled) else scaled[torch.tensor(rows, device=scaled.device)]) > -torch.inf
    counts = is_kept.sum(-1).cpu().numpy()
    ids = is_kept.nonzero()[:, 1].cpu().numpy().astype(np.int32)
    return np.split(ids, counts.cumsum()[:-1])


def low_bits(seeds: Sequence[int]) -> Seeds:
    """Return the low 64 bits of each seed, [B]."""
    return np.array([seed % (1 << 64) for seed in seeds], np.uint64)


def uniform(seeds: Seeds, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return [B] in [0, 1): 53 bits of SplitMix64 over (seed, position).

    Computed on the host, where both are known: on a GPU, a dozen operations on so few numbers would only cost kernel launches.

    positions: [B], index of the drawn token in its sequence.
    """
    x = _splitmix(_splitmix(seeds) + positions.astype(np.uint64))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(x: Seeds) -> Seeds:
    """SplitMix64's mixing function (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set -inf outside the top k, then outside the smallest set whose probability reaches top_p."""
    ordered, index = logits.sort(-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    drop = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    ordered = ordered.masked_fill(drop, -torch.inf)
    probabilities = ordered.softmax(-1)
    # Total probability of more likely tokens; 0 for the first token, which is always kept.
    before = probabilities.cumsum(-1) - probabilities
    drop = (before >= top_p[:, None]) & (top_p[:, None] < 1)
    return torch.empty_like(logits).scatter(-1, index, ordered.masked_fill(drop, -torch.inf))
