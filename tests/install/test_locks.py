"""The locks in constraints/ are complete for all supported Pythons. These tests install nothing."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
import quack_in_torch
import yaml
from test_gpu_peers import SIGNATURES

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints"
LINE = re.compile(r"([a-z0-9-]+==[\w.+]+) +# via (([a-z0-9-]+|-r constraints/\w+\.in)(, |$))+")


def locked(device: str) -> list[str]:
    return [line.split()[0] for line in (CONSTRAINTS / f"{device}.txt").read_text().splitlines()]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_locks_pin_versions_and_name_no_index(device: str) -> None:
    lines = (CONSTRAINTS / f"{device}.txt").read_text().splitlines()
    assert not [line for line in lines if not LINE.fullmatch(line)]


def test_pre_commit_runs_the_ruff_of_the_locks() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"ruff=={repository['rev'].removeprefix('v')}" in locked("cpu")


def torch_of_cpu(folder: Path) -> None:
    """Write a CPU wheel of PyTorch with only metadata, which is all that the resolver reads. PyPI has no CPU wheel."""
    installed = distribution("torch")
    if installed.version not in {pin.partition("==")[2] for pin in locked("cpu")}:
        pytest.skip(
            f"PyTorch {installed.version} is installed, so the requirements of the locked CPU build are unknown"
        )
    stem = f"torch-{installed.version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", installed.read_text("METADATA") or "")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.slow
@pytest.mark.parametrize(("device", "python"), [("cpu", "3.11"), ("cpu", "3.12"), ("cuda", "3.12")])
def test_a_lock_resolves_to_itself(device: str, python: str, tmp_path: Path) -> None:
    """Resolving the lock together with its .in file adds nothing, finds every wheel and meets no conflict."""
    words = ["pip", "compile", "--only-binary", ":all:", "--no-header", "--no-annotate", "--find-links", str(tmp_path)]
    words += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_31"]
    if device == "cpu":
        torch_of_cpu(tmp_path)
        words += ["--excludes", str(CONSTRAINTS / "cpu.excludes")]
    files = [str(CONSTRAINTS / f"{device}.{kind}") for kind in ("in", "txt")]
    uv = Path(sys.executable).with_name("uv")
    environment = os.environ | {"UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_TIMEOUT": "300"}
    done = subprocess.run([uv, *words, *files], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == locked(device)


def locked_wheel(package: str, folder: Path) -> zipfile.ZipFile:
    """Download the wheel from PyPI, without its dependencies."""
    (pin,) = (each for each in locked("cuda") if each.startswith(f"{package}=="))
    words = ["download", "-q", "--timeout", "300", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), pin]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (wheel,) = folder.iterdir()
    return zipfile.ZipFile(wheel)


@pytest.mark.slow
def test_the_locked_quack_has_the_names_that_the_head_calls(tmp_path: Path) -> None:
    wheel = locked_wheel("quack-kernels", tmp_path)
    for module, names in quack_in_torch.NAMES.items():
        file = module.replace(".", "/")
        text = wheel.read(f"{file}.py" if f"{file}.py" in wheel.namelist() else f"{file}/__init__.py").decode()
        assert not [name for name in names if not re.search(rf"\b{name}\b", text)], module
    frontend = ast.parse(wheel.read("quack/epilogue/frontend.py"))
    (gemm,) = (each for each in ast.walk(frontend) if isinstance(each, ast.FunctionDef) and each.name == "gemm")
    assert set(quack_in_torch.WORDS) <= {each.arg for each in gemm.args.kwonlyargs}


@pytest.mark.slow
def test_the_locked_flash_attn_takes_our_arguments(tmp_path: Path) -> None:
    """Our SIGNATURES equal the function's first arguments, up to the last one that we pass."""
    tree = ast.parse(locked_wheel("flash-attn-4", tmp_path).read("flash_attn/cute/interface.py"))
    found = next(each for each in tree.body if getattr(each, "name", None) == "flash_attn_varlen_func")
    for each in found.args.args:
        each.annotation = None
    assert ast.unparse(found.args).startswith(SIGNATURES["flash4"])
