"""The commands run, and the player's memory is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from forked import PYTHON

ROOT = Path(__file__).resolve().parents[2]


def test_weights_are_synced_by_every_backend(tmp_path: Path) -> None:
    words = ["--mib", "8", "--repeats", "1", "--bucket-mib", "1", "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PYTHON, "benchmarks/weight_sync.py", *words], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["backend"] for row in found["rows"]] == ["shm", "ipc", "nccl"]
    assert len({row["num_bytes"] for row in found["rows"]}) == 1 and "not measured: 61 GB" in done.stdout


def test_a_sample_goes_on_while_others_wait_for_tools(tmp_path: Path) -> None:
    words = ["--trajectories", "8", "--slowest", "2", "--shorten", "40", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "benchmarks/tool_overlap.py", *words], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    by_stage, by_event = json.loads((tmp_path / "out.json").read_text())
    # the same work; of each trajectory six turns, five of them with a call
    assert by_stage["samples"] == by_event["samples"] > 8 and by_stage["calls"] == by_event["calls"] == 40
    assert all(0 <= row["could_have_been"] <= 1 - row["busy"] < 1 for row in (by_stage, by_event))
    assert done.stdout.splitlines()[-1].startswith("ratio: ")
