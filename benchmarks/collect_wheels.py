"""Collects the wheels that gpu_suite.py takes to a machine without a network: python benchmarks/gpu_suite.py --wheels DIR.

    python benchmarks/collect_wheels.py --to DIR [--have NAME ...] [--python 3.12]

Runs the suite's parts that need more than torch here on the CPU at tiny sizes, sees which packages they import, and downloads
the wheels of those that our own files import or that these require, in the versions that are installed here, without what
torch, triton and numpy bring or --have names. The tests' own imports travel too. Exit code 1 where the wheels and
the files of this checkout are more than 64 MiB together.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from gpu_suite import parts
from namespace import ROOT, folder_with_marsrl

MOST_BYTES = 64 << 20
PRESENT = ("torch", "triton", "numpy")
GLIBC = range(17, 40)  # manylinux_2_N; pip matches each exactly
OURS = ("kernels", "rollout", "trainer", "benchmarks")
RECORDER = """
import atexit, os, sys
def tell():
    with open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.modules"), "w") as file:
        file.write("\\n".join({name.partition(".")[0] for name in list(sys.modules)}))
atexit.register(tell)
"""


def imported_modules(commands: Iterable[list[str]], work: Path) -> set[str]:
    """Top-level modules that these commands and their children have imported when they end.

    Raises:
        RuntimeError: a command fails, with the end of what it said: it may have stopped before an import.
    """
    (work / "sitecustomize.py").write_text(RECORDER)
    paths = [str(work), str(folder_with_marsrl(work / "namespace"))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    for command in commands:
        print(f"runs {' '.join(command[1:3])} ...", flush=True)
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}"
            )
    return {name for file in work.glob("*.modules") for name in file.read_text().split()}


def imports_of(files: Iterable[Path]) -> set[str]:
    """Top-level modules that these files import, inside functions too."""
    found: set[str] = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def travelling(modules: set[str], have: Iterable[str]) -> dict[str, str]:
    """{distribution: version}: of the imported modules, what our files import or what that requires; what the tests of kernels
    import, most of which run on a GPU alone, and what that requires. All without PRESENT, what that
    requires, and what the machine has besides.

    What a library imports only because it is installed here is no requirement of it, and stays.
    """
    owners = {name: set(map(plain, found)) for name, found in importlib.metadata.packages_distributions().items()}

    def owning(names: Iterable[str]) -> set[str]:
        return set[str]().union(*(owners.get(name, set()) for name in names))

    ours = imports_of(path for folder in OURS for path in (ROOT / folder).rglob("*.py"))
    of_tests = imports_of((ROOT / "tests" / "kernels").glob("*.py"))
    found = (_with_requirements(owning(modules & ours)) & owning(modules)) | _with_requirements(
        owning(of_tests - {"marsrl"})
    )
    installed = set[str]().union(*owners.values())
    there = _with_requirements(set(PRESENT)) | {plain(name) for name in have}
    return {name: importlib.metadata.version(name) for name in sorted((found & installed) - there - {"marsrl"})}


def plain(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _with_requirements(names: set[str]) -> set[str]:
    """These and what they require, as far as it is installed; extras are left out."""
    found, todo = set[str](), set(names)
    while todo:
        name = todo.pop()
        found.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        needed = {plain(re.split(r"[^\w.-]", each)[0]) for each in requirements if "extra ==" not in each}
        todo |= needed - found
    return found


def download(versions: dict[str, str], folder: Path, python: str) -> None:
    """One wheel of each into the folder; without dependencies, which are in `versions` themselves."""
    platforms = [f"manylinux_2_{n}_x86_64" for n in reversed(GLIBC)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    words = [word for platform in platforms for word in ("--platform", platform)]
    words += ["--python-version", python, "--implementation", "cp", "--only-binary=:all:", "--no-deps", "-q"]
    names = [f"{name}=={version}" for name, version in versions.items()]
    subprocess.run([sys.executable, "-m", "pip", "download", *words, "-d", str(folder), *names], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder for the wheels")
    parser.add_argument(
        "--have",
        nargs="*",
        default=[],
        metavar="NAME",
        help="packages that the machine has; what they require does not count as there",
    )
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--list", action="store_true", help="name the packages, download nothing")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        commands = [part.command for part in parts("cpu", True, work, work / "parts") if part.modules]
        versions = travelling(imported_modules(commands, work), words.have)
    print("\n".join(f"{name}=={version}" for name, version in versions.items()))
    if words.list:
        return 0
    words.to.mkdir(parents=True, exist_ok=True)
    download(versions, words.to, words.python)
    tree = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    of_tree = sum((ROOT / name).stat().st_size for name in tree.split("\0") if name and (ROOT / name).is_file())
    of_wheels = sum(wheel.stat().st_size for wheel in words.to.glob("*.whl"))
    fits = of_tree + of_wheels <= MOST_BYTES
    sizes = f"{of_wheels / 2**20:.1f} MiB of wheels, {of_tree / 2**20:.1f} MiB of files"
    print(f"{sizes}: {'at most' if fits else 'more than'} {MOST_BYTES >> 20} MiB together")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
