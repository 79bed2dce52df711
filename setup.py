"""Packaging: api/ is installed as marsrl, and FOLDERS as marsrl.*, with the native library of csrc/.

The environment variable MARSRL_BUILD controls the native build:
    auto      default: if the build fails, warn
    require   if the build fails, raise an error
    off       build nothing

The library has a plain C ABI and includes no Python or torch header, so one wheel serves every Python and torch.
"""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NAME = "marsrl"
ROOT = Path(__file__).resolve().parent
FOLDERS = [folder for folder in ("kernels", "rollout", "trainer", "commands", "configs") if (ROOT / folder).is_dir()]
BUILD_MODES = ("auto", "require", "off")
LIBRARY = "marsrl_cpu"  # CMake target

REQUIREMENTS = [
    "torch>=2.13",  # no upper bound: the native code does not link against torch
    "numpy",
    "pydantic>=2",
    "omegaconf",
    "pyyaml",
    "rich",
    "safetensors",
    "tokenizers",
    "transformers>=5",
    "zstandard",
    "pyarrow",  # samples
    "duckdb",  # marsrl view, report.html
    "tensorboard",
    "msgspec",
    "psutil",
    "einops",
    "sympy",  # answers of task: math; requires mpmath
    "jinja2",
    "typer>=0.20",  # marsrl
    "aiohttp",  # orchestration external
    "google-re2",  # expressions of prompt files
]
EXTRAS = {
    "megatron": ["megatron-core>=0.16"],
    "ray": ["ray"],
    "vllm": ["vllm"],
    "openai": ["httpx"],  # frozen policies and retrieval on servers; vllm requires it too
    "web": ["httpx", "httpcore", "trafilatura>=2", "pypdf>=6"],  # tools.visit, tools.search.read_pages
    "mcp": ["mcp>=2"],  # tools of kind mcp; vllm requires it too
    "retrieval": ["fastapi", "uvicorn"],  # marsrl serve-retrieval; vllm requires them too
    "view": ["fastapi", "uvicorn"],  # marsrl view
    "curate": ["rensa>=0.5"],  # marsrl curate: near-duplicates; the index of version 0.4 has another API
    "wandb": ["wandb"],
    "reasoning_gym": ["reasoning-gym>=0.1.25"],  # task=reasoning_gym
    "textarena": ["textarena>=0.7.4"],  # its games as environments
    "dev": ["pytest", "pytest-xdist", "hypothesis", "peft", "playwright", "ruff", "mypy", "mkdocs"],
}


class BuildWithCMake(build_ext):
    """Build the library with CMake.

    build/cmake/ is kept, so the next `pip install -e .` compiles only what changed.
    """

    def run(self):
        mode = os.environ.get("MARSRL_BUILD", "auto")
        if mode not in BUILD_MODES:
            raise ValueError(f"MARSRL_BUILD={mode!r}: expected one of {', '.join(BUILD_MODES)}")
        self.built: list[str] = []
        if mode == "off":
            self.announce("MARSRL_BUILD=off: no native library is built; kernels fall back to PyTorch", logging.WARNING)
            return
        try:
            self.build_library()
            self.built.append(LIBRARY)
        except (OSError, subprocess.CalledProcessError) as error:
            if mode == "require":
                raise RuntimeError(f"building {LIBRARY} failed and MARSRL_BUILD=require: {error}") from error
            self.warn(f"building {LIBRARY} failed, its kernels will be missing: {error}")
        if self.inplace:
            self.copy_extensions_to_source()

    def build_library(self) -> None:
        output = Path(self.build_lib, NAME, "kernels", "_lib").resolve()
        build = ROOT / "build" / "cmake" / LIBRARY
        # Prefer the cmake that pip installed for this Python, which need not be on PATH, to the system's.
        cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or "cmake"
        configure = [cmake, "-S", str(ROOT), "-B", str(build), f"-DMARSRL_OUTPUT={output}"]
        # CMake cannot reuse a cache of a copied tree, or one whose cmake is gone, as after pip's isolated builds.
        subprocess.run([*configure, "--fresh"] if is_foreign_cache(build) else configure, check=True)
        subprocess.run([cmake, "--build", str(build), "--parallel", str(os.cpu_count() or 1)], check=True)

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # a plain library, not a Python module: no cpython suffix

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib, NAME, "kernels", "_lib", f"{target}.so")) for target in self.built]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.inplace:
            return {}
        return {path: str(ROOT / "kernels" / "_lib" / Path(path).name) for path in self.get_outputs()}

    def copy_extensions_to_source(self) -> None:
        target = ROOT / "kernels" / "_lib"
        target.mkdir(parents=True, exist_ok=True)
        for path in self.get_outputs():
            # Replace, do not overwrite: a running process may have the old file mapped.
            shutil.copy2(path, target / f".{Path(path).name}")
            os.replace(target / f".{Path(path).name}", target / Path(path).name)


def is_foreign_cache(build: Path) -> bool:
    """Return True if `build` was configured for another source tree, or by a cmake executable that no longer exists."""
    cache = build / "CMakeCache.txt"
    if not cache.exists():
        return False
    entries = dict(
        line.split("=", 1) for line in cache.read_text().splitlines() if "=" in line and line[:1] not in "#/"
    )
    # Resolved, because the cache may name the tree by a path with symbolic links.
    is_own = Path(entries.get("CMAKE_HOME_DIRECTORY:INTERNAL", "/")).resolve() == ROOT
    return not (is_own and Path(entries.get("CMAKE_COMMAND:INTERNAL", "")).exists())


class PlatformWheel(bdist_wheel):
    """Wheel with the tag py3-none-<platform>: it contains a native library that does not use the Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def shipped_packages() -> tuple[list[str], dict[str, str]]:
    """Return the import names of all packages in FOLDERS, and {top-level package: folder}."""
    packages = [NAME]
    for folder in FOLDERS:
        inside = find_packages(folder)
        packages += [f"{NAME}.{folder}", *(f"{NAME}.{folder}.{package}" for package in inside)]
    return packages, {NAME: "api"} | {f"{NAME}.{folder}": folder for folder in FOLDERS}


packages, package_dir = shipped_packages()
setup(
    name=NAME,
    version="0.1.0",
    description="Multi-agent reinforcement learning for teams of language models",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    keywords="reinforcement learning, multi-agent, large language models, GRPO, Megatron, vLLM",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.13",
    packages=packages,
    package_dir=package_dir,
    package_data={package: ["*.yaml", "*.j2", "py.typed"] for package in packages}
    | {
        f"{NAME}.commands.look": ["pages/*", "pages/vendor/*", "demo/*", "demo/*/*", "demo/*/*/*"],
        f"{NAME}.trainer.supervised": ["ready/*"],
        f"{NAME}.rollout.agents": ["prompt_sets/*.yaml"],
    },
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["marsrl = marsrl.commands.cli:main"]},
    ext_modules=[Extension(f"{NAME}.kernels._lib.{LIBRARY}", sources=[])],  # CMake knows the sources
    cmdclass={"build_ext": BuildWithCMake, "bdist_wheel": PlatformWheel},
    zip_safe=False,
)
