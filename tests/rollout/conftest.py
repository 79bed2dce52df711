"""Tokens of bytes."""

from __future__ import annotations

import pytest

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.trainer.models.byte_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return ChatRenderer(folder)
