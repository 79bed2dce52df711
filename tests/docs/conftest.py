import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # documents, commands, desk
sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))  # small_run
sys.path.insert(0, str(Path(__file__).parent.parent / "plan"))  # published_model
sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))  # completions_server
