"""Takes the repository root off sys.path: a bare `kernels` or `trainer` there would shadow other packages' modules."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
sys.path[:] = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != ROOT]
