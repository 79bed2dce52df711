"""The scripted server of the engines' tests serves the retrieval client too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))
