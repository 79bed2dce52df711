"""The build of the native library reuses only a CMake cache of this checkout."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("source", "cmake", "is_foreign"),
    [(str(ROOT), sys.executable, False), (f"{ROOT}2", sys.executable, True), (str(ROOT), f"{ROOT}/gone", True)],
)
def test_a_cache_of_another_tree_or_a_lost_cmake_is_foreign(
    source: str, cmake: str, is_foreign: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    is_foreign_cache = runpy.run_path(str(ROOT / "setup.py"))["is_foreign_cache"]
    assert not is_foreign_cache(tmp_path)
    entries = f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\nCMAKE_COMMAND:INTERNAL={cmake}\n"
    (tmp_path / "CMakeCache.txt").write_text(f"# a comment with =\n//help = text\n\n{entries}")
    assert is_foreign_cache(tmp_path) == is_foreign


def test_a_cache_that_names_this_tree_by_a_link_is_not_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    link = tmp_path / "link"
    link.symlink_to(ROOT)
    entries = f"CMAKE_HOME_DIRECTORY:INTERNAL={link}\nCMAKE_COMMAND:INTERNAL={sys.executable}\n"
    (tmp_path / "CMakeCache.txt").write_text(entries)
    assert not runpy.run_path(str(ROOT / "setup.py"))["is_foreign_cache"](tmp_path)
