"""Make the studies' modules importable by the bare names that they use among themselves."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "studies"))
