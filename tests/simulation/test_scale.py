"""The work of rank 0 for a step grows no faster than its samples, counted in calls and bytes; and on a simulated cluster it plays
completions of which each token stands for several."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripts import call

COUNTED = """
import json, sys
from dataclasses import asdict
sys.path[0] = "benchmarks"
import costless_engines, scale
costless_engines.VOCABULARY = 1000
found = []
for problems, overlap in ((1, 0), (2, 0), (4, 0), (2, 1), (4, 1)):  # the first: imports, and what is made once
    num_calls = 0
    def count(frame, event, argument):
        global num_calls
        num_calls += event in ("call", "c_call")
    sys.setprofile(count)
    measured = scale.measure(problems, 64, overlap)
    sys.setprofile(None)
    found.append({**asdict(measured), "num_calls": num_calls})
print(json.dumps(found))
"""
MEASURED = """
import json, sys
from dataclasses import asdict
sys.path[0] = "benchmarks"
import costless_engines
costless_engines.VOCABULARY = 1000
import simulated_cluster as cluster
cluster.YOUNG, cluster.PROBLEMS = 4, 2
print(json.dumps([asdict(cluster.measure(64, grain)) for grain in (cluster.COARSE, cluster.FINE)]))
"""


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    done = call(code=COUNTED)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found[1:]


def test_twice_the_samples_take_twice_the_work_and_bytes(measured: list[dict[str, Any]]) -> None:
    for small, large in (measured[:2], measured[2:]):
        assert (small["samples"], large["samples"]) == (144, 288)
        for count in ("num_calls", "segments"):
            assert large[count] <= 2.2 * small[count], (count, small[count], large[count])
        for part in ("to engines", "from engines", "to the data ranks", "samples log", "checkpoint state"):
            assert large["bytes"][part] <= 2.2 * small["bytes"][part], part


def test_a_batch_has_nine_bytes_a_token_and_some_hundreds_a_sample(measured: list[dict[str, Any]]) -> None:
    for each in measured:
        num_prompts = each["bytes"]["to the data ranks"] - 9 * each["tokens"]
        assert 0 < num_prompts < each["samples"] * 9000  # ids of a byte each, four bytes an id, and the fields' names


def test_completions_of_a_fraction_of_their_tokens_are_played_and_trained() -> None:
    done = call(code=MEASURED)
    assert done.returncode == 0, done.stderr
    coarse, fine = json.loads(done.stdout.splitlines()[-1])
    assert coarse["samples"] and fine["samples"]
    assert 8 < fine["tokens"] / fine["samples"] / (coarse["tokens"] / coarse["samples"]) < 24  # 16 times as many
    assert coarse["seconds"].keys() == fine["seconds"].keys() >= {"books and pool", "prompts", "credit"}
    assert "texts" not in coarse["seconds"]  # engines decode them
