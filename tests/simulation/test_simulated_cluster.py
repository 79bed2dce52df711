"""Rank 0's work on a simulated cluster: real texts, of which each token stands for several."""

from __future__ import annotations

import json

from scripts import call

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


def test_completions_of_a_fraction_of_their_tokens_are_played_and_trained() -> None:
    done = call(code=MEASURED)
    assert done.returncode == 0, done.stderr
    coarse, fine = json.loads(done.stdout.splitlines()[-1])
    assert coarse["samples"] and fine["samples"]
    assert 8 < fine["tokens"] / fine["samples"] / (coarse["tokens"] / coarse["samples"]) < 24  # 16 times as many
    assert coarse["seconds"].keys() == fine["seconds"].keys() >= {"books and pool", "prompts", "credit"}
    assert "texts" not in coarse["seconds"]  # engines decode them
