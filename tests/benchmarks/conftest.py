import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # scripts
sys.path.append(str(Path(__file__).parents[1] / "report"))  # made_up_run
