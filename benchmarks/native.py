"""Builds the native library of csrc/ into kernels/_lib without an installation: CMake where it is, else the compiler.

python benchmarks/native.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "kernels" / "_lib" / "marsrl_cpu.so"
SOURCES = sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))

FLAGS = "-O3 -std=c++17 -fPIC -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast -fvisibility=hidden"
FLAGS_OF_FILE = {"segments.cpp": "-ffp-contract=off"}  # its sums round as PyTorch's do


def build(compiled_in: Path) -> str:
    """Build marsrl_cpu.so; returns how, in words. Nothing is done where it is newer than its sources.

    Raises:
        RuntimeError: neither CMake nor the compiler is there, or the compiler refuses, with what it says.
    """
    read = [*SOURCES, *(ROOT / "csrc").glob("*/*.h"), ROOT / "CMakeLists.txt"]
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > max(path.stat().st_mtime for path in read):
        return f"{LIBRARY.name} is newer than its sources"
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no compiler: expected g++ or c++ on PATH")
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    compiled_in.mkdir(parents=True, exist_ok=True)
    if cmake is not None:
        configure = [cmake, "-S", str(ROOT), "-B", str(compiled_in / "cmake"), "-DCMAKE_BUILD_TYPE=Release"]
        _run([*configure, f"-DMARSRL_OUTPUT={compiled_in}"])
        _run([cmake, "--build", str(compiled_in / "cmake"), "--parallel", str(os.cpu_count() or 1)])
    else:
        build_with(compiler, compiled_in)
    LIBRARY.parent.mkdir(exist_ok=True)
    # Replace, do not overwrite: a running process may have the old file mapped.
    new = LIBRARY.with_name(f".{LIBRARY.name}")
    shutil.copy2(compiled_in / LIBRARY.name, new)
    os.replace(new, LIBRARY)
    return f"{LIBRARY.name} built with {'cmake' if cmake else Path(compiler).name}"


def find_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def build_with(compiler: str, folder: Path) -> None:
    """marsrl_cpu.so in this folder, without CMake."""
    flags = [*FLAGS.split(), f"-I{ROOT / 'csrc' / 'include'}"]
    objects = []
    for source in SOURCES:
        objects.append(str(folder / f"{source.stem}.o"))
        extra = FLAGS_OF_FILE.get(source.name, "").split()
        _run([compiler, *flags, *extra, "-c", str(source), "-o", objects[-1]])
    _run([compiler, *flags, "-shared", "-Wl,--exclude-libs,ALL", *objects, "-o", str(folder / LIBRARY.name)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")


if __name__ == "__main__":
    print(build(ROOT / "build" / "suite" / "cpu"), flush=True)
