"""Which device a Triton op works on: that of its tensors, not the default one, and not the current one. Nor has it the
default dtype."""

from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from every_op import CALLS, HEADS, check_the_defaults_are_not_used
from triton.runtime.interpreter import GridExecutor

from marsrl import kernels

GEMM = "linear_policy_loss=triton_gemm,linear_logprob=triton_gemm"


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were launched; a launch that no `on_device_of` surrounds fails: it would be on the current device."""
    depth, names = [], []

    @contextmanager
    def guard(tensor):
        depth.append(tensor.device)
        try:
            yield
        finally:
            depth.pop()

    folder = Path(kernels.__file__).parent
    for path in folder.rglob("*triton_impl.py"):
        name = ".".join(path.relative_to(Path(kernels.__file__).parent).with_suffix("").parts)
        monkeypatch.setattr(import_module(f"marsrl.kernels.{name}"), "on_device_of", guard)
    launch = GridExecutor.__call__

    def checked(self, *arguments, **named):
        assert depth, f"{self.fn.__name__} is launched on whatever device is the current one"
        names.append(self.fn.__name__)
        return launch(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", checked)
    return names


@pytest.mark.parametrize("name", CALLS)
def test_kernels_run_on_the_device_of_their_tensors(name, launched):
    check_the_defaults_are_not_used(name)
    assert launched


@pytest.mark.parametrize("name", [name for name in HEADS if "bfloat16" in name])
def test_the_first_gemm_runs_on_the_device_of_its_tensors(name, launched, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", GEMM)
    check_the_defaults_are_not_used(name)
    assert "first_product_by_copies" in launched
