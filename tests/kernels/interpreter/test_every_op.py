"""Every op in Triton passes the tests of the other implementations, and launches its kernels on the tensors' device."""

from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from every_op import TIERS
from test_every_tier import (  # noqa: F401
    served,
    test_a_frozen_input_changes_no_other_gradient,
    test_a_nonfinite_row_matches_pytorch_and_spoils_no_other,
    test_an_empty_batch_has_gradients_of_zero,
    test_autocast_changes_nothing,
    test_every_tensor_is_read_in_any_memory_layout,
    test_only_values_read_by_trained_tokens_spoil_the_loss,
)
from test_every_tier import test_ops_ignore_the_default_device_and_dtype as defaults_are_not_used
from triton.runtime.interpreter import GridExecutor

from marsrl import kernels


@pytest.fixture
def launched(monkeypatch):
    """Record launched kernels. A launch outside of `on_device_of` fails, because it would use the current device."""
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
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        monkeypatch.setattr(import_module(f"marsrl.kernels.{name}"), "on_device_of", guard)
    launch = GridExecutor.__call__

    def checked(self, *arguments, **named):
        assert depth, f"{self.fn.__name__} is launched on whatever device is the current one"
        names.append(self.fn.__name__)
        return launch(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", checked)
    return names


@pytest.mark.parametrize("name, tier", TIERS)
def test_kernels_run_on_their_tensors_device_despite_defaults(served, launched):  # noqa: F811
    defaults_are_not_used(served)
    assert launched
