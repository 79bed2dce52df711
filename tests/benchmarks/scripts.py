"""The scripts of benchmarks/, as modules and as programs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def script(name: str) -> ModuleType:
    """One of the scripts that import nothing but the standard library."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def call(*words: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Python with these words, in the root; what it said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *(["-c", code] if code else []), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
