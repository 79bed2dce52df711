"""Triton kernels in compiled code: a fake kernel launches nothing, and the real ones run when the code does."""

import pytest
from traced_cases import CALLERS, SCHEMAS, check_a_compiled_caller, check_op


@pytest.mark.parametrize("name", SCHEMAS)
def test_torch_finds_no_fault(name):
    check_op(name)


@pytest.mark.parametrize("name", CALLERS)
def test_a_compiled_caller_has_one_graph_and_the_gradients_of_eager_code(name):
    check_a_compiled_caller(name)
