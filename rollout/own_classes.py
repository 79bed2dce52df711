"""Classes and functions of a user, named by file: `my_team.py:MyTeam`, `my_task.py:MyTask`, `my_tools.py:convert`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

Own = TypeVar("Own")


class _BesideUsersFiles:
    """Finds modules beside the users' files that were imported: `from guess import Word`. Runs last, and never for the names
    of our own folders, which other packages use too."""

    folders: ClassVar[list[str]] = []

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if path is not None or name in ("kernels", "rollout", "trainer"):
            return None
        return PathFinder.find_spec(name, cls.folders)


def is_own(name: str) -> bool:
    """True if a setting names a user's class, not one that ships."""
    return ":" in name


def own_class(key: str, name: str, base: type[Own]) -> type[Own]:
    """The class that `key: FILE.py:CLASS` names; the same object at every call.

    ValueError, which begins with the key: no such file or class, not a subclass of `base`, or the import fails.
    """
    place, class_name, kind = _named(key, name)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ValueError(f"{key} is {name!r}: {class_name} is no class of {place} that extends {base.__name__}")
    return kind


def own_function(key: str, name: str) -> Callable[..., Any]:
    """The function that `key: FILE.py:FUNCTION` names; ValueError as own_class."""
    place, function_name, function = _named(key, name)
    if not inspect.isfunction(function):
        raise ValueError(f"{key} is {name!r}: {function_name} is no function of {place}")
    return function


def _named(key: str, name: str) -> tuple[str, str, object]:
    """(file, name in it, the object of that name or None)."""
    place, _, inside = name.rpartition(":")
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"{key} is {name!r}: there is no file {place} (seen from {Path.cwd()})")
    return place, inside, getattr(_module(key, path.resolve()), inside, None)


def _module(key: str, path: Path) -> ModuleType:
    """The user's file as a module; imported once, so that a class is the same object everywhere."""
    name = f"marsrl_own_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{key}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if _BesideUsersFiles not in sys.meta_path:
        sys.meta_path.append(_BesideUsersFiles)
    if str(path.parent) not in _BesideUsersFiles.folders:
        _BesideUsersFiles.folders.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
