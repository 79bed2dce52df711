"""A judge whose engine is a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.trainer.models.byte_tokenizer import write_byte_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # curation
sys.path.insert(1, str(Path(__file__).parents[1] / "engines"))  # completions_server
sys.path.insert(1, str(Path(__file__).parents[1] / "docs"))  # desk
sys.path.insert(1, str(Path(__file__).parents[1] / "plan"))  # what desk needs
sys.path.insert(1, str(Path(__file__).parents[1] / "integration"))  # likewise
from curation import ScriptedJudge


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """judge(script, fail=...): a ScriptedJudge."""
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    renderer = ChatRenderer(folder)
    return lambda script, **more: ScriptedJudge(renderer, script, **more)
