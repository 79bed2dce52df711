"""Wrong settings of programs are refused before a run starts, by a message that names the key; `marsrl try` plays a program with
made-up answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from programs import program

from marsrl.commands.cli import main
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.workers import WORKER, check_program, join_line
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.read import ConfigError, read_config

TEAM = ("task=arithmetic", "orchestration=external", "agents={solver: {policy: main}, verifier: {policy: main}}")
LOCAL = ("rollout.engine=local", "rollout.placement=local")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (TEAM, "the section external is not set"),
        (["external={command: ['true']}"], "orchestration is verifier_corrector, but the section external is set"),
        (
            ["task=arithmetic", "orchestration=external", "external={command: ['true']}"],
            "agents names none; .*expected at least one",
        ),
        ([*TEAM, "external.function=my_agent.py"], "expected FILE.py:NAME"),
        ([*TEAM, "external={function: 'a.py:run', command: ['true']}"], "set exactly one of the first three"),
        ([*TEAM, "external={function: 'a.py:run', workers: 0}"], "none of them with workers=0"),
        ([*TEAM, "external={workers: 0, port: 8000}"], "they need external.port and external.key_env"),
        ([*TEAM, "external.command=['true']", "rollout.group_completion=drop_stragglers"], "external.timeout_s ends"),
        (
            ["task=arithmetic", "orchestration=external", "agents={'a/b': {}}", "external.command=['true']"],
            "agents names a/b; .*expected at least one agent, with a name of letters, digits, _ and -",
        ),
    ],
)
def test_sections_that_do_not_go_together_are_refused(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_config(None, words)


@pytest.mark.parametrize(
    ("external", "reason"),
    [
        ("function={folder}/none.py:run", "no Python file"),
        ("function={folder}/program.py:walk", "has no callable walk"),
        ("function={folder}/broken.py:run", "ModuleNotFoundError: No module named 'nowhere'"),
        ("python={folder}/no_python", "external.python is .*No such file"),
        ("command=[no_program, x]", "external.command: no_program: ValueError: no such program"),
        ("key_env=MARSRL_NO_SUCH_KEY", "external.key_env names MARSRL_NO_SUCH_KEY, which is not set"),
    ],
)
def test_a_program_that_workers_could_not_start_is_refused(tmp_path: Path, external: str, reason: str) -> None:
    (tmp_path / "program.py").write_text("def run(problem, client):\n    pass\n")
    (tmp_path / "broken.py").write_text("import nowhere\n")
    words = [] if external.startswith("command") else [f"external.function={tmp_path}/program.py:run"]
    words.append(f"external.{external.format(folder=tmp_path)}")
    config, _ = read_config(None, [*TEAM, *LOCAL, *words])
    with pytest.raises(ValueError, match=reason):
        preflight(config, world_size=1)


def test_a_command_s_files_are_relative_to_the_settings_file(tmp_path: Path) -> None:
    assert " --url http://[::1]:7 " in join_line(ExternalConfig(workers=0, host="::1", port=7, key_env="K"))
    (tmp_path / "agent.py").touch()
    (tmp_path / "own.yaml").write_text(
        "{task: arithmetic, orchestration: external, external: {command: [python, agent.py, x]}}"
    )
    config, _ = read_config(tmp_path / "own.yaml", ["agents.solver.policy=main"])
    assert config.external is not None and config.external.command == ["python", f"{tmp_path}/agent.py", "x"]


def test_a_program_imports_its_files_but_not_the_worker_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the worker must not hide a program's packages of the same name, even if the worker is started by a link."""
    (tmp_path / "gateway").symlink_to(WORKER.parent)
    monkeypatch.setattr("marsrl.rollout.gateway.workers.WORKER", tmp_path / "gateway" / WORKER.name)
    (tmp_path / "beside.py").write_text("NAME = 'run'\n")
    named = program(tmp_path, "from beside import NAME\ndef run(problem, client): ...\n")
    check_program(ExternalConfig(function=named))
    check_program(ExternalConfig(environment=named))
    with pytest.raises(ValueError, match=r"program\.py has no callable Env"):
        check_program(ExternalConfig(environment=named.replace(":run", ":Env")))
    with pytest.raises(ValueError, match="No module named 'vllm_reader'"):
        check_program(ExternalConfig(function=program(tmp_path, "import vllm_reader\n")))


ANSWERS = {"solver": ["Answer: 1", "Answer: 2"], "verifier": ["no"]}


Tried = Callable[..., list[str]]


@pytest.fixture
def tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tried:
    """Return a function that runs `marsrl try` on one problem and returns the output's lines without the tree's branches."""

    def run(
        external: dict[str, object], *words: str, answers: dict[str, list[str]] | None = None, code: int = 0
    ) -> list[str]:
        agents = {"solver": {"policy": "main"}, "verifier": {"policy": "main"}}
        config, table = tmp_path / "try.yaml", tmp_path / "answers.yaml"
        settings = {"task": "arithmetic", "orchestration": "external", "external": external, "agents": agents}
        config.write_text(yaml.dump(settings))
        table.write_text(yaml.dump(answers or {}))
        given = ["--question", "a 3 b *7", "--reference", "1", "rollout.group_size=1", *words]
        assert main(["try", "--config", str(config), "--answers", str(table), *given]) == code, capsys.readouterr().err
        shown = capsys.readouterr()
        assert "failed" not in shown.err  # the error is in the tree
        return [line.lstrip("│├└─ ").rstrip() for line in shown.out.splitlines() if not line.startswith("#")]

    return run


