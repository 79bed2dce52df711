"""Makes a folder of wheels importable without installing them."""

from __future__ import annotations

import zipfile
from pathlib import Path


def importable(folder: Path, unpack_in: Path) -> list[Path]:
    """The paths to put on PYTHONPATH.

    Wheels (*.whl) are unpacked, the pure ones too: Triton and inspect read source files, which a zip does not have.
    A folder, or a folder in it, that holds a *.dist-info is an unpacked wheel and is taken as it is.

    Raises:
        ValueError: the folder does not exist, or holds neither.
    """
    if not folder.is_dir():
        raise ValueError(f"--wheels {folder}: expected a folder")
    paths = [each for each in [folder, *sorted(folder.iterdir())] if each.is_dir() and any(each.glob("*.dist-info"))]
    wheels = sorted(folder.glob("*.whl"))
    if wheels:
        target = unpack_in / "site-packages"  # QuACK looks for this name in its own path
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
        paths.append(target)
    if not paths:
        raise ValueError(f"--wheels {folder}: expected *.whl files or unpacked wheels (with a *.dist-info)")
    return paths
