"""Every test of a kernel starts from the same random numbers. ahead_of_time.py lies beside the tests."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # pytest's importlib mode puts no folder there


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
