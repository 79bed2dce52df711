"""Models, the long-tailed batch and its FLOPs, for benchmarks/train_step.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from marsrl.commands.plan.parameters import elements
from marsrl.rollout.adapter import AdapterConfig, adapted
from marsrl.rollout.model_shape import ModelShape, read_shape
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.models.init_model import SMALL

_SLICE = replace(
    SMALL, num_layers=4, hidden_size=2048, num_heads=32, num_kv_heads=4, head_size=128, ffn_size=768, vocab_size=151936,
    max_positions=4096, rope_theta=1e6, num_experts=128, experts_per_token=8,
)  # fmt: skip


@dataclass(frozen=True)
class StepProblem:
    """Model and lengths, in tokens, of a batch of `groups` x 8 sequences.

    micro_batch_tokens: tokens of a packed micro-batch. reference_rows: number of sequences per padded micro-batch of the
    reference loop.
    """

    shape: str | ModelShape
    vocab_size: int
    dtype: Literal["float32", "bfloat16"]
    groups: int
    prompts: tuple[int, int]
    mean_response: int
    longest_response: int
    micro_batch_tokens: int
    reference_rows: int


PROBLEMS = {
    "bench": StepProblem("bench", 8192, "float32", 8, (20, 61), 120, 512, 2048, 8),
    # Qwen3-30B-A3B at full width with 4 of its 48 layers: 3.1 G parameters, trainable on one GPU of 80 GB.
    "qwen3_30b_a3b_slice": StepProblem(_SLICE, 151936, "bfloat16", 8, (64, 257), 400, 1536, 4096, 4),
    # The same architecture at a size for CPUs.
    "slice_tiny": StepProblem(replace(SMALL, vocab_size=512), 512, "float32", 2, (4, 9), 12, 40, 160, 4),
}


def problem_of(
    model: str, dtype: Literal["float32", "bfloat16"] | None, micro_batch_tokens: int | None = None
) -> StepProblem:
    """Return one of PROBLEMS, or a batch of 16 short texts for the model in a directory.

    dtype, micro_batch_tokens: replace the values of the problem. The batch grows in proportion to micro_batch_tokens, so that the
        number of full micro-batches stays the same.
    """
    if model in PROBLEMS:
        problem = PROBLEMS[model]
    else:
        shape = read_shape(model)
        problem = StepProblem(shape, shape.vocab_size, "float32", 2, (40, 121), 48, 192, 2048, 8)
    tokens = micro_batch_tokens or problem.micro_batch_tokens
    groups = problem.groups * max(1, round(tokens / problem.micro_batch_tokens))
    return replace(problem, dtype=dtype or problem.dtype, micro_batch_tokens=tokens, groups=groups)


NUM_AGENTS = 4
PADDING = 256  # padding token; transformers gives its embedding no gradient, so no sequence contains it


def _tokens(rng: np.random.Generator, problem: StepProblem, number: int) -> npt.NDArray[np.int32]:
    drawn = rng.integers(4, problem.vocab_size, number)
    return np.where(drawn == PADDING, 4, drawn).astype(np.int32)


def batch(problem: StepProblem, seed: int = 0) -> list[TrainSequence]:
    """Return groups of 8 sequences, two per agent; every second group has advantages of 0.

    Completion lengths are log-normal (sigma 1.0).
    """
    rng = np.random.default_rng(seed)
    sequences = []
    for group in range(problem.groups):
        prompt = _tokens(rng, problem, int(rng.integers(*problem.prompts)))
        rewards = np.array([1, 0, 1, 1, 0, 0, 1, 0], float)
        advantages = (rewards - rewards.mean()) / rewards.std() if group % 2 else np.zeros(8)
        for i in range(8):
            drawn = rng.lognormal(math.log(problem.mean_response) - 0.5, 1.0)
            n = int(np.clip(drawn, 1, problem.longest_response))
            sequences.append(
                TrainSequence(
                    uid=f"{group}:{i}",
                    prompt_ids=prompt,
                    token_ids=_tokens(rng, problem, n),
                    is_sampled=np.ones(n, bool),
                    rollout_logprobs=np.full(n, -9.0, np.float32),
                    advantage=float(advantages[i]),
                    agent=i % NUM_AGENTS,
                    temperature=1.0,
                    is_positive=bool(rewards[i]),
                )
            )
    return sequences


def model_flops(shape: ModelShape, sequences: Sequence[TrainSequence], adapter: AdapterConfig | None = None) -> float:
    """Return the FLOPs of one forward and backward over these sequences, without recomputation or padding:

    6 T P_layers,active + 6 L N D sum(length^2) [causal attention: half of 4 forward and 8 backward] + 6 H V sampled

    With an adapter, frozen weights count 4 instead of 6, and 6 T P_adapter,active is added.
    """
    factor, pairs = 6, 0.0
    if adapter is not None:
        factor = 4
        for name, (out, into, rank) in adapted(shape, adapter).items():
            part = shape.experts_per_token / shape.num_experts if ".experts." in name else 1
            pairs += part * rank * (out + into)
    counts = elements(shape)
    experts = counts.layer_experts * shape.experts_per_token / shape.num_experts if shape.num_experts else 0
    of_layer = counts.layer_cut + counts.layer_whole + experts
    tokens = sum(s.num_tokens for s in sequences)
    squares = sum(s.num_tokens**2 for s in sequences)
    layers = factor * tokens * of_layer * shape.num_layers + 6 * tokens * pairs
    attention = 6 * shape.num_layers * shape.num_heads * shape.head_size * squares
    return layers + attention + factor / 6 * head_flops(shape, sequences)


def head_flops(shape: ModelShape, sequences: Sequence[TrainSequence]) -> float:
    """Return the FLOPs of the output head alone, 6 H V sampled."""
    return 6.0 * shape.hidden_size * shape.vocab_size * sum(s.num_sampled for s in sequences)
