"""Makes benchmarks/pipeline_study importable by its bare name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Not through sys.path: benchmarks/ has files whose bare names (rollout, memory) mean other things in other people's code.
_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "pipeline_study"
_SPEC = importlib.util.spec_from_file_location(
    "pipeline_study", _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
)
assert _SPEC is not None and _SPEC.loader is not None
sys.modules["pipeline_study"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules["pipeline_study"])
