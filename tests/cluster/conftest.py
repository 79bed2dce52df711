import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("cluster", "docs", "integration")]  # box, cluster; commands, desk; books
