"""A model with random weights for programs to play with."""

from __future__ import annotations

from pathlib import Path

import pytest

from marsrl.trainer.models.init_model import init_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    init_model("tiny", "arithmetic", folder)
    return folder
