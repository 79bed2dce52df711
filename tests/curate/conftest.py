"""A judge whose engine is a script."""

from __future__ import annotations

from typing import Any

import pytest
from curation import ScriptedJudge

from marsrl.rollout.agents.render import ChatRenderer


@pytest.fixture(scope="session")
def judge(renderer: ChatRenderer) -> Any:
    """judge(script, fail=...): a ScriptedJudge."""
    return lambda script, **more: ScriptedJudge(renderer, script, **more)
