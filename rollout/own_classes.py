"""Loader of users' classes and functions, named by file: `my_team.py:MyTeam`, `my_task.py:MyTask`, `my_tools.py:convert`.

A class from a notebook cell, or from a module that cannot be imported by its name alone, is named `memory:MyTeam`: only this
process has it.
"""

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

_PREFIX = "marsrl_own_"  # prefix of the names of modules imported from users' files
_MEMORY = "memory:"
_in_memory: dict[str, type] = {}


class _BesideUsersFiles:
    """Finder of modules that are next to imported user files, for `from guess import Word` in such a file.

    It runs after all other finders. It never finds `kernels`, `rollout` and `trainer`: beside a user's file these may be marsrl's
    own folders, while the import may be of another package with that name.
    """

    folders: ClassVar[list[str]] = []

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if path is not None or name in ("kernels", "rollout", "trainer"):
            return None
        return PathFinder.find_spec(name, cls.folders)


def is_own(name: str) -> bool:
    """Return True if a setting names a user's class, False for a built-in one."""
    return ":" in name


def is_in_memory(name: str) -> bool:
    """Return True if a setting names a class that exists only in the process that registered it."""
    return name.startswith(_MEMORY)


def name_of(kind: type) -> str:
    """Return the name by which own_class finds this class: FILE.py:CLASS, or memory:CLASS.

    FILE.py is returned for a class of a top-level module. Other classes are named memory:CLASS, because importing the file again
    would run a script (__main__) twice, and would break relative imports in a module of a package.
    """
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    is_alone = kind.__module__ != "__main__" and "." not in kind.__module__
    if module is not None and file is not None and is_alone and getattr(module, kind.__name__, None) is kind:
        path = Path(file).resolve()
        sys.modules[_module_name(path)] = module
        return f"{path}:{kind.__name__}"
    name = f"{_MEMORY}{kind.__name__}"
    _in_memory[name] = kind
    return name


def forget_files() -> None:
    """Forget imported user files, so that they are imported again at their next use; they may have changed since the last run."""
    for name in [name for name in sys.modules if name.startswith(_PREFIX)]:
        del sys.modules[name]


def own_class(key: str, name: str, base: type[Own]) -> type[Own]:
    """Return the class that `key: FILE.py:CLASS` or `key: memory:CLASS` names; the same object at every call.

    Raises ValueError, which begins with the key: no such file or class, not a subclass of `base`, or the import fails.
    """
    file, class_name, kind = _named(key, name)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ValueError(f"{key} is {name!r}: {file} has no class {class_name} that extends {base.__name__}")
    return kind


def own_function(key: str, name: str) -> Callable[..., Any]:
    """Return the function that `key: FILE.py:FUNCTION` names; raises ValueError like own_class."""
    file, function_name, function = _named(key, name)
    if not inspect.isfunction(function):
        raise ValueError(f"{key} is {name!r}: {file} has no function {function_name}")
    return function


def _named(key: str, name: str) -> tuple[str, str, object]:
    """Return (file, name of the object, the object or None if the file lacks it)."""
    file, _, inside = name.rpartition(":")
    if is_in_memory(name):
        if name not in _in_memory:
            raise ValueError(
                f"{key} is {name!r}: a class of a notebook or script, and this process does not have it; pass the class again "
                f"from Python (docs/python_api.md), or move it into a file and set {key}=FILE.py:{inside}"
            )
        return file, inside, _in_memory[name]
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{key} is {name!r}: no file {path.name} in {path.absolute().parent}; expected FILE.py:NAME")
    return file, inside, getattr(_module(key, path.resolve()), inside, None)


def _module_name(path: Path) -> str:
    return f"{_PREFIX}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def _module(key: str, path: Path) -> ModuleType:
    """Import the user's file only once, so that a class is the same object everywhere."""
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{key}: {path} is not a Python file; expected FILE.py")
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
