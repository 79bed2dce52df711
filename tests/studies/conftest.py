"""The studies' own modules, by the bare names by which they import each other."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "studies"))
