"""The wheel, installed into an empty folder, works as it does for a user without a checkout."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from documented_commands import run_by
from documents import blocks

from marsrl.trainer.report.metrics import read_metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "api",
    "kernels",
    "rollout",
    "trainer",
    "commands",
    "configs",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "LICENSE",
    "README.md",
)

# Run `marsrl`, the dry run and a run in one process: eight starts of Python would take most of the test's time.
COMMANDS = """
import sys
from pathlib import Path

import marsrl
import marsrl.commands.cli as cli
import marsrl.trainer.main as main

assert cli.main(["doctor"]) == 0
assert cli.main(["init", "--shape", "tiny", "--tokenizer", "arithmetic", "model"]) == 0
assert cli.main(["plan", "--config", "qwen3_8b", "--gpus", "8"]) == 0
assert cli.main(["plan", "--config", "qwen3_30b_a3b.yaml", "--gpus", "64"]) == 0
assert main.main(["--dry-run"]) == 0
assert cli.main(["view", "--demo", "--text"]) == 0
assert main.main(sys.argv[2:]) == 0
assert cli.main(["report", "runs/wheel"]) == 0
assert marsrl.load_run("runs/wheel").metrics[-1]["step"] == 2
files = [Path(m.__file__) for n, m in sys.modules.items() if n.split(".")[0] == "marsrl" and getattr(m, "__file__", None)]
elsewhere = [file for file in files if not file.is_relative_to(sys.argv[1])]
assert len(files) > 20 and not elsewhere, elsewhere
"""


def copy_of_the_checkout(folder: Path) -> Path:
    """Copy the files that setup.py reads, without build products."""
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "_lib"))
        else:
            shutil.copy2(ROOT / part, folder / part)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with a wheel in dist/, built by the docs' command without the C++ library."""
    folder = copy_of_the_checkout(tmp_path_factory.mktemp("source"))
    build, _ = run_by("test_a_wheel_has_the_presets_and_trains")
    words = [sys.executable, "-m", *shlex.split(build), "--no-build-isolation", "-q"]
    subprocess.run(words, check=True, cwd=folder, env={**os.environ, "MARSRL_BUILD": "off"})
    return folder


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only marsrl, from the wheel, and the C++ library of this checkout."""
    folder = tmp_path_factory.mktemp("place")
    _, install = run_by("test_a_wheel_has_the_presets_and_trains")
    words = [sys.executable, "-m", *shlex.split(install), "--no-deps", "--target", str(folder), "-q"]
    subprocess.run(words, check=True, cwd=source)
    shutil.copytree(ROOT / "kernels" / "_lib", folder / "marsrl" / "kernels" / "_lib")
    return folder


def test_a_wheel_has_every_file_of_its_folders(source: Path) -> None:
    """This includes presets, prompt sets, the viewer's pages and py.typed."""
    (path,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        shipped = {name for name in wheel.namelist() if name.startswith("marsrl/")}
        (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        about = message_from_bytes(wheel.read(metadata))
    files = [path for folder in PARTS[:6] for path in (source / folder).rglob("*") if path.is_file()]
    assert shipped == {f"marsrl/{path.relative_to(source)}".replace("marsrl/api/", "marsrl/") for path in files}
    assert {f"marsrl/{place}py.typed" for place in ("", "kernels/", "rollout/", "trainer/", "commands/")} <= shipped
    assert about["Description-Content-Type"] == "text/markdown" and str(about.get_payload()).startswith("# marsrl\n")


@pytest.mark.parametrize("command", run_by("test_a_release_is_built_and_checked"))
def test_a_release_is_built_and_checked(command: str, tmp_path: Path) -> None:
    """Runs the code block of docs/release.md, whose first line creates the environment for the others."""
    (block,) = (block.text for block in blocks(ROOT / "docs" / "release.md") if command in block.text)
    for name in ("csrc", "constraints", "CMakeLists.txt"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tmp_path / name)
    script = block.replace("/tmp/", f"{tmp_path}/")
    environment = {**os.environ, "MARSRL_BUILD": "off"}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=copy_of_the_checkout(tmp_path), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("PASSED") == 2


def test_a_wheel_has_the_presets_and_trains(installed: Path, tmp_path: Path) -> None:
    words = [
        "policies.main.model=model", "policies.main.reference=start", "loss.kl=k3",  # a KL term, because all rewards are still 0
        "loss.kl_coef=0.1", "rollout.engine=local", "rollout.placement=local", "rollout.prompts_per_step=2",
        "rollout.group_size=2", "rollout.max_response_tokens=12", "run.steps=2", "run.name=wheel",
        "evaluate={num_problems: 2, fixed_inputs: 2}",
    ]  # fmt: skip
    command = [sys.executable, "-c", COMMANDS, str(installed), *words]
    # PYTHONPATH comes before site-packages, in which marsrl may be installed from a checkout.
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    shown = done.stdout
    assert "linear_policy_loss" in shown  # doctor
    assert "# settings: preset math_default.yaml < preset qwen3_8b.yaml\n8 x h100-80g" in shown
    assert "# settings: preset cpu_default.yaml\nbatch arithmetic:" in shown
    run = tmp_path / "runs" / "wheel"
    rows = read_metrics(run / "metrics.jsonl")
    assert [row.values["actor/empty_steps"] for row in rows] == [0, 0]
    assert "<html" in (run / "report.html").read_text()[:200]
    assert (run / "config.yaml").read_text().startswith("# settings: preset cpu_default.yaml < command line\n")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_wheel_has_the_recorded_run(installed: Path) -> None:
    demo = contents(ROOT / "commands/look/demo")
    assert contents(installed / "marsrl/commands/look/demo") == demo
    assert {"config.yaml", "metrics.jsonl"} <= demo.keys() and sum(map(len, demo.values())) < 2_000_000
