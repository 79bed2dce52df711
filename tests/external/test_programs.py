"""Programs of other libraries train as examples/README.md says: the real packages, from PyPI, in environments of their own."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import run_by
from documents import ROOT
from scripted_pool import rows_of, samples_of
from small_run import run_here

from marsrl.trainer.commands import cli
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.samples_log import SampleRecord
from marsrl.trainer.runs.directory import RunDirectory

pytestmark = pytest.mark.slow

SMALL = ("run.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "evaluate.num_problems=2")
TRAINS = "loss.entropy_coef=0.01"  # also where all rewards of a model with random weights are equal


Made = Callable[[str], Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """made("/tmp/agents"): the virtual environment that a command of the documents makes there, in a folder of the tests."""
    folder = tmp_path_factory.mktemp("environments")
    commands = {shlex.split(each)[3]: each for each in run_by("test_an_environment_has_what_its_programs_import")}
    # what is not imported is not compiled either
    paths = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PIP_NO_COMPILE": "1"}

    @functools.cache
    def make(name: str) -> Path:
        command = commands[name].replace("/tmp/", f"{folder}/")
        done = subprocess.run(command, shell=True, env=paths, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr[-4000:]}"
        return folder / Path(name).name

    return make


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """model("/tmp/clerk/hf"): what is in the examples' folder of this name, taught or random."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(name: str) -> Path:
        if name.startswith("/tmp/clerk"):
            (command,) = run_by("test_a_clerk_is_taught_to_hand_off")
            own = [f"policies.main.model={make('/tmp/tiny')}", f"run.dir={folder}"]
            assert cli.main([*shlex.split(command)[1:], *own]) == 0
            return folder / "clerk/hf"
        return init_model("tiny", "bytes" if name == "/tmp/tiny" else "arithmetic", folder / Path(name).name)

    return make


def settings_of(command: str, made: Made, model: Made) -> list[str]:
    """The command's words, with paths filled in. Policies without a model get random weights: a warm start takes minutes."""
    _, _, option, path = shlex.split(command)
    written = yaml.safe_load((ROOT / path).read_text())
    words = [option, str(ROOT / path), *SMALL]
    for policy in {agent["policy"] for agent in written["agents"].values()}:
        directory = model(written.get("policies", {}).get(policy, {}).get("model", "words"))
        words += [f"policies.{policy}.model={directory}", f"policies.{policy}.shape=null"]
    if python := written["external"].get("python"):
        words.append(f"external.python={made(python.removesuffix('/bin/python'))}/bin/python")
    return words


@pytest.mark.parametrize("command", run_by("test_an_environment_has_what_its_programs_import"))
def test_an_environment_has_what_its_programs_import(command: str, made: Made) -> None:
    name = shlex.split(command)[3]
    modules = "verifiers.v1" if "verifiers" in name else "agents, langgraph, langchain_openai"
    subprocess.run([made(name) / "bin/python", "-c", f"import openai, {modules}"], check=True)


@pytest.mark.parametrize("command", run_by("test_a_clerk_is_taught_to_hand_off"))
def test_a_clerk_is_taught_to_hand_off(command: str, model: Made) -> None:
    assert (model("/tmp/clerk/hf") / "model.safetensors").is_file()


@pytest.mark.parametrize("command", run_by("test_a_program_is_trained_and_evaluated"))
def test_a_program_is_trained_and_evaluated(command: str, made: Made, tmp_path: Path, model: Made) -> None:
    num_sessions = 32 if "openai_agents" in command else 4  # about every second has a handoff
    own = [f"run.dir={tmp_path}", "run.name=played", f"rollout.group_size={num_sessions // 2}", TRAINS]
    run_here([*settings_of(command, made, model), *own])
    run = RunDirectory(tmp_path / "played")
    samples, (row,) = samples_of(run), rows_of(run)
    agents = set(yaml.safe_load(Path(shlex.split(command)[3]).read_text())["agents"])
    assert {sample.agent for sample in samples} <= agents and row["rollout/episodes"] == num_sessions
    assert row["rollout/failed_episodes"] == 0 and all(sample.reward is not None for sample in samples)
    assert {value for name, value in row.items() if name.endswith("actor/empty_steps")} == {0}  # of each policy
    calls = row["team/calls"] * row["rollout/episodes"]
    match Path(command).stem:
        case "openai_loop":  # a model with random weights is wrong each time, but for a lucky one
            assert row["rollout/foreign_tokens"] > 0 and len(samples) == 4 < calls
        case "langgraph_team":
            assert agents == {"solver", "verifier"} == {sample.agent for sample in samples}
            assert row["reward/solver/missing"] == row["reward/verifier/missing"] == 0
        case "openai_agents":
            check_handoffs(samples, num_sessions)
            assert row["clerk/actor/tokens"] > 0 and row["expert/actor/tokens"] > 0
        case "verifiers_env":
            assert calls == 4 == len(samples) and all(" c -" in sample.prompt for sample in samples)
        case "run":
            assert "x" in {sample.agent for sample in samples} and {sample.reward for sample in samples} & {-1.0, 0.0}


def check_handoffs(samples: list[SampleRecord], num_sessions: int) -> None:
    """The expert answers where the clerk has called, on the question alone, and both have the reward of the last answer."""
    by_session: dict[str, dict[str, SampleRecord]] = {}
    for sample in samples:
        by_session.setdefault(sample.uid.partition("/")[0], {})[sample.agent] = sample
    handed_off = [session for session in by_session.values() if "expert" in session]
    assert len(by_session) == num_sessions and 0 < len(handed_off) < num_sessions
    for session in handed_off:
        clerk, expert = session["clerk"], session["expert"]
        assert "<tool_call>" in clerk.text and "transfer_to_expert" in clerk.prompt and clerk.reward == expert.reward
        assert "<|system|>" not in expert.prompt and expert.prompt.split()[1:-1] == asked(clerk.prompt).split()


def asked(prompt: str) -> str:
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
