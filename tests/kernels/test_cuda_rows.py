"""The row kernels of csrc/cuda, compiled for the CPU: the same sources, threads as coroutines."""

import cuda_cases as cases
import pytest
import torch
from emulated_cuda import use_emulated_cuda

from marsrl.kernels.testing import OBJECTIVES


@pytest.fixture(autouse=True)
def _cuda_on_cpu(monkeypatch):
    use_emulated_cuda(monkeypatch)


@pytest.mark.parametrize("columns", cases.COLUMNS)
def test_statistics_are_those_of_the_row_and_of_no_other(columns):
    cases.check_statistics(columns)


def test_partials_of_a_shard():
    cases.check_partials()


@pytest.mark.parametrize("columns", cases.COLUMNS)
@pytest.mark.parametrize("dtype, padding", [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 3)])
def test_rows_with_a_coefficient_become_gradients_side_by_side(columns, dtype, padding):
    cases.check_gradients(columns, dtype, padding)


def test_a_bad_target_gives_nan():
    cases.check_bad_targets_give_nan()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_equals_its_definition(name, monkeypatch):
    cases.check_objective(name, 131, monkeypatch)


def test_two_runs_give_the_same_bits():
    cases.check_same_bits_twice()


def test_the_sums_of_many_agents_are_kept_apart():
    cases.check_many_agents()
