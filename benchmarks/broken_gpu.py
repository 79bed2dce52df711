"""Plugin of pytest that ends the process if a failed test made the GPU unusable, so that xdist starts a new process."""

import os
from typing import Any

import pytest
import torch


@pytest.hookimpl(trylast=True)  # Runs after xdist has reported the failure.
def pytest_runtest_logreport(report: Any) -> None:
    if report.failed and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # After an illegal address every call of CUDA fails.
            os._exit(77)
