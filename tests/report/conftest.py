"""made_up_run.py lies beside the tests; pytest's importlib mode puts no folder on sys.path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
