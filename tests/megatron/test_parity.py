"""`make parity` on a few of its layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PARITY = Path(__file__).parents[2] / "benchmarks" / "parity.py"


@pytest.mark.slow
def test_four_ranks_train_as_one_and_as_transformers(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    report = tmp_path / "lines.json"
    layouts = ["dp4, overlapped", "cp2 pp2", "tp2 cp2 ep2", "optimizer offload"]  # in the order of the table
    command = [sys.executable, str(PARITY), "--json", str(report), "--only", *layouts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    lines = json.loads(report.read_text("utf-8"))
    families = [f"the same of a {kind} model" for kind in ("dense", "llama", "mistral")]
    adapters = [f"adapters, {kind}, one rank" for kind in ("moe", "dense")]
    of_adapters = ["adapters, dense, dp4, overlapped", "adapters, dense, cp2 pp2", "adapters, moe, tp2 cp2 ep2"]
    names = ["one rank against transformers", *families, *adapters, *layouts, *of_adapters]
    assert [line["layout"] for line in lines] == names
    assert all(line["is_ok"] for line in lines)
    assert "sees no CUDA device" in lines[names.index(layouts[-1])]["refused"]
    assert sum(line.endswith("  ok") for line in done.stdout.splitlines()) == len(lines)
