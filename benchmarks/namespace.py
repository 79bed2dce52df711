"""Makes `import marsrl` mean this checkout, whether or not the package is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def map_marsrl(root: Path = ROOT) -> None:
    """In this process: marsrl.kernels is root/kernels, marsrl.benchmarks is root/benchmarks, and so on.

    Call it before the first import of marsrl. The script's own folder leaves sys.path, where `timing` or `rollout` would
    mean ours in other people's code.
    """
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    if "marsrl" in sys.modules:
        raise RuntimeError(f"namespace: marsrl is already imported from {sys.modules['marsrl'].__path__}")
    module = ModuleType("marsrl")
    module.__path__ = [str(root)]
    sys.modules["marsrl"] = module


def folder_with_marsrl(folder: Path, root: Path = ROOT) -> Path:
    """For child processes: `folder` with a link `marsrl` to the checkout; put it on PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "marsrl"
    if not link.exists():
        link.symlink_to(root, target_is_directory=True)
    return folder
