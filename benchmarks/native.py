"""Builds the native library of csrc/ into kernels/_lib without an installation: only by the compiler, without CMake.

python benchmarks/native.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "kernels" / "_lib" / "marsrl_cpu.so"
FLAGS = "-O3 -std=c++17 -fPIC -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast -fvisibility=hidden"
FLAGS_OF_FILE = {"segments.cpp": "-ffp-contract=off"}  # its sums round as PyTorch's do


def build(library: Path) -> str:
    """Build the library unless it is newer than its sources; returns a description.

    Raises:
        RuntimeError: no compiler, or a failure, with its output.
    """
    sources = sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))
    read = [*sources, *(ROOT / "csrc").glob("*/*.h")]
    if library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in read):
        return f"{library.name} is newer than its sources"
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no compiler: expected g++ or c++ on PATH")
    library.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = []
        for source in sources:
            objects.append(f"{folder}/{source.stem}.o")
            extra = FLAGS_OF_FILE.get(source.name, "").split()
            flags = [*FLAGS.split(), f"-I{ROOT / 'csrc' / 'include'}", *extra]
            _run([compiler, *flags, "-c", str(source), "-o", objects[-1]])
        new = Path(folder, library.name)
        _run([compiler, "-shared", "-fopenmp", "-Wl,--exclude-libs,ALL", *objects, "-o", str(new)])
        os.replace(new, library)  # not overwritten: a running process may have the old file mapped
    return f"{library.name} built with {Path(compiler).name}"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")


if __name__ == "__main__":
    print(build(LIBRARY), flush=True)
