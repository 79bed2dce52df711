"""A judge whose engine is a script."""

from __future__ import annotations

from typing import Any

import pytest
from curation import ScriptedJudge

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.trainer.models.byte_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """judge(script, fail=...): a ScriptedJudge."""
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    renderer = ChatRenderer(folder)
    return lambda script, **more: ScriptedJudge(renderer, script, **more)
