"""Settings of programs are refused before a run starts, with the key that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import program

from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.workers import check_program
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.read import ConfigError, read_config

TEAM = ("orchestration=external", "agents={solver: {policy: main}, verifier: {policy: main}}")
LOCAL = ("rollout.engine=local", "rollout.placement=local")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (TEAM, "the section external is not set"),
        (["external={command: ['true']}"], "orchestration is verifier_corrector, and the section external is set"),
        (["orchestration=external", "external={command: ['true']}"], "found none; expected at least one"),
        ([*TEAM, "external.function=my_agent.py"], "expected FILE.py:NAME"),
        ([*TEAM, "external={function: 'a.py:run', command: ['true']}"], "give one of the first three"),
        ([*TEAM, "external={function: 'a.py:run', workers: 0}"], "none of them with workers=0"),
        ([*TEAM, "external={workers: 0, port: 8000}"], "set external.port and external.key_env"),
        ([*TEAM, "external.command=['true']", "rollout.group_completion=drop_stragglers"], "external.timeout_s ends"),
        (["orchestration=external", "agents={'a/b': {}}", "external.command=['true']"], "names of letters"),
    ],
)
def test_sections_that_do_not_go_together_are_refused(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_config(None, words)


@pytest.mark.parametrize(
    ("external", "reason"),
    [
        ("function={folder}/none.py:run", "there is no Python file"),
        ("function={folder}/program.py:walk", "has no walk"),
        ("function={folder}/broken.py:run", "ModuleNotFoundError: No module named 'nowhere'"),
        ("python={folder}/no_python", "external.python is .*No such file"),
        ("key_env=MARSRL_NO_SUCH_KEY", "external.key_env names MARSRL_NO_SUCH_KEY, which is not set"),
    ],
)
def test_a_program_that_workers_could_not_start_is_refused(tmp_path: Path, external: str, reason: str) -> None:
    (tmp_path / "program.py").write_text("def run(problem, client):\n    pass\n")
    (tmp_path / "broken.py").write_text("import nowhere\n")
    words = [f"external.function={tmp_path}/program.py:run", f"external.{external.format(folder=tmp_path)}"]
    config, _ = read_config(None, [*TEAM, *LOCAL, *words])
    with pytest.raises(ValueError, match=reason):
        preflight(config, world_size=1)


def test_a_program_imports_its_own_files_and_packages_but_not_the_files_beside_the_worker(tmp_path: Path) -> None:
    """openai-agents is called `agents`, and so is a file of the gateway."""
    (tmp_path / "beside.py").write_text("NAME = 'run'\n")
    named = program(tmp_path, "from beside import NAME\ndef run(problem, client): ...\n")
    check_program(ExternalConfig(function=named))
    check_program(ExternalConfig(environment=named))
    with pytest.raises(ValueError, match=r"program\.py has no Env"):
        check_program(ExternalConfig(environment=named.replace(":run", ":Env")))
    with pytest.raises(ValueError, match="No module named 'vllm_reader'"):
        check_program(ExternalConfig(function=program(tmp_path, "import vllm_reader\n")))
