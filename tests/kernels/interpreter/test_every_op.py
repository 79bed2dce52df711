"""Every op in Triton: layouts, surroundings, devices, compiled callers, and numbers that are not finite."""

from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from every_op import (
    CALLS,
    EMPTY,
    check_an_empty_batch_has_gradients_of_zero,
    check_autocast_changes_nothing,
    check_the_defaults_are_not_used,
)
from layout_cases import OPS, check_every_layout
from nonfinite_cases import FEW, KINDS, check_given_logprobs, check_head, check_logprobs, check_loss
from traced_cases import CALLERS, SCHEMAS, check_a_compiled_caller, check_op
from triton.runtime.interpreter import GridExecutor

from marsrl import kernels

IN_TRITON = [name for name in CALLS if name not in ("pack", "kept_rows", "group_advantage")]
# one head of each kind: a call takes the interpreter a quarter of a second, and one has 20 tensors in 4 layouts
LAID_OUT = ("linear_logprob, float32", "linear_policy_loss with main_grad, bfloat16")


@pytest.mark.parametrize("op", [op for op in OPS if op in LAID_OUT or (op in IN_TRITON and "linear_" not in op)])
def test_every_tensor_is_read_as_it_lies(op):
    check_every_layout(op)


@pytest.mark.parametrize("name", IN_TRITON)
def test_autocast_changes_nothing(name):
    check_autocast_changes_nothing(name)


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_has_gradients_of_zero(name):
    check_an_empty_batch_has_gradients_of_zero(name)


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
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        monkeypatch.setattr(import_module(f"marsrl.kernels.{name}"), "on_device_of", guard)
    launch = GridExecutor.__call__

    def checked(self, *arguments, **named):
        assert depth, f"{self.fn.__name__} is launched on whatever device is the current one"
        names.append(self.fn.__name__)
        return launch(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", checked)
    return names


@pytest.mark.parametrize("name", IN_TRITON)
def test_kernels_run_on_the_device_of_their_tensors_whatever_the_default_device_and_dtype(name, launched):
    check_the_defaults_are_not_used(name)
    assert launched


@pytest.mark.parametrize("name", SCHEMAS)
def test_torch_finds_no_fault(name):
    check_op(name)


@pytest.mark.parametrize("name", CALLERS)
def test_a_compiled_caller_has_one_graph_and_the_gradients_of_eager_code(name):
    check_a_compiled_caller(name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_plain_pytorchs_and_no_other(kind):
    check_logprobs(kind)
    check_loss(kind)


@pytest.mark.parametrize("setting", FEW, ids=str)
def test_what_a_trained_token_reads_makes_the_loss_not_finite_and_nothing_else_does(setting):
    check_given_logprobs(setting, "triton")


@pytest.mark.parametrize("setting", FEW, ids=str)
def test_the_same_of_a_head(setting):
    check_head(setting, "triton")
