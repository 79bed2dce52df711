"""The GPU suite finds its way without an installation, past whatever fails, and packs what it has found."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

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


def test_a_plain_wheel_can_be_imported_without_installing_it(wheel: Path, tmp_path: Path) -> None:
    wheels = script("wheels")
    (path,) = wheels.importable(wheel, tmp_path / "unpacked")
    found = call(
        code=f"import sys; sys.path.insert(0, {str(path)!r}); import made_up_peer; print(made_up_peer.__file__)"
    )
    assert found.stdout.strip() == str(path / "made_up_peer" / "__init__.py")
    for folder in (path, path.parent):  # as it lies there, unpacked
        assert wheels.importable(folder, tmp_path / "again") == [path] and not (tmp_path / "again").exists()


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--wheels .*: expected \*.whl files"):
        script("wheels").importable(tmp_path, tmp_path / "unpacked")


FAULTY = """
import os, pathlib, signal, sys, time
sys.path.insert(0, sys.argv[1])
from one_by_one import Journal, Skipped
def fail(): raise ValueError("the first line\\nand another\\nthe last line")
def skip(): raise Skipped("there is none here")
checks = {
    "right": lambda: None, "wrong": fail, "absent": skip, "dies": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hangs": lambda: time.sleep(600), "breaks the device": fail, "right again": lambda: None,
}
journal = Journal(pathlib.Path(sys.argv[2]))
tried = journal.tried()
for name, check in checks.items():
    if name not in tried:
        with journal.trying(name, is_broken=lambda: name == "breaks the device"):
            check()
print("the child came to its end")
"""


def one_by_one(journal: Path, *child: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    words = ["--limit", str(limit_s), "--journal", str(journal), "--", sys.executable, *child]
    return call(str(BENCHMARKS / "one_by_one.py"), *words)


def test_checks_go_on_past_those_that_fail_hang_or_end_the_process(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    journal = tmp_path / "journal.jsonl"
    done = one_by_one(journal, str(tmp_path / "faulty.py"), str(BENCHMARKS), str(journal), limit_s=10)
    found = {
        check.name: (check.status, check.first, check.last) for check in script("one_by_one").Journal(journal).checks()
    }
    wrong = ("failed", "ValueError: the first line", "the last line")
    assert found == {
        "right": ("passed", "", ""),
        "wrong": wrong,
        "absent": ("skipped", "there is none here", ""),
        "dies": ("crashed", "SIGSEGV", ""),
        "hangs": ("timeout", "killed after 10 s", ""),
        "breaks the device": wrong,
        "right again": ("passed", "", ""),
    }
    assert done.returncode == 1 and done.stdout.count("the child came to its end") == 1
    assert done.stdout.splitlines()[-1] == "2 passed, 2 failed, 1 skipped, 1 crashed, 1 timeout"


def test_a_child_that_cannot_begin_is_not_started_again_and_again(tmp_path: Path) -> None:
    done = one_by_one(tmp_path / "journal.jsonl", "-c", "print('tried'); raise SystemExit(3)", limit_s=60)
    assert done.returncode == 1 and done.stdout.count("tried\n") == 1
    assert done.stdout.splitlines()[-1] == "nothing tried; ended between two checks by exit code 3"


def test_every_case_is_smoked_where_a_dtype_or_an_implementation_can_be_wrong(tmp_path: Path) -> None:
    """On what takes no import of peers; one of ours is spoiled, and is named with both ends of what the rule says."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import smoke
from cases import ORDER, load
from cases import group_advantage as case
names = [trial.name for trial in smoke.trials(ORDER, "cuda")]
assert len(names) == len(set(names)) and {name.partition(",")[0] for name in names} == set(ORDER)
heads = [name for name in names if name.startswith("linear_policy_loss")]
for dtype in smoke.DTYPES:
    for implementation in ("triton", "reference"):
        assert any(dtype in name and name.endswith(f", {implementation}") for name in heads), (dtype, implementation)
import gpu_suite
titles = [shape.title() for shape in load("linear_policy_loss").shapes("cuda", False)]
for text, number in {gpu_suite.HEADLINE: 2, **dict.fromkeys(gpu_suite.OTHER_HEADS, 1), "T=65,536": 2}.items():
    assert sum(text in title for title in titles) == number, (text, titles)
