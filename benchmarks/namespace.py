"""Makes `import marsrl` mean a checkout where it is not installed, or is installed from another one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def folder_with_marsrl(folder: Path, root: Path = ROOT) -> Path:
    """For child processes: `folder` with a link `marsrl` to the checkout; put it on PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "marsrl"
    if not link.exists():
        link.symlink_to(root, target_is_directory=True)
    return folder


def map_marsrl(root: Path = ROOT) -> None:
    """For evidence.py, in this process: marsrl.kernels is root/kernels, marsrl.benchmarks is root/benchmarks, and so on.

    Call it before the first import of marsrl. The script's own folder leaves sys.path.
    """
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    if "marsrl" in sys.modules:
        raise RuntimeError(f"namespace: marsrl is already imported from {sys.modules['marsrl'].__path__}")
    module = ModuleType("marsrl")
    module.__path__ = [str(root)]
    sys.modules["marsrl"] = module
