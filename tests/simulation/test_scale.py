"""The work of rank 0 for a step on a simulated cluster grows no faster than its samples, counted in calls and bytes; completions
of which each token stands for several are played and trained."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripts import call

MEASURED = """
import json, sys
from dataclasses import asdict
sys.path[0] = "benchmarks"
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
    """What is measured with so many problems a step, tokens that one of a completion stands for, and rollout.overlap."""
    done = call(json.dumps(cases), code=MEASURED)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    """The first: imports, and what is made once."""
    return measure((1, 64, 0), (2, 64, 0), (8, 64, 0), (2, 64, 1), (8, 64, 1), (2, 4, 1))[1:]


def test_four_times_the_problems_take_no_more_work_and_bytes_a_sample(measured: list[dict[str, Any]]) -> None:
    """Steps vary in size, and samples in length: not exactly as much."""
    for small, large in (measured[:2], measured[2:4]):
        assert large["played"] > 3.5 * small["played"] and large["samples"] > 2 * small["samples"]
        for each in (small, large):
            each["bytes"]["calls"] = each["num_calls"]
        for part in ("calls", "to engines", "from engines", "checkpoint state"):
            of_sample = [each["bytes"][part] / each["played"] for each in (small, large)]
            assert of_sample[1] <= 1.6 * of_sample[0], part
        for part in ("to the data ranks", "samples log"):
            of_sample = [each["bytes"][part] / each["samples"] for each in (small, large)]
            assert of_sample[1] <= 1.6 * of_sample[0], part


def test_a_batch_has_nine_bytes_a_token_and_some_hundreds_a_sample(measured: list[dict[str, Any]]) -> None:
    for each in measured:
        num_prompts = each["bytes"]["to the data ranks"] - 9 * each["tokens"]
        assert 0 < num_prompts < each["samples"] * 9000  # ids of a byte each, four bytes an id, and the fields' names


def test_completions_of_a_fraction_of_their_tokens_are_played_and_trained(measured: list[dict[str, Any]]) -> None:
    coarse, fine = measured[2], measured[4]
    assert 8 < fine["tokens"] / fine["samples"] / (coarse["tokens"] / coarse["samples"]) < 24  # 16 times as many
    assert coarse["seconds"].keys() == fine["seconds"].keys() >= {"books and pool", "prompts", "credit"}
    assert "texts" not in coarse["seconds"]  # engines decode them