ours = case.group_advantage
case.group_advantage = lambda *words, **more: ours(*words, **more) * 1.01
sys.argv = ["smoke.py", "group_advantage", "head_gemms", "--device", "cpu"]
raise SystemExit(smoke.main())
"""
    done = call(str(BENCHMARKS), code=code)
    assert done.returncode == 1, done.stderr
    assert "failed: group_advantage, S=64, float32, groups of 8, cpu" in done.stdout
    assert "AssertionError: ours, advantage: error " in done.stdout
    assert done.stdout.splitlines()[-1] == "2 failed, 9 passed"


def suite_checks(journal: Path) -> list[Any]:
    return script("one_by_one").Journal(journal).checks()


PLANTED = """
import os, pytest
def test_right(): pass
def test_wrong(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="not here")
def test_absent(): pass
def test_dies(): os.abort()
@pytest.mark.parametrize("way", ["a", "b"])
def test_after_all(way): pass
"""


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "timing", raising=False)
    return script("gpu_suite")


def test_gpu_tests_are_told_by_name_past_one_that_aborts(suite: ModuleType, tmp_path: Path) -> None:
    """By the suite's own command, with a file of tests in place of the kernels'."""
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (part,) = [part for part in suite.parts("cpu", True, tmp_path, tmp_path) if part.name == "tests"]
    planted = [str(tmp_path / "test_planted.py") if word.startswith("tests/") else word for word in part.command]
    done = call(*planted[1:])
    found = {each.name.partition("::")[2]: (each.status, each.first) for each in suite_checks(tmp_path / "tests.jsonl")}
    assert found == {
        "test_right": ("passed", ""),
        "test_wrong": ("failed", "AssertionError: one is not two"),
        "test_absent": ("skipped", "Skipped: not here"),
        "test_dies": ("crashed", "SIGABRT"),
        "test_after_all[a]": ("passed", ""),
        "test_after_all[b]": ("passed", ""),
    }, done.stdout + done.stderr


def test_the_tests_of_kernels_run_where_the_rest_of_the_package_cannot(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/conftest.py needs pydantic, which a bare machine has not."""
    (tmp_path / "pydantic.py").write_text("raise ImportError('there is none here')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (part,) = [part for part in suite.parts("cpu", True, tmp_path, tmp_path) if part.name == "tests"]
    done = call(*part.command[1:])
    checks = suite_checks(tmp_path / "tests.jsonl")
    assert len(checks) > 10 and {check.status for check in checks} == {"passed"}, done.stdout + done.stderr


def test_what_is_promised_has_its_time_however_long_each_part_takes(suite: ModuleType, tmp_path: Path) -> None:
    found = suite.parts("cuda", False, tmp_path, tmp_path)
    names = [part.name for part in found]
    promised = found[: names.index(suite.LAST_PROMISED) + 1]
    assert [part.name for part in promised] == [
        "surroundings",
        "build",
        "smoke",
        "tests",
        "headline",
        "first steps",
        "two processes",
        "attention varlen",
        "grouped linear",
    ]
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
    """By both workers, each with its half; on a CPU, where a launch compiles nothing."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import fill_cache
from cases import load
todo = list(fill_cache.launches(["group_advantage"], "cpu", True, ""))
shapes = load("group_advantage").shapes("cpu", True)
assert [name for name, _ in todo][-len(shapes):] == [f"group_advantage, {shape.title()}" for shape in shapes]
def fail(): raise ValueError("it cannot be launched")
assert fill_cache.work([("planted", fail), *todo], "cpu", 0, 2) == 1
assert fill_cache.work([("planted", fail), *todo], "cpu", 1, 2) == 0
loss = lambda text: list(fill_cache.launches(["linear_policy_loss"], "cuda", False, text))
assert len(loss(sys.argv[2])) == len(loss("no such shape")) + 2
"""
    done = call(str(BENCHMARKS), suite.HEADLINE, code=code)
    assert done.returncode == 0, done.stderr
    assert "failed: planted: ValueError: it cannot be launched" in done.stdout
    assert "worker 1 of 2: " in done.stdout


BARE = (
    "torch", "torchgen", "functorch", "triton", "numpy", "numpy.libs", "typing_extensions.py", "sympy", "mpmath", "networkx",
    "jinja2", "markupsafe", "fsspec", "filelock", "setuptools",
)  # fmt: skip
"""torch, triton and numpy, and what torch requires."""


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """Of an environment that has nothing else."""
    import torch

    installed = Path(torch.__file__).parents[1]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    (site_packages,) = (tmp_path / "bare").glob("lib/python3*/site-packages")
    for name in BARE:
        for path in [installed / name, *installed.glob(f"{name}-*.dist-info")]:
            if path.exists():
                (site_packages / path.name).symlink_to(path)
    return str(tmp_path / "bare" / "bin" / "python")


@pytest.mark.slow
def test_the_suite_comes_to_its_end_where_there_is_nothing_but_torch_triton_and_numpy(
    suite: ModuleType, bare_python: str, tmp_path: Path
) -> None:
    """Every part, on the CPU; those that are skipped name every module that they miss. Under 2 minutes of CPU time."""
    out = tmp_path / "out"
    words = [bare_python, str(BENCHMARKS / "gpu_suite.py"), "--device", "cpu", "--quick", "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(out / "results.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    found = json.loads((tmp_path / "results" / "suite.json").read_text())["parts"]
    planned = suite.parts("cpu", True, tmp_path, tmp_path)
    assert [part["name"] for part in found] == [part.name for part in planned]
    there = {"psutil", "jinja2"} & set(BARE)
    for part, outcome in zip(planned, found, strict=True):
        missing = [name for name in part.modules if name not in there]
        expected = ("skipped", f"missing module {', '.join(missing)}") if missing else ("ok", "")
        assert (outcome["status"], outcome["reason"]) == expected, outcome


def test_what_travels_is_what_was_imported_and_somebody_requires(suite: ModuleType) -> None:
    """pydantic is ours and requires pydantic_core; antlr4 was imported by something that does not require it; the rest is for
    the tests of kernels."""
    collect = script("collect_wheels")
    modules = {"pydantic", "pydantic_core", "antlr4", "yaml", "json", "torch", "sympy"}
    found = collect.travelling(modules, ["PyYAML"])
    assert {"pydantic", "pydantic-core", "pytest", "pluggy", "hypothesis"} <= set(found)
    assert not {"antlr4-python3-runtime", "pyyaml", "torch", "sympy", "annotated-types", "marsrl"} & set(found)
    # who has pytest and pydantic may have them without what they require here
    with_more = collect.travelling(modules, ["PyYAML", "pydantic", "pytest"])
    assert set(found) - set(with_more) == {"pydantic", "pytest"}


def test_modules_are_seen_in_children_too(suite: ModuleType, tmp_path: Path) -> None:
    collect = script("collect_wheels")
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import zipfile'], check=True)"
    seen = collect.imported_modules([[sys.executable, "-c", child]], tmp_path)
    assert {"subprocess", "zipfile"} <= seen and "tarfile" not in seen
    with pytest.raises(RuntimeError, match="exit code 3"):
        collect.imported_modules([[sys.executable, "-c", "raise SystemExit(3)"]], tmp_path)


@pytest.mark.slow
def test_the_suite_goes_its_way_on_a_cpu(wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--device", "cpu", "--quick", "--out", str(out), "--wheels", str(wheel), "--commit", "abc123"]
    done = call(str(BENCHMARKS / "gpu_suite.py"), *words, "--only", "dz rows", "first steps")
    assert sorted(file.name for file in out.iterdir()) == ["report.md", "results.tar.gz"]
    with tarfile.open(out / "results.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    results = tmp_path / "results"
    parts = {part["name"]: part for part in json.loads((results / "suite.json").read_text())["parts"]}
    assert parts["dz rows"]["status"] == "ok", done.stdout
    steps = parts["first steps"]
    assert steps["status"] == "ok" or steps["reason"].startswith("missing module"), steps
    report = (out / "report.md").read_text()
    assert report == (results / "report.md").read_text() and "commit abc123" in report
    assert "## dz rows\n\n```\nlinear_policy_loss: " in report and "\n## first steps\n" in report
    assert (results / "first_steps.log").stat().st_size > 0