TWO = """
def run(problem, client):
    turns = [{"role": "user", "content": problem.question}]
    first = client.chat("solver", turns)
    report = client.chat("verifier", [f"{problem.question} {first.text}"])
    again = client.chat("solver", [*turns, first.message, "again: " + report.text])
    client.chat("solver", [*turns, first.message, "or else"])
    return {"solver": 0.5, first.id: 2.0}
"""


def test_the_tree_shows_calls_by_sample_with_their_rewards(tried: Tried, tmp_path: Path) -> None:
    external = {"function": program(tmp_path, TWO)}
    lines = tried(external, answers=ANSWERS)
    goes_on = next(line for line in lines if line.startswith("call 3"))
    assert goes_on.startswith("call 3 continues with ") and goes_on.endswith(" bytes: 'Answer: 2'")
    at = lines.index(goes_on)
    assert lines[at - 2].startswith("solver:0  2 calls  reward 2")
    assert lines[at - 1].startswith("call 1 reads ") and lines[at - 1].endswith("'Answer: 1'")
    verifier = next(i for i, line in enumerate(lines) if line.startswith("verifier:0"))
    assert lines[verifier].startswith("verifier:0  1 call  reward none (the program set no reward; call 2 of 4)")
    assert lines[verifier + 1].startswith("call 2 reads ") and lines[verifier + 1].endswith("'no'")
    other = next(i for i, line in enumerate(lines) if line.startswith("solver#1:0  1 call  reward 0.5"))
    assert lines[other + 1] == "does not continue an earlier sample: another call continues the same answer"
    assert lines[other + 2].startswith("call 4 reads ")
    assert at < verifier < other  # solver:0 called verifier:0, and its tokens begin solver#1:0


def test_answers_are_made_up_and_the_task_judges_the_last_one(tried: Tried, tmp_path: Path) -> None:
    text = """
    def run(problem, client):
        client.chat("solver", [problem.question])
    """
    lines = tried({"function": program(tmp_path, text)}, "rollout.group_size=6")
    said = [line.endswith("'Answer: 1'") for line in lines if line.startswith("call 1")]
    judged = ["reward 1" in line for line in lines if line.startswith("solver:0")]
    assert len(said) == 6 and said == judged and set(said) == {True, False}


def test_an_error_of_the_program_follows_its_calls_in_full(tried: Tried, tmp_path: Path) -> None:
    text = """
    def run(problem, client):
        client.chat("solver", [problem.question])
        return deeper({"what": "no"})

    def deeper(found):
        return found["answer"]
    """
    lines = tried({"function": program(tmp_path, text)}, "rollout.group_size=2", code=1)
    assert any(line == "solver:0  1 call  reward none" for line in lines)
    assert lines[-1].startswith("the episode failed: same error as episode ")  # shown in full once
    lines = tried({"function": program(tmp_path, text)}, code=1)
    error = lines[lines.index("the episode failed: the program failed: Traceback (most recent call last):") :]
    assert 'return found["answer"]' in error and error[-1] == "KeyError: 'answer'"
    assert not any("worker.py" in line for line in error)  # only the program's frames


ASKS = """
import json, os, sys, urllib.request
def run(problem, client):
    client.chat("solvr", [problem.question])
if __name__ == "__main__":
    body = json.dumps({"model": "solvr", "messages": [{"role": "user", "content": "hi"}]}).encode()
    key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    try:
        urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key))
    except urllib.error.HTTPError as error:
        sys.exit(f"Error code: {error.code} - {json.loads(error.read())}")
"""


def test_an_unknown_agent_is_reported_with_the_known_ones(tried: Tried, tmp_path: Path) -> None:
    function = program(tmp_path, ASKS)
    for external in ({"function": function}, {"command": [sys.executable, function.removesuffix(":run")]}):
        *_, last = tried(external, code=1)
        assert (
            last
            == "the episode failed: the program failed: model 'solvr' is not an agent; expected one of solver, verifier"
        )


def test_control_characters_in_the_tree_are_escaped(tried: Tried, tmp_path: Path) -> None:
    text = """
    def run(problem, client):
        raise ValueError(client.chat("solver", [problem.question]).text)
    """
    words = ("--question", "a\x1b[2J", "--reference", "\x1b[5m", "--prompts")
    lines = tried({"function": program(tmp_path, text)}, *words, answers={"solver": ["\x1b[31m"]}, code=1)
    assert lines[0] == "a␛[2J   (answer: ␛[5m)" and lines[-1] == "ValueError: ␛[31m"
    assert not any("\x1b" in line for line in lines)


def test_a_command_may_end_without_calling_an_agent(tried: Tried) -> None:
    lines = tried({"command": [sys.executable, "-c", "print(0.5)"]})
    assert lines[1:] == ["no agent was called"]
