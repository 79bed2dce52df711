"""Programs of other libraries train as examples/README.md says: the real packages, from PyPI, in environments of their own."""

from __future__ import annotations

import functools
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import run_by
from documents import ROOT
from scripted_pool import ScriptedWithWeights, engines_are, rows_of, samples_of, sevens, train_here
from small_run import run_here

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest
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
    paths = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    @functools.cache
    def make(name: str) -> Path:
        command = commands[name].replace("/tmp/", f"{folder}/")
        done = subprocess.run(command, shell=True, env=paths, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr[-4000:]}"
        return folder / Path(name).name

    return make


def settings_of(command: str, made: Made, model: Made) -> list[str]:
    """The command's words, with paths filled in: model(tokenizer) for the model of every policy."""
    _, _, option, path = shlex.split(command)
    written = yaml.safe_load((ROOT / path).read_text())
    directory = model("bytes" if written.get("task") == "math" else "arithmetic")
    words = [option, str(ROOT / path), *SMALL]
    for policy in {agent["policy"] for agent in written["agents"].values()}:
        words += [f"policies.{policy}.model={directory}", f"policies.{policy}.shape=null"]
    if python := written["external"].get("python"):
        words.append(f"external.python={made(python.removesuffix('/bin/python'))}/bin/python")
    return words


@pytest.fixture
def model(tmp_path: Path) -> Made:
    def random_model(tokenizer: str) -> Path:
        init_model("tiny", tokenizer, tmp_path / "model")
        return tmp_path / "model"

    return random_model


@pytest.mark.parametrize("command", run_by("test_an_environment_has_what_its_programs_import"))
def test_an_environment_has_what_its_programs_import(command: str, made: Made) -> None:
    name = shlex.split(command)[3]
    modules = "verifiers.v1" if "verifiers" in name else "agents, langgraph, langchain_openai"
    subprocess.run([made(name) / "bin/python", "-c", f"import openai, {modules}"], check=True)


@pytest.mark.parametrize("command", run_by("test_a_program_is_trained_and_evaluated"))
def test_a_program_is_trained_and_evaluated(command: str, made: Made, tmp_path: Path, model: Made) -> None:
    run_here([*settings_of(command, made, model), f"run.dir={tmp_path}", "run.name=played", TRAINS])
    run = RunDirectory(tmp_path / "played")
    samples, (row,) = samples_of(run), rows_of(run)
    agents = set(yaml.safe_load(Path(shlex.split(command)[3]).read_text())["agents"])
    assert {sample.agent for sample in samples} <= agents and row["rollout/episodes"] == 4
    assert row["rollout/failed_episodes"] == 0 and all(sample.reward is not None for sample in samples)
    assert {value for name, value in row.items() if name.endswith("actor/empty_steps")} == {0}  # of each policy
    calls = row["team/calls"] * row["rollout/episodes"]
    match Path(command).stem:
        case "openai_loop":  # a model with random weights is wrong each time, but for a lucky one
            assert row["rollout/foreign_tokens"] > 0 and len(samples) == 4 < calls
        case "langgraph_team":
            assert agents == {"solver", "verifier"} == {sample.agent for sample in samples}
            assert row["reward/solver/missing"] == row["reward/verifier/missing"] == 0
        case "verifiers_env":
            assert calls == 4 == len(samples) and all(" c -" in sample.prompt for sample in samples)
        case "run":
            assert "x" in {sample.agent for sample in samples} and {sample.reward for sample in samples} & {-1.0, 0.0}


CALL = '<tool_call>\n{"name": "transfer_to_expert", "arguments": {}}\n</tool_call>'


def says(request: DecodeRequest) -> str:
    """The clerk hands off by a coin; whoever answers is right by a coin."""
    rng = random.Random(request.uid)
    if "/clerk:" in request.uid and rng.random() < 0.5:
        return CALL
    return f"It is \\boxed{{{rng.choice('78')}}}."


@pytest.mark.parametrize("command", run_by("test_a_handoff_of_openai_agents_is_played_by_two_policies"))
def test_a_handoff_of_openai_agents_is_played_by_two_policies(
    command: str, made: Made, tmp_path: Path, model: Made
) -> None:
    _, config, *words = settings_of(command, made, model)
    renderer = ChatRenderer(tmp_path / "model")
    engine = functools.partial(
        ScriptedWithWeights, tmp_path / "model", says, encode=lambda text: renderer.encode_trusted(text).tolist()
    )
    own = [f"data.train={sevens(tmp_path)}", "rollout.prompts_per_step=4", "rollout.group_size=8"]
    with engines_are(engine):
        run = train_here(tmp_path, [*words, *own], config)
    (row,) = rows_of(run)
    by_session: dict[str, dict[str, SampleRecord]] = {}
    for sample in samples_of(run):
        by_session.setdefault(sample.uid.partition("/")[0], {})[sample.agent] = sample
    assert len(by_session) == 32 and row["rollout/failed_episodes"] == 0
    for session in by_session.values():
        clerk, answered = session["clerk"], session.get("expert", session["clerk"])
        assert ("expert" in session) == ("<tool_call>" in clerk.text)
        assert clerk.reward == answered.reward == float("boxed{7}" in answered.text)
        if answered is not clerk:
            assert "Solve the problem step by step" in answered.prompt and CALL in answered.prompt
            assert "Hand a hard problem off" not in answered.prompt and "transfer_to_expert" not in clerk.prompt[-40:]
    assert 0 < sum("expert" in session for session in by_session.values()) < 32
    assert row["clerk/actor/tokens"] > 0 and row["expert/actor/tokens"] > 0
