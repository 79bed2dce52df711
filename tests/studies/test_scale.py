"""Rank 0's work per step, in calls and bytes, grows no faster than the number of samples on a simulated cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripts import call

pytestmark = pytest.mark.slow

MEASURED = """
import json, sys
from dataclasses import asdict
sys.path[:1] = ["benchmarks/studies", "benchmarks"]
import random_models
random_models.VOCABULARY = 1000
import simulated_cluster as cluster
cluster.YOUNG, cluster.PLAYED = 0, 6
found = []
for problems, grain, overlap in json.loads(sys.argv[1]):
    cluster.PROBLEMS, num_calls = problems, 0
    def count(frame, event, argument):
        global num_calls
        num_calls += event in ("call", "c_call")
    sys.setprofile(count)
    measured = cluster.measure(64, grain, overlap)
    sys.setprofile(None)
    found.append({**asdict(measured), "num_calls": num_calls})
print(json.dumps(found))
"""


def measure(*cases: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Return a measurement for each case: (problems a step, tokens that one simulated token stands for, rollout.overlap)."""
    done = call(json.dumps(cases), code=MEASURED)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_work_per_sample_does_not_grow_with_problems() -> None:
    """Steps vary in size and samples in length, so work per sample is not exactly equal. The first case only absorbs imports."""
    _, small, large = measure((1, 64, 0), (2, 64, 1), (8, 64, 1))
    assert large["played"] > 3.5 * small["played"] and large["samples"] > 2 * small["samples"]
    for parts, of in (
        (("calls", "to engines", "from engines", "checkpoint state"), "played"),
        (("to the data ranks", "samples log"), "samples"),
    ):
        for part in parts:
            of_sample = [{**each["bytes"], "calls": each["num_calls"]}[part] / each[of] for each in (small, large)]
            assert of_sample[1] <= 1.6 * of_sample[0], part
