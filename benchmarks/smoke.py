"""Correctness of every op in every dtype, by every implementation that this machine has, before anything is timed.

    python -m pytest benchmarks/smoke.py -o pythonpath=benchmarks [-k CASE]

The benchmarks' own cases at tiny shapes, judged by the rule of the tests.
"""

import pytest
import torch
from cases import ORDER
from trials import Trial, attempt, trials


@pytest.mark.parametrize(
    "trial", list(trials(ORDER, "cuda" if torch.cuda.is_available() else "cpu")), ids=lambda trial: trial.name
)
def test_ours_is_right(trial: Trial) -> None:
    torch.set_num_threads(1)
    reason = attempt(trial)
    if reason is not None:
        pytest.skip(reason)
