"""The scripted server of the engines' tests serves the retrieval client too, and the hostile snippets lie beside the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))
sys.path.insert(0, str(Path(__file__).parent))
