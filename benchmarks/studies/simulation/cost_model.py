"""Cost model of decoding, prefill, training and weight syncs on H100s: constants, each with its source, and formulas.

All constants were set before the fit; the only fitted number is lengths.Lengths.sigma. After trial runs with guessed sigmas we
added one constant, attention_flops_per_s; attention had used compute_flops_per_s before. Units: seconds, tokens, bytes, FLOP.
An engine is one replica of Qwen3-30B-A3B on `gpus_per_engine` H100s in bf16.

    decode step   = floor(b) + kv_bytes_per_token * C / (gpus * bandwidth)      b sequences that hold C tokens together
    forward pass  = 2 * active_params * tokens / rate + attention_flops * sum of contexts / attention_rate       GPU-seconds
    prefill       = forward pass of the tokens that are not cached / gpus
    training step = 3 * forward pass of all trained sequences / gpus
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

MEASURED_ITL = ((8, 9.367e-3), (16, 11.967e-3), (32, 16.395e-3), (64, 21.539e-3), (128, 28.595e-3))
"""(number of sequences decoded at once, median seconds between two tokens of a sequence) for Qwen3-30B-A3B-Thinking-2507 in bf16
on two H100s, with vLLM and GPQA prompts, from the ML.ENERGY leaderboard v3 (public/data/tasks/gpqa.json). The leaderboard's row
for 96 sequences (27.71 ms) is left out, because it lies 2.6 ms above the line between its neighbours, so that a larger batch
would decode faster.
"""


def _constant(default: float, unit: str, source: str) -> Any:
    return field(default=default, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Constants:
    """Constants of the cost model. ASSUMED marks those that are in no paper or public source."""

    itl_scale: float = _constant(
        1.0, "x", "factor on the measured time of a decode step: ML.ENERGY leaderboard, MEASURED_ITL"
    )
    itl_context: float = _constant(
        5803.0,
        "tokens",
        "mean context in that measurement: 5553 of 792 published completions (E[L^2] / 2 E[L]) + 250 of prompt",
    )
    hbm_bytes_per_s: float = _constant(3.35e12, "B/s", "H100 SXM data sheet, a GPU")
    kv_bytes_per_token: float = _constant(98_304.0, "B", "Qwen3-30B-A3B: 2 x 48 layers x 4 KV heads x 128 x 2 bytes")
    gpus_per_engine: float = _constant(2.0, "GPUs", "as in the measurement of decode steps")
    weight_bytes: float = _constant(61_064_216_576.0, "B", "Qwen3-30B-A3B, safetensors headers")
    gpu_memory_bytes: float = _constant(80e9, "B", "H100 SXM data sheet")
    memory_share: float = _constant(0.9, "", "rollout.vllm.gpu_memory_utilization, vLLM's default")
    max_num_seqs: float = _constant(128.0, "sequences", "largest batch of the measurement")
    active_params: float = _constant(3.3e9, "", "Qwen3-30B-A3B model card: 3.3B activated")
    attention_flops: float = _constant(
        4.0 * 48 * 32 * 128,
        "FLOP",
        "forward, for each token and token of its context: 4 x layers x query heads x head size",
    )
    compute_flops_per_s: float = _constant(
        121e12, "FLOP/s", "all but attention; Megatron Bridge 25.11 performance summary: Qwen3-30B-A3B, 4k, 16 H100s"
    )
    attention_flops_per_s: float = _constant(
        0.35 * 989e12,
        "FLOP/s",
        "FlashAttention-2 on an H100: 35% of 989 TFLOP/s (FlashAttention-3, arXiv:2407.08608, abstract)",
    )
    sync_bytes_per_s: float = _constant(50e9, "B/s", "one 400 Gb/s InfiniBand port carries the whole model")
    solver_prompt: float = _constant(256.0, "tokens", "ASSUMED: a problem and the chat template")
    shown_tokens: float = _constant(
        1024.0, "tokens", "ASSUMED: length of an output without its thought, in the next agent's prompt"
    )
    solver_accuracy: float = _constant(0.649, "", "MarsRL, BeyondAIME, Solver before training; Correctors the same")
    verifier_agreement: float = _constant(0.7, "", "ASSUMED: a Verifier's verdict agrees with the truth")


def constants_table(constants: Constants) -> list[tuple[str, str, str, str]]:
    """Return (name, value, unit, source) of each constant."""
    return [
        (f.name, f"{getattr(constants, f.name):.6g}", f.metadata["unit"], f.metadata["source"])
        for f in fields(constants)
    ]


class CostModel:
    """Computes the seconds that the work of engines and trainer takes."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        c = constants
        self.max_num_seqs = int(c.max_num_seqs)
        self.kv_s_per_token = c.kv_bytes_per_token / (c.gpus_per_engine * c.hbm_bytes_per_s)
        free = c.gpus_per_engine * c.gpu_memory_bytes * c.memory_share - c.weight_bytes
        self.kv_capacity = int(free / c.kv_bytes_per_token)  # tokens
        if self.kv_capacity < 1:
            raise ValueError(
                f"cost model: {c.gpus_per_engine:g} GPUs of {c.gpu_memory_bytes:.3g} bytes hold {c.weight_bytes:.3g} bytes "
                "of weights and no KV cache; raise gpus_per_engine"
            )
        measured_kv_s = KV_MEASURED_S_PER_TOKEN * c.itl_context
        knots = [(b, c.itl_scale * (itl - b * measured_kv_s)) for b, itl in MEASURED_ITL]
        self._floor = [0.0] + [_interpolate(knots, b) for b in range(1, self.max_num_seqs + 1)]

    def floor_s(self, num_seqs: int) -> float:
        """Return the part of a decode step's time that does not depend on context lengths."""
        return self._floor[num_seqs]

    def decode_s(self, num_seqs: int, context: int, num_steps: int) -> float:
        """Return the seconds of `num_steps` decode steps of num_seqs sequences that hold `context` tokens at the first step."""
        grown = num_steps * context + num_seqs * num_steps * (num_steps - 1) / 2
        return num_steps * self._floor[num_seqs] + self.kv_s_per_token * grown

    def steps_within(self, num_seqs: int, context: int, seconds: float) -> int:
        """Return the number of whole decode steps within this time: the inverse of decode_s."""
        square = self.kv_s_per_token * num_seqs / 2
        linear = self._floor[num_seqs] + self.kv_s_per_token * context - square
        return int((math.sqrt(linear * linear + 4 * square * max(0.0, seconds)) - linear) / (2 * square))

    def forward_s(self, start: int, end: int) -> float:
        """Return the GPU-seconds of a forward pass over tokens [start, end) of one causal sequence."""
        c = self.constants
        linear = 2 * c.active_params * (end - start) / c.compute_flops_per_s
        return linear + c.attention_flops * (end * end - start * start) / 2 / c.attention_flops_per_s

    def prefill_s(self, start: int, end: int) -> float:
        """Return the seconds in which one engine prefills tokens [start, end), with all earlier tokens cached."""
        return self.forward_s(start, end) / self.constants.gpus_per_engine

    def train_s(self, lengths: Sequence[int], num_gpus: int) -> float:
        """Return the seconds of an update on sequences of these lengths: a forward, and a backward of twice that cost."""
        return 3 * math.fsum(self.forward_s(0, length) for length in lengths) / num_gpus

    @property
    def sync_s(self) -> float:
        return self.constants.weight_bytes / self.constants.sync_bytes_per_s


KV_MEASURED_S_PER_TOKEN = Constants.kv_bytes_per_token / (Constants.gpus_per_engine * Constants.hbm_bytes_per_s)
"""Time to read one token's keys and values in the measured decode steps, which is subtracted to get the floor."""


def _interpolate(knots: Sequence[tuple[int, float]], x: int) -> float:
    """Interpolate linearly between knots; beyond the ends, extrapolate from the two nearest knots."""
    right = next((i for i in range(1, len(knots)) if x <= knots[i][0]), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[right - 1], knots[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
