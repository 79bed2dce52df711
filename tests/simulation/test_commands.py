"""The commands run, and the scheduler's memory is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_waiting_sample_takes_less_than_4_kb(tmp_path: Path) -> None:
    words = ["--samples", "64", "--shorten", "1024", "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "benchmarks/scheduler.py", *words], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert 200 < found["bytes_a_waiting_sample"] <= 4096
    assert [share["scheduler"] for share in found["shares"]["real time"]] == ["stage by stage", "event by event"]
    assert done.stdout.splitlines()[-1].startswith("ratio: ")
