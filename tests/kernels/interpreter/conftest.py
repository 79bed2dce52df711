"""Triton kernels without a GPU: `TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter`, in a process of its own.

Triton reads the variable when a kernel is defined, so these tests cannot share a process with others. Without the variable,
they are skipped. A program costs about 0.5 ms and a loop iteration 1.5 to 3 ms, so use at most 32 tokens and 4096 columns.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    import guarded_interpreter

    guarded_interpreter.install()


def pytest_configure(config: pytest.Config) -> None:
    for message in (
        "ignore:Conversion of an array with ndim > 0:DeprecationWarning",  # Triton's own use of NumPy
        "ignore::RuntimeWarning:triton",  # NaN and infinities in masked elements, silent on a GPU
    ):
        config.addinivalue_line("filterwarnings", message)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_INTERPRETED:
        skip = pytest.mark.skip(
            reason="needs its own process: TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter"
        )
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _triton_on_poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use Triton for every op, and fill torch.empty with NaN, which shows elements that no kernel writes."""
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    torch.set_deterministic_debug_mode("error")  # like use_deterministic_algorithms, which would also import inductor
    yield
    torch.set_deterministic_debug_mode("default")
