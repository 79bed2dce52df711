"""The GPU suite finds its way without an installation, past whatever fails, and packs what it has found."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from scripts import BENCHMARKS, ROOT, call, script


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "made_up_peer-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("made_up_peer/__init__.py", "NAME = 'made up'\n")
        archive.writestr("made_up_peer-1.0.dist-info/METADATA", "Name: made-up-peer\nVersion: 1.0\n")
    return folder


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return script("gpu_suite")


def test_a_wheel_can_be_imported_without_installing_it(suite: ModuleType, wheel: Path, tmp_path: Path) -> None:
    path = suite.importable(wheel, tmp_path / "unpacked")
    found = call(
        code=f"import sys; sys.path.insert(0, {str(path)!r}); import made_up_peer; print(made_up_peer.__file__)"
    )
    assert found.stdout.strip() == str(path / "made_up_peer" / "__init__.py")
    with pytest.raises(ValueError, match=r"--wheels .*: expected a folder with \*.whl files"):
        suite.importable(tmp_path, tmp_path / "unpacked")


PLANTED = """
import os, time, pytest
def test_right(): pass
def test_wrong(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="not here")
def test_absent(): pass
def test_dies(): os.abort()
def test_hangs(): time.sleep(600)
def test_after_all(): pass
"""


def of_suite(suite: ModuleType, folder: Path, name: str) -> list[str]:
    """The command of one of its parts on a CPU, without Python."""
    (part,) = [part for part in suite.parts("cpu", True, folder, folder) if part.name == name]
    command: list[str] = part.command[1:]
    return command


@pytest.fixture
def linked(suite: ModuleType, tmp_path: Path) -> Path:
    """A folder on the path of child processes, with this checkout as marsrl, as the suite makes one."""
    folder: Path = suite.folder_with_marsrl(tmp_path / "linked")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["COLUMNS"] = "400"
    return folder


def test_tests_go_on_past_one_that_aborts_and_one_that_hangs(suite: ModuleType, linked: Path, tmp_path: Path) -> None:
    """The suite's own command, with a file of tests in place of the kernels'."""
    (tmp_path / "test_planted.py").write_text(PLANTED)
    words = [
        str(tmp_path / "test_planted.py") if word.startswith("tests/") else word.replace("timeout=600", "timeout=5")
        for word in of_suite(suite, tmp_path, "tests")
    ]
    done = call(*words)
    said = done.stdout
    assert done.returncode == 1 and "4 failed" not in said, said + done.stderr
    assert "3 failed, 2 passed, 1 skipped" in said.splitlines()[-1], said
    assert "test_wrong - AssertionError: one is not two" in said and "not here" in said
    assert said.count("crashed while running") >= 2 and "::test_dies" in said and "::test_hangs" in said


def test_the_tests_of_kernels_run_where_the_rest_of_the_package_cannot(
    suite: ModuleType, linked: Path, tmp_path: Path
) -> None:
    """tests/conftest.py needs pydantic, which a bare machine has not."""
    (linked / "pydantic.py").write_text("raise ImportError('there is none here')\n")
    done = call(*of_suite(suite, tmp_path, "tests"))
    assert done.returncode == 0 and "passed" in done.stdout.splitlines()[-1], done.stdout + done.stderr


def test_a_part_measures_the_shapes_of_the_loss_that_it_names() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import gpu_suite
from cases import load
titles = [shape.title() for shape in load("linear_policy_loss").shapes("cuda", False)]
for text, number in {gpu_suite.HEADLINE: 2, **dict.fromkeys(gpu_suite.OTHER_HEADS, 1), "T=65,536": 2}.items():
    assert sum(text in title for title in titles) == number, (text, titles)
"""
    done = call(str(BENCHMARKS), code=code)
    assert done.returncode == 0, done.stderr


