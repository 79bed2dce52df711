"""The wheel, installed into an empty place and started from there: what a user without a checkout has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from marsrl.trainer.report.metrics import read_metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
PARTS = ("kernels", "rollout", "trainer", "configs", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE")

# What `marsrl`, the dry run and a run do, in one process: six starts of Python would take most of the test's time.
COMMANDS = """
import sys
from pathlib import Path

import marsrl.trainer.commands.cli as cli
import marsrl.trainer.main as main

assert cli.main(["doctor"]) == 0
assert cli.main(["init", "--shape", "tiny", "--tokenizer", "arithmetic", "model"]) == 0
assert cli.main(["plan", "--config", "qwen3_8b", "--gpus", "8"]) == 0
assert cli.main(["plan", "--config", "qwen3_30b_a3b.yaml", "--gpus", "64"]) == 0
assert main.main(["--dry-run"]) == 0
assert main.main(sys.argv[2:]) == 0
files = [Path(m.__file__) for n, m in sys.modules.items() if n.startswith("marsrl.") and getattr(m, "__file__", None)]
elsewhere = [file for file in files if not file.is_relative_to(sys.argv[1])]
assert len(files) > 20 and not elsewhere, elsewhere
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds marsrl from its wheel and nothing else.

    The native libraries are those of this checkout, put where the build puts them: to compile them again takes a minute.
    """
    source, wheels, place = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "place"))
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__", "_lib"))
        else:
            shutil.copy2(ROOT / part, source / part)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run(build, check=True, env={**os.environ, "MARSRL_BUILD": "off"})
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place), *map(str, wheels.iterdir())], check=True)
    shutil.copytree(ROOT / "kernels" / "_lib", place / "marsrl" / "kernels" / "_lib")
    return place


def test_a_wheel_has_the_presets_and_trains(installed: Path, tmp_path: Path) -> None:
    words = [
        "policies.main.model=model", "policies.main.reference=start", "loss.kl=k3",  # a KL term: rewards are all 0 yet
        "loss.kl_coef=0.1", "rollout.engine=local", "rollout.placement=local", "rollout.prompts_per_step=2",
        "rollout.group_size=2", "rollout.max_response_tokens=12", "run.steps=2", "run.name=wheel",
        "evaluate={num_problems: 2, fixed_inputs: 2}",
    ]  # fmt: skip
    command = [sys.executable, "-c", COMMANDS, str(installed), *words]
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
    }  # before site-packages, where a checkout may be installed
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
