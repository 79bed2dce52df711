#!/usr/bin/env python3
"""The kernel and rollout tests as other processors would run them: one line for each variation, failures by name.

    tests/processors.py                       all variations, one after the other (about 25 minutes on two free cores)
    tests/processors.py busy                  one of them (this one, with a third of a core, in 5 minutes)
    tests/processors.py aten-avx2 one-core    these
    tests/processors.py --list                what each one is
    tests/processors.py mkl-avx2 -- tests/kernels/test_grouped_linear.py -k frozen      other tests, words of pytest

Exit status 1 where a test failed. Not part of `make test`. PyTorch multiplies by MKL and oneDNN and has loops of its own
(ATen); NumPy multiplies by OpenBLAS, and Triton's interpreter by NumPy: its tests run where NumPy is varied. Left out
are the tests that compile for a GPU: no instruction set of this machine touches them. The functions of csrc/cpu are
chosen by cpuid, which no variable changes: for them the library is built again, for one instruction set, into a folder
of its own, and given to the tests' process (not to processes that a test starts).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INTERPRETED = "tests/kernels/interpreter"
COMPILED_FOR_A_GPU = "ahead_of_time"
# pytest with the library of another folder; "" leaves it as it is.
RUN = """
import pathlib, sys, pytest
from marsrl.kernels import library
library.FOLDER = pathlib.Path(sys.argv[1]) if sys.argv[1] else library.FOLDER
sys.exit(pytest.main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Variation:
    """environment: set for pytest. clones: -march= of csrc/cpu. cores: as taskset takes them. busy: loops beside it."""

    what: str
    environment: Mapping[str, str] = field(default_factory=dict)
    clones: str = ""
    cores: str = ""
    num_busy: int = 0
    varies_numpy: bool = False


_NUMPY_PLAIN = "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
_PLAIN = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": _NUMPY_PLAIN,
}
VARIATIONS = {
    "here": Variation("this processor as it is", varies_numpy=True),
    "aten-default": Variation("PyTorch's own loops without AVX", {"ATEN_CPU_CAPABILITY": "default"}),
    "aten-avx2": Variation("PyTorch's own loops with AVX2", {"ATEN_CPU_CAPABILITY": "avx2"}),
    "onednn-avx2": Variation("oneDNN with AVX2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "mkl-avx2": Variation("MKL with AVX2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
    "mkl-sse42": Variation("MKL with SSE4.2", {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
    "mkl-compatible": Variation("MKL's code for every x86", {"MKL_CBWR": "COMPATIBLE"}),
    "openblas-haswell": Variation("NumPy's GEMM for AVX2", {"OPENBLAS_CORETYPE": "Haswell"}, varies_numpy=True),
    "openblas-prescott": Variation("NumPy's GEMM for SSE3", {"OPENBLAS_CORETYPE": "Prescott"}, varies_numpy=True),
    "clones-v3": Variation("csrc/cpu for AVX2 and FMA", clones="x86-64-v3"),
    "clones-default": Variation("csrc/cpu for every x86-64", clones="x86-64"),
    "plain": Variation("all of them at their plainest", _PLAIN, clones="x86-64", varies_numpy=True),
    "two-threads": Variation("two threads", {"OMP_NUM_THREADS": "2"}),
    "one-core": Variation("one core, as many threads as PyTorch takes there", {"OMP_NUM_THREADS": ""}, cores="0"),
    "busy": Variation("one core, with two busy loops on it", cores="0", num_busy=2),
}


def built(arch: str, folder: Path) -> Path:
    """Where csrc/cpu lies, built for one instruction set."""
    output, build = folder / arch, folder / f"build-{arch}"
    if not output.exists():
        flags = f"-DCMAKE_CXX_FLAGS=-march={arch} -DMARSRL_CLONES="
        where = ["-S", str(ROOT), "-B", str(build), f"-DMARSRL_OUTPUT={output}", flags]
        subprocess.run(["cmake", *where], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cmake", "--build", str(build)], check=True, stdout=subprocess.DEVNULL)
    return output


@contextmanager
def busy_loops(count: int, cores: str) -> Iterator[None]:
    loops = [subprocess.Popen([*pinned(cores), sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def pinned(cores: str) -> list[str]:
    return ["taskset", "-c", cores] if cores else []


def runs_of(variation: Variation, words: list[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """(environment, words of pytest) of each process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variation.environment}
    environment = {name: value for name, value in environment.items() if value}
    always = ["-q", "-p", "no:cacheprovider", "-m", "not gpu and not multi_gpu"]
    if words:
        yield environment, [*always, *words]
        return
    yield (
        environment,
        [*always, "-k", f"not ({COMPILED_FOR_A_GPU})", "--ignore", INTERPRETED, "tests/kernels", "tests/rollout"],
    )
    if variation.varies_numpy:
        yield {**environment, "TRITON_INTERPRET": "1"}, [*always, INTERPRETED]


def run(name: str, words: list[str], folder: Path) -> bool:
    """Prints the line of a variation; True where all passed."""
    variation, began = VARIATIONS[name], time.monotonic()
    num_passed, failures = 0, []
    library = str(built(variation.clones, folder)) if variation.clones else ""
    with ExitStack() as stack:
        stack.enter_context(busy_loops(variation.num_busy, variation.cores))
        for environment, given in runs_of(variation, words):
            command = [*pinned(variation.cores), sys.executable, "-c", RUN, library, *given]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]])[-1]
            num_passed += sum(map(int, re.findall(r"(\d+) passed", last)))
            failures += re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
            if done.returncode not in (0, 1):
                failures.append(f"pytest ended with {done.returncode}: {last}")
    line = f"{name:18}{num_passed:5} passed, {len(failures)} failed  ({time.monotonic() - began:.0f} s)"
    print(line, *failures, sep="\n    ", flush=True)
    return not failures


def main() -> int:
    given = [*sys.argv[1:], "--"]
    own, words = given[: given.index("--")], given[given.index("--") + 1 : -1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="variation", help=", ".join(VARIATIONS))
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(own)
    if options.list:
        for name, variation in VARIATIONS.items():
            print(f"{name:18}{variation.what}  {' '.join(f'{k}={v!r}' for k, v in variation.environment.items())}")
        return 0
    if unknown := set(options.names) - VARIATIONS.keys():
        parser.error(f"no variation {', '.join(sorted(unknown))}: expected some of {', '.join(VARIATIONS)}")
    with tempfile.TemporaryDirectory(prefix="marsrl-processors-") as folder:
        passed = [run(name, words, Path(folder)) for name in options.names or VARIATIONS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