def test_what_is_promised_has_its_time_however_long_each_part_takes(suite: ModuleType, tmp_path: Path) -> None:
    found = suite.parts("cuda", False, tmp_path, tmp_path)
    names = [part.name for part in found]
    promised = found[: names.index(suite.LAST_PROMISED) + 1]
    assert {"tests", "headline", "first steps", "two processes"} < {part.name for part in promised}
    assert sum(part.limit_s + suite.KILL_AFTER_S for part in promised) <= suite.TOTAL_S < 600 - 2 * suite.KILL_AFTER_S
    assert len(names) == len(set(names)) and set(suite.UNTIMED) == set(names[: names.index("headline")])


def test_a_part_that_does_not_fit_is_named_and_a_shorter_one_runs(suite: ModuleType, tmp_path: Path) -> None:
    long, short = (
        suite.Part(name, [sys.executable, "-c", ""], limit_s) for name, limit_s in (("a", 700.0), ("b", 300.0))
    )
    first = suite.run_part(long, dict(os.environ), tmp_path, 400.0)
    assert (first.status, first.reason) == ("skipped", "needs up to 700 s, 400 s are left")
    assert suite.run_part(short, dict(os.environ), tmp_path, 400.0).status == "ok"
    assert suite.run_part(long, dict(os.environ), tmp_path, None).status == "ok"  # a CPU's time is not lent


def test_a_cache_is_filled_past_a_launch_that_fails(suite: ModuleType) -> None:
    """Both workers take their halves; on a CPU, where a launch compiles nothing."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import fill_cache
todo = list(fill_cache.launches(["group_advantage"], "cpu", True, ""))
def fail(): raise ValueError("it cannot be launched")
assert fill_cache.work([("planted", fail), *todo], "cpu", 0, 2) == 1
assert fill_cache.work([("planted", fail), *todo], "cpu", 1, 2) == 0
loss = lambda text: list(fill_cache.launches(["linear_policy_loss"], "cuda", False, text))
assert len(loss(sys.argv[2])) == len(loss("no such shape")) + 2
"""
    done = call(str(BENCHMARKS), suite.HEADLINE, code=code)
    assert done.returncode == 0, done.stderr
    assert "failed: planted: ValueError: it cannot be launched" in done.stdout


BARE = (
    "torch", "torchgen", "functorch", "triton", "numpy", "numpy.libs", "typing_extensions.py", "sympy", "mpmath", "networkx",
    "jinja2", "markupsafe", "fsspec", "filelock", "setuptools",
)  # fmt: skip
"""torch, triton and numpy, and what torch requires."""


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """Python of an environment that has nothing else."""
    import torch

    installed = Path(torch.__file__).parents[1]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    (site_packages,) = (tmp_path / "bare").glob("lib/python3*/site-packages")
    for name in BARE:
        for path in [installed / name, *installed.glob(f"{name}-*.dist-info")]:
            if path.exists():
                (site_packages / path.name).symlink_to(path)
    return str(tmp_path / "bare" / "bin" / "python")


ONLY = ("surroundings", "build", "first steps", "group advantage")
CASES = """
import sys
sys.path.insert(0, sys.argv[1])
from cases import ORDER, load
assert all(load(name).shapes("cpu", True) for name in ORDER)
"""


@pytest.mark.slow
def test_the_suite_ends_where_there_is_only_torch_triton_and_numpy(
    suite: ModuleType, bare_python: str, wheel: Path, tmp_path: Path
) -> None:
    """Some of its parts, on the CPU; those that are skipped name every module that they miss. Every case can be imported."""
    out = tmp_path / "out"
    words = [bare_python, str(BENCHMARKS / "gpu_suite.py"), "--device", "cpu", "--quick", "--out", str(out)]
    words += ["--wheels", str(wheel), "--commit", "abc123", "--only", *ONLY]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(file.name for file in out.iterdir()) == ["report.md", "results.tar.gz"]
    with tarfile.open(out / "results.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
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
