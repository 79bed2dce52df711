"""Run documented commands that print something, load config blocks, and run commands for GPUs as dry runs, with real paths."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from desk import MODEL, Desk, boxing_model, published_model
from documented_commands import run_by
from documents import ROOT, config_blocks, python_blocks
from pyarrow import Table
from pyarrow.parquet import write_table

from marsrl.commands import cli
from marsrl.rollout.engines.refusals import num_engine_gpus
from marsrl.rollout.tools.config import HttpSearch
from marsrl.rollout.tools.servers import Retrieval
from marsrl.trainer.config.explain import as_yaml
from marsrl.trainer.config.read import read_config
from marsrl.trainer.main import main
from marsrl.trainer.models.init_model import init_model

pytestmark = [pytest.mark.slow, pytest.mark.smoke]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    # The output of --help must not depend on the shell that started pytest.
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    os.chdir(tmp_path)
    return Desk(tmp_path)


def call(words: list[str]) -> int:
    """Run a command in this process: starting Python for each would take minutes."""
    while words[0] != "marsrl" and not words[0].endswith("main.py"):
        words = words[1:]
    return cli.main(words[1:]) if words[0] == "marsrl" else main(words[1:])


def holds(part: Any, whole: Any) -> bool:
    """Check that every leaf of `part` is in `whole`, with paths made absolute."""
    if isinstance(part, dict):
        return all(name in whole and holds(below, whole[name]) for name, below in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(holds, part, whole))
    return bool(part == whole) or (isinstance(part, str) and os.path.abspath(part) == whole)


SHOWN = {"prompts": "corrector", "doctor": "linear_policy_loss", "try": "advantage"}
SHOWN["make-facts"] = "224 documents, 200 papers, 10,000 + 300 questions\n"


@pytest.mark.parametrize("command", run_by("test_a_command_does_what_it_says"))
def test_a_command_does_what_it_says(command: str, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    own = "policies.main.model=/path/to/Qwen3-0.6B data.train=problems.jsonl"
    words = desk.words(command, lambda name: boxing_model(desk.folder / name), rest=own)
    before = {path.name for path in desk.folder.iterdir()}
    assert call(words) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    left = {path.name for path in desk.folder.iterdir()} - before
    match words[:2]:
        case ["marsrl", "config"]:  # tested in tests/trainer/test_config_command.py
            assert len(shown.splitlines()) > 3 and not left
        case ["marsrl", ("prompts" | "doctor" | "try" | "make-facts") as name]:
            assert SHOWN[name] in shown and not left - {"__pycache__", "tmp"}
        case ["marsrl", "tool"] if words[2] == "convert":
            assert shown.startswith("3000 m\n# ") and not left
        case ["marsrl", "tool"]:
            kind, num = ("Doc", 3) if words[2] == "search" else ("Paper", 4)
            asked = re.search(r"the home of (\w+ \w+)", command)
            assert asked is None or shown.startswith(f"Doc 1(Title: {asked[1]}) the home of {asked[1]} is ")
            assert f"{kind} {num}(Title: " in shown and f" {num} parts, whole\n" in shown and not left
        case ["marsrl", "curate"]:
            curated = (desk.folder / "curated/curated.jsonl").read_text().splitlines()
            assert len(curated) == (2 if "curate.level.field=level" in words else 3) and left == {"curated"}
            assert (desk.folder / "curated/report.html").is_file() and shown == "curated/report.html\n"
        case ["marsrl", "init"]:
            assert Path(words[-1], "model.safetensors").is_file() and Path(words[-1], "tokenizer.json").is_file()
        case ["marsrl", "plan"]:
            gpus = words[words.index("--gpus") + 1]
            kind = words[words.index("--gpu") + 1] if "--gpu" in words else "h100-80g"
            assert f"{gpus} x {kind}" in shown and "a step:" in shown
            assert left == ({"plan.json"} if "--json" in words else set())
            if left:
                assert json.loads((desk.folder / "plan.json").read_text())["fits"] is True
        case ["python", "trainer/main.py"]:
            given = dict(word.split("=", 1) for word in words if "=" in word)
            assert "samples a step" in shown and "\nsettings:\n" not in shown and not left - {"__pycache__"}
            config, _ = dry_run([word for word in words if word != "--dry-run"], capsys)
            for key, value in given.items():
                section: Any = config
                for part in key.split("."):
                    section = section[part]
                assert str(section) in (value, os.path.abspath(value))


@pytest.mark.parametrize("command", run_by("test_the_judge_of_a_file_is_tried"))
def test_the_judge_of_a_file_is_tried(command: str, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    code = call(desk.words(command, Path))
    shown = capsys.readouterr().out
    assert shown.startswith("12 of 12 problems, ") and "\n  the reference itself " in shown
    assert code == ("have misjudged answers" in shown)


@pytest.mark.parametrize("block", config_blocks(), ids=lambda block: block.where)
def test_a_config_block_passes_its_checks(
    block: Any, desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MODEL.sub(lambda match: str(published_model(desk.folder / match[2], match[2])), block.text)
    if "task: reasoning_gym" in text:
        pytest.importorskip("reasoning_gym")
    Path("block.yaml").write_text(text)
    desk.write_problems(text)
    written = yaml.safe_load(text)
    os.environ |= {"SERPAPI_API_KEY": "key", "JUDGE_KEY": "key"}
    preset, _ = read_config(written.pop("preset", None))
    if preset.run.device == "cuda":
        ranks = 8 - num_engine_gpus(tuple(preset.served_rollouts.values()))
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        pretend_gpus(monkeypatch)
    config, _ = dry_run(["trainer/main.py", "--config", "block.yaml"], capsys)
    assert holds(written, config)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make our own checks find eight GPUs. tests/plan/test_presets.py runs vLLM's and Megatron's checks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * 2**30))


def test_hle_is_cut_into_the_subjects_that_are_evaluated(desk: Desk) -> None:
    """The script of docs/dual_system.md writes the files that the config on that page lists."""
    subjects = (
        "Biology/Medicine", "Chemistry", "Computer Science/AI", "Engineering", "Humanities/Social Science", "Math", "Other",
        "Physics",
    )  # fmt: skip
    rows = [
        {"id": "x", "question": f"{subject}?", "answer": "1", "image": image, "category": subject}
        for subject in subjects
        for image in ("", "data:image/png;base64,", "")
    ]
    write_table(Table.from_pylist(rows), "hle.parquet")
    (script,) = (block.text for block in python_blocks() if "hle.parquet" in block.text)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = [file["path"] for file in yaml.safe_load(Path("mars.yaml").read_text())["data"]["eval"]]
    assert sorted(listed) == sorted(str(path) for path in Path("hle").iterdir())
    (math,) = (path for path in listed if "math" in path)
    lines = Path(math).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"question": "Math?", "answer": "1"}] * 2


@pytest.mark.parametrize("command", run_by("test_a_run_on_gpus_passes_its_checks"))
def test_a_run_on_gpus_passes_its_checks(
    command: str, desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = desk.words(command, lambda name: published_model(desk.folder / name, name))
    options = ("--nnodes", "--nproc-per-node")
    nodes, ranks = (int(words[words.index(option) + 1]) if option in words else 1 for option in options)
    os.environ["WORLD_SIZE"] = str(nodes * ranks)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    os.environ["SERPAPI_API_KEY"] = "key"  # MARS searches the web with this key
    os.environ.pop("MARSRL_DEVICE", None)
    assert call([*words, "--dry-run"]) == 2
    assert "run.device is cuda: PyTorch sees no GPU: " in capsys.readouterr().err
    if "configs/single_gpu.yaml" in command:  # check also that the command would run on a CPU
        assert call([*words, "--dry-run", "run.device=cpu"]) == 0, capsys.readouterr().err
        assert "ranks: 1, on CPUs" in capsys.readouterr().out
    pretend_gpus(monkeypatch)
    preset = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
    if "directory" in preset.get("sync", {}):
        words.append(f"sync.directory={desk.folder}")
    config, shown = dry_run(words, capsys)
    assert "samples a step" in shown
    # Leave out the keys that the command sets.
    for key in ["policies.main.model", *(word.partition("=")[0] for word in words if "=" in word)]:
        *sections, name = key.split(".")
        part = preset
        for section in sections:
            part = part.get(section, {})
        part.pop(name, None)
    assert holds({key: preset[key] for key in ("policies", "rollout") if key in preset}, config)


def dry_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Return (resolved config, all output)."""
    assert call([*words, "--dry-run", "--full"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    return yaml.safe_load(shown.partition("\nsettings:\n")[2]), shown


TEAMS = {  # a word of the command: (agents, phrase of the printed batch arithmetic)
    "rollout.refill.groups=6": ("solver", "one agent: 128 samples a step"),  # up to 16 problems of 8 samples
    "orchestration=solver": ("solver", "one agent: 64 samples a step"),
    "orchestration=solver_verifier": ("solver verifier", "128 samples of solver"),
    "preset=cpu_solver_verifier": ("solver verifier", "128 samples of solver"),
    "orchestration=debate": ("debater", "one agent: 384 samples a step"),
    "orchestration=team.py:Checked": ("solver verifier corrector", "at most 192 samples a step"),
    "own_team.yaml": ("first second judge", "at most 192 samples a step, if each agent is called once per episode"),
    "own_task.yaml": ("solver verifier1 corrector1 verifier2 corrector2", "576 samples a step"),
    "orchestration=dual_system": ("system2 system1", "40 samples of system2"),
    "warm_start.ready=false": ("solver verifier1 corrector1 verifier2 corrector2", "576 samples a step"),
    "task=qa": ("verifier search answer", "at most 320 samples a step"),
}


@pytest.mark.parametrize("command", run_by("test_another_team_passes_its_checks"))
def test_another_team_passes_its_checks(command: str, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    words = desk.words(command, lambda name: boxing_model(desk.folder / name))
    config, shown = dry_run(words, capsys)
    agents, batch = next(TEAMS[word] for word in TEAMS if word in command.split())
    assert " ".join(config["agents"]) == agents and batch in shown


# Tests that start engines for a documented run. Programs are left out, because even a dry run imports their packages.
WHOLE = (
    "test_a_model_of_ones_own_is_trained",
    "test_the_default_run_starts_as_it_is_written",
    "test_a_solver_and_a_verifier_of_their_own_sizes_train",
    "test_the_five_adapters_in_miniature_train",
    "test_a_team_in_miniature_trains",
    "test_an_example_trains",
    "test_the_teacher_examples_train_a_small_solver",
)


@pytest.mark.parametrize("command", [command for test in WHOLE for command in run_by(test)])
def test_a_documented_run_passes_its_checks(command: str, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    words = desk.words(command, lambda name: boxing_model(desk.folder / name))
    if "--config" in words:  # examples name models that other commands make
        config, _ = read_config(words[words.index("--config") + 1])
        absent = [name for name, each in config.policies.items() if each.model and not Path(each.model).exists()]
        tokenizer = "arithmetic" if config.task == "arithmetic" else "bytes"
        words += [f"policies.{name}.model={init_model('tiny', tokenizer, desk.folder / name)}" for name in absent]
    assert "samples a step" in dry_run(words, capsys)[1]


@pytest.mark.parametrize("command", run_by("test_several_files_pass_their_checks"))
def test_several_files_pass_their_checks(command: str, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    words = desk.words(command, lambda name: boxing_model(desk.folder / name))
    files = dry_run(words, capsys)[0]["data"]["train"]
    expected = {f"{desk.folder}/problems.jsonl": 3, f"{desk.folder}/aime25.jsonl": 1}
    assert {file["path"]: file["weight"] for file in files} == expected


@pytest.mark.parametrize("command", run_by("test_documents_are_served_until_ctrl_c"))
def test_documents_are_served_until_ctrl_c(command: str, desk: Desk) -> None:
    process = desk.start([*desk.words(command, Path), "--port", "0"])
    try:
        deadline = time.monotonic() + 600
        while not (found := re.search(r"1 documents of wiki-18.jsonl at (http://127.0.0.1:\S+)\n", desk.console())):
            assert process.poll() is None and time.monotonic() < deadline, desk.console()
            time.sleep(0.05)
        with closing(Retrieval(HttpSearch(kind="http", url=found[1], request_timeout_s=60.0))) as tool:
            assert tool.run({"query": "seven"}) == ["Doc 1(Title: Seven) It is 7."]
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0, desk.console()
        assert (desk.folder / "wiki-18.sqlite").is_file() and "Traceback" not in desk.console()
    finally:
        process.kill()


@pytest.mark.parametrize("command", run_by("test_a_program_is_found_by_its_module"))
def test_a_program_is_found_by_its_module(command: str, desk: Desk) -> None:
    assert desk.start([*desk.words(command, Path), "--help"]).wait(600) == 0, desk.console()
    assert "torchrun trainer/main.py task=math" in desk.console()


@pytest.mark.parametrize("command", run_by("test_a_run_s_settings_become_a_file"))
def test_a_run_s_settings_become_a_file(command: str, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    config, origin = read_config(None, ["run.steps=5"])
    Path("runs/NAME").mkdir(parents=True)
    Path("runs/NAME/config.yaml").write_text(f"# settings: {origin}\n{as_yaml(config)}")
    assert call(desk.words(command, Path)) == 0, capsys.readouterr().err
    assert read_config("my.yaml")[0].run.steps == 5


PARSE = """
import argparse, os, runpy, shlex, sys
class Taken(BaseException): pass
def stopping(parse):
    def parse_and_stop(self, *words):
        parse(self, *words)
        raise Taken
    return parse_and_stop
for name in ("parse_args", "parse_intermixed_args"):
    setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
for line in sys.stdin:
    sys.argv = shlex.split(line)[1:]
    sys.path[0] = os.path.abspath(os.path.dirname(sys.argv[0]))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        print(line, "it came to its end before it read its words")
    except Taken:
        print("taken")
    except SystemExit:
        print("refused", line)
"""


def test_a_benchmark_takes_its_words() -> None:
    """One process runs all benchmarks, and stops each once it has parsed its arguments."""
    commands = run_by("test_a_benchmark_takes_its_words")
    wrong = "python benchmarks/run.py --no-such-option"
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input="\n".join([*commands, wrong]), cwd=ROOT,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.splitlines() == [*["taken"] * len(commands), f"refused {wrong}"], done.stdout + done.stderr


def test_make_runs_commands_that_are_tested() -> None:
    for command in run_by("test_make_runs_commands_that_are_tested"):
        installed = ["--dry-run", "--no-print-directory", "TRITON=x", "--assume-old", "build/triton-x", "--assume-old"]
        words = [*shlex.split(command), "MARSRL_DEVICE=$(INSTALLED_DEVICE)", *installed, ".venv/.installed"]
        alone = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=alone)
        assert done.returncode == 0 and done.stdout, done.stderr
        if command == "make bench":
            assert set(done.stdout.splitlines()) <= set(run_by("test_a_benchmark_takes_its_words"))


def test_one_file_of_tests_runs() -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    for command in run_by("test_one_file_of_tests_runs"):
        words = [sys.executable, *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=alone, timeout=600)
        assert done.returncode == 0 and " passed in " in done.stdout, done.stdout + done.stderr
