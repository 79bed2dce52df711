"""Experts that a forward pass chose for each token; stored with a sample (router replay, R3).

    array [tokens, MoE layers, top_k], one byte per expert (two if a model has more than 255)

A token takes layers x top_k bytes: 384 for Qwen3-30B-A3B, so 24 MiB for a completion of 65536 tokens; each data rank gets only
its own samples' records (trainer/data/scatter.py). Tokens that were never fed to the model, such as a completion's last,
have no record.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ExpertArray = npt.NDArray[np.uint8 | np.int16]


def expert_dtype(num_experts: int) -> np.dtype[np.uint8] | np.dtype[np.int16]:
    """Return the smallest integer dtype that holds every expert's index and the placeholder of not_recorded."""
    return np.dtype(np.uint8) if num_experts <= np.iinfo(np.uint8).max else np.dtype(np.int16)


def not_recorded(dtype: npt.DTypeLike) -> int:
    """Return the placeholder for a missing record: the dtype's largest value, which is never an expert's index."""
    return int(np.iinfo(np.dtype(dtype)).max)
