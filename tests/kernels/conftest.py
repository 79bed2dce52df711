"""Fixtures that seed each kernel test and choose its implementation. pytest adds this folder to sys.path for the helpers."""

import pytest
import torch
from every_op import IS_INTERPRETED


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["triton"] if IS_INTERPRETED else ["cpu", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MARSRL_KERNELS", request.param)
    name: str = request.param
    return name
