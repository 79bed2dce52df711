"""The commands run, and the player's memory is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_weights_are_synced_by_every_backend(tmp_path: Path) -> None:
    words = ["--mib", "8", "--repeats", "1", "--bucket-mib", "1", "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "benchmarks/weight_sync.py", *words], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["backend"] for row in found["rows"]] == ["shm", "ipc", "nccl"]
    assert len({row["num_bytes"] for row in found["rows"]}) == 1 and "not measured: 61 GB" in done.stdout
