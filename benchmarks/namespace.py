"""Import of `marsrl` in child processes from a checkout that is not the installed one."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def folder_with_marsrl(folder: Path, root: Path = ROOT) -> Path:
    """Create `folder` with a link `marsrl` to the checkout; return `folder`, which child processes need on PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "marsrl"
    if not link.exists():
        link.symlink_to(root, target_is_directory=True)
    return folder
