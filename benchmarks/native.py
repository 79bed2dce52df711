"""Builds the native libraries of csrc/ into kernels/_lib without an installation: CMake where it is, else the compiler.

python benchmarks/native.py cpu cuda
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "kernels" / "_lib"
SUFFIXES = {"cpu": "*.cpp", "cuda": "*.cu"}

CPU_FLAGS = "-O3 -std=c++17 -fPIC -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast -fvisibility=hidden"
CPU_FLAGS_OF_FILE = {"segments.cpp": "-ffp-contract=off"}  # its sums round as PyTorch's do
CUDA_FLAGS = "-O3 -std=c++17 -cudart static -Xcompiler -fPIC,-fvisibility=hidden -t 0"
CUDA_TARGETS = (("compute_80", "sm_80"), ("compute_90a", "sm_90a"), ("compute_90", "compute_90"))


def build(target: str, compiled_in: Path) -> str:
    """Build marsrl_<target>.so; returns how, in words. Nothing is done where it is newer than its sources.

    Raises:
        RuntimeError: neither CMake nor the compiler is there, or the compiler refuses, with what it says.
    """
    library = OUTPUT / f"marsrl_{target}.so"
    folder = ROOT / "csrc" / target
    sources = sorted(folder.glob(SUFFIXES[target]))
    if not sources:
        raise RuntimeError(f"{folder} has no sources: there is no {target} library in this revision")
    read = [*sources, *folder.glob("*h"), *(ROOT / "csrc" / "include").glob("*"), ROOT / "CMakeLists.txt"]
    if library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in read):
        return f"{library.name} is newer than its sources"
    compiler = compiler_of(target)
    if compiler is None:
        raise RuntimeError(f"no compiler for {target}: expected {'nvcc' if target == 'cuda' else 'g++ or c++'} on PATH")
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    compiled_in.mkdir(parents=True, exist_ok=True)
    if cmake is not None:
        _with_cmake(cmake, target, compiler, compiled_in)
    else:
        _with_compiler(target, compiler, sources, compiled_in)
    OUTPUT.mkdir(exist_ok=True)
    # Replace, do not overwrite: a running process may have the old file mapped.
    shutil.copy2(compiled_in / library.name, OUTPUT / f".{library.name}")
    os.replace(OUTPUT / f".{library.name}", library)
    return f"{library.name} built with {'cmake' if cmake else Path(compiler).name}"


def compiler_of(target: str) -> str | None:
    """The compiler's path; nvcc is looked for in the usual places beside PATH."""
    if target == "cpu":
        return shutil.which("g++") or shutil.which("c++")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which("nvcc") or next(
        (str(found) for home in homes if home and (found := Path(home) / "bin" / "nvcc").exists()), None
    )


def _with_cmake(cmake: str, target: str, compiler: str, folder: Path) -> None:
    configure = [cmake, "-S", str(ROOT), "-B", str(folder / "cmake"), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DMARSRL_TARGET={target}", f"-DMARSRL_OUTPUT={folder}"]
    if target == "cuda":
        configure.append(f"-DCMAKE_CUDA_COMPILER={compiler}")
    _run(configure)
    _run([cmake, "--build", str(folder / "cmake"), "--parallel", str(os.cpu_count() or 1)])


def _with_compiler(target: str, compiler: str, sources: list[Path], folder: Path) -> None:
    flags = [*(CPU_FLAGS if target == "cpu" else CUDA_FLAGS).split(), f"-I{ROOT / 'csrc' / 'include'}"]
    if target == "cuda":
        flags += [word for arch, code in CUDA_TARGETS for word in ("-gencode", f"arch={arch},code={code}")]
    objects = []
    for source in sources:
        objects.append(str(folder / f"{source.stem}.o"))
        extra = CPU_FLAGS_OF_FILE.get(source.name, "").split()
        _run([compiler, *flags, *extra, "-c", str(source), "-o", objects[-1]])
    hidden = "-Wl,--exclude-libs,ALL" if target == "cpu" else "-Xlinker=--exclude-libs,ALL"
    _run([compiler, *flags, "-shared", hidden, *objects, "-o", str(folder / f"marsrl_{target}.so")])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(build(each, ROOT / "build" / "suite" / each), flush=True)
