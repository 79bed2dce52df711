"""What external.function and external.environment name is imported before a run begins, as workers import it."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import program

from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.workers import check_program


def checked(**options: str) -> None:
    check_program(ExternalConfig.model_validate(options))


def test_a_program_imports_its_own_files_and_packages_but_not_the_files_beside_the_worker(tmp_path: Path) -> None:
    """openai-agents is called `agents`, and so is a file of the gateway."""
    (tmp_path / "beside.py").write_text("NAME = 'run'\n")
    named = program(tmp_path, "from beside import NAME\ndef run(problem, client): ...\n")
    checked(function=named)
    checked(environment=named)
    with pytest.raises(ValueError, match="No module named 'vllm_reader'"):
        checked(function=program(tmp_path, "import vllm_reader\n"))


def test_a_name_that_the_file_does_not_have_is_refused(tmp_path: Path) -> None:
    named = program(tmp_path, "class run: ...\n").replace(":run", ":Env")
    with pytest.raises(ValueError, match=r"program\.py has no Env"):
        checked(environment=named)
