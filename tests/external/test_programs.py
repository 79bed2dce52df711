"""Programs of other libraries train as examples/README.md describes, with the real packages from PyPI in environments of their
own.
"""

from __future__ import annotations

import functools
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import yaml
from documented_commands import run_by
from documents import ROOT
from scripted_pool import engines_are, rows_of, samples_of, saying
from small_run import run_here

from marsrl.commands import cli
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.samples_log import SampleRecord
from marsrl.trainer.runs.directory import RunDirectory

pytestmark = pytest.mark.slow

SMALL = ("run.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "evaluate.num_problems=2")
TRAINS = "loss.entropy_coef=0.01"  # trains even if all rewards of a model with random weights are equal


Made = Callable[[str], Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function from a path in the documents, such as /tmp/agents, to a virtual environment in a temporary folder. It
    has the packages that the documents install there. uv installs them, because pip takes thirty times as long.
    """
    folder = tmp_path_factory.mktemp("environments")
    commands = [shlex.split(each) for each in run_by("test_an_environment_has_what_its_programs_import")]
    packages = {words[3]: words[words.index("install") + 1 :] for words in commands}

    @functools.cache
    def make(name: str) -> Path:
        environment, uv = folder / Path(name).name, Path(sys.executable).with_name("uv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        words = [uv, "pip", "install", "-q", "--python", environment / "bin/python", *packages[name]]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "UV_HTTP_TIMEOUT": "300"})
        assert done.returncode == 0, done.stderr[-4000:]
        return environment

    return make


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function from a tokenizer, "bytes" or "words" (the arithmetic task's), to a directory with a random model."""
    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: init_model("tiny", "bytes" if name == "bytes" else "arithmetic", folder / name))


def settings_of(command: str, made: Made, model: Made) -> list[str]:
    """Return the command's settings, with real paths. Policies without a model get random weights: a warm start takes minutes."""
    _, _, option, path = shlex.split(command)
    written = yaml.safe_load((ROOT / path).read_text())
    words = [option, str(ROOT / path), *SMALL]
    directory = model(
        "bytes" if any(each in path for each in ("openai_agents", "textarena", "gym_sums", "openenv")) else "words"
    )
    for policy in {agent["policy"] for agent in written["agents"].values()}:
        words += [f"policies.{policy}.model={directory}", f"policies.{policy}.shape=null"]
    if python := written["external"].get("python"):
        words.append(f"external.python={made(python.removesuffix('/bin/python'))}/bin/python")
    if "command" in written["external"]:
        python, program = written["external"]["command"]
        program = f"{(ROOT / path).parent}/{program}"
        words.append(f"external.command=[{made(python.removesuffix('/bin/python'))}/bin/python, {program}]")
    return words


@pytest.mark.parametrize("command", run_by("test_an_environment_has_what_its_programs_import"))
def test_an_environment_has_what_its_programs_import(command: str, made: Made) -> None:
    name = shlex.split(command)[3]
    modules = {"verifiers": "verifiers.v1", "openenv": "openenv.core"}
    imported = modules.get(Path(name).name, "agents, langgraph, langchain_openai")
    subprocess.run([made(name) / "bin/python", "-c", f"import openai, {imported}"], check=True)


@pytest.mark.parametrize("command", run_by("test_a_clerk_is_taught_to_hand_off"))
def test_a_clerk_is_taught_to_hand_off(command: str, model: Made, tmp_path: Path) -> None:
    own = [f"policies.main.model={model('bytes')}", f"run.dir={tmp_path}", "sft.epochs=6"]
    assert cli.main([*shlex.split(command)[1:], *own]) == 0
    first, *_, last = (row["sft/loss"] for row in rows_of(RunDirectory(tmp_path / "clerk")))
    assert last < first and (tmp_path / "clerk/hf/model.safetensors").is_file()


def hands_off_once(request: DecodeRequest) -> str:
    """Return a completion: the clerk hands off in the first session of each problem, and answers in the second."""
    session, _, agent = request.uid.partition("/")
    if agent.startswith("clerk") and session.endswith(".0"):
        return '<tool_call>{"name": "transfer_to_expert", "arguments": {}}</tool_call>'
    return "Answer: 6"


@contextmanager
def openenv_server(made: Made, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the server of examples/external/ at the address in OPENENV_URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("OPENENV_URL", f"http://127.0.0.1:{port}")
    words = [made("/tmp/openenv") / "bin/python", ROOT / "examples/external/openenv_server.py", str(port)]
    with subprocess.Popen(words) as server:
        try:
            deadline = time.monotonic() + 300
            while True:
                with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            yield
        finally:
            server.terminate()


@pytest.mark.parametrize("command", run_by("test_a_program_is_trained_and_evaluated"))
def test_a_program_is_trained_and_evaluated(
    command: str, made: Made, tmp_path: Path, model: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    for example, package in (("textarena", "textarena"), ("gym_sums", "reasoning_gym")):
        if example in command:
            pytest.importorskip(package)
    words = [*settings_of(command, made, model), f"run.dir={tmp_path}", "run.name=played", TRAINS]
    around: AbstractContextManager[object] = nullcontext()
    if "openai_agents" in command:
        around = engines_are(saying(model("bytes"), hands_off_once))
    elif "openenv" in command:
        around = openenv_server(made, monkeypatch)
    with around:
        run_here(words)
    run = RunDirectory(tmp_path / "played")
    samples, (row,) = samples_of(run), rows_of(run)
    agents = set(yaml.safe_load(Path(shlex.split(command)[3]).read_text())["agents"])
    assert {sample.agent for sample in samples} <= agents and row["rollout/episodes"] == 4
    assert row["rollout/failed_episodes"] == 0 and all(sample.reward is not None for sample in samples)
    # No step of any policy was empty.
    assert {value for name, value in row.items() if name.endswith("actor/empty_steps")} == {0}
    calls = row["team/calls"] * row["rollout/episodes"]
    match Path(command).stem:
        case "openai_loop":  # a model with random weights is nearly always wrong
            assert row["rollout/foreign_tokens"] > 0 and len(samples) == 4 < calls
        case "langgraph_team":
            assert agents == {"solver", "verifier"} == {sample.agent for sample in samples}
            assert row["reward/solver/missing"] == row["reward/verifier/missing"] == 0
        case "openai_agents":
            check_handoffs(samples)
            assert row["clerk/actor/tokens"] > 0 and row["expert/actor/tokens"] > 0
        case "verifiers_env" | "verifiers_process":
            assert calls == 4 == len(samples) and all(" c -" in sample.prompt for sample in samples)
        case "gym_sums":  # all sessions of a problem get the same sum
            assert calls == 4 == len(samples) and len({sample.prompt for sample in samples}) == 2
            assert all("<answer>" in sample.prompt and "arithmetic problem" in sample.prompt for sample in samples)
            assert {sample.reward for sample in samples} <= {0.0, 1.0}
        case "openenv":  # up to three guesses in one sample; the server's texts are foreign tokens
            assert len(samples) == 4 < calls <= 12 and row["rollout/foreign_tokens"] > 0
            assert all("Guess my number, from 0 to 9." in sample.prompt for sample in samples)
            assert {sample.reward for sample in samples} <= {0.0, 1.0}
        case "textarena_games":  # a model with random weights makes invalid moves, which lose the game
            assert {sample.agent for sample in samples} == {"nought"} and {sample.reward for sample in samples} == {
                -1.0
            }
        case "run" | "league":
            assert "x" in {sample.agent for sample in samples} and {sample.reward for sample in samples} & {-1.0, 0.0}


def check_handoffs(samples: list[SampleRecord]) -> None:
    """Check that the expert answers after the clerk's handoff and reads only the question, and that both have one reward."""
    played = {(sample.uid.partition("/")[0], sample.agent): sample for sample in samples}
    experts = {session: sample for (session, agent), sample in played.items() if agent == "expert"}
    assert len(samples) == 6 and [session[-2:] for session in experts] == [".0", ".0"]
    for session, expert in experts.items():
        clerk = played[session, "clerk"]
        assert "<tool_call>" in clerk.text and "transfer_to_expert" in clerk.prompt and clerk.reward == expert.reward
        question = clerk.prompt.rpartition("<|im_start|>user\n")[2]
        assert expert.prompt == f"<|im_start|>user\n{question}"
