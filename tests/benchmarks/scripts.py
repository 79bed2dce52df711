"""Run the scripts of benchmarks/ as programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def call(*words: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the repository root, and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(["-c", code] if code else []), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
