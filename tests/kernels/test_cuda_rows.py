"""The row kernels of csrc/cuda, compiled for the CPU: the same sources, threads as coroutines."""

import cuda_cases as cases
import pytest
import torch
from emulated_cuda import use_emulated_cuda
from fused_head import arguments_for, compare_logprob, compare_policy_loss, compare_policy_loss_of_logprobs, head_case

from marsrl.kernels.head import chunked_head
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
    monkeypatch.setattr(chunked_head, "DEVICE_ROW_MULTIPLE", 1)
    monkeypatch.setattr(chunked_head, "DEVICE_LOGITS_BYTES", 7 * 4 * 131)  # chunks of 7 rows
    monkeypatch.setattr(chunked_head, "DEVICE_GRADIENT_BYTES", 2 * 7 * 4 * 131)
    case = head_case()
    compare_policy_loss(case, arguments_for(case, name))
    compare_policy_loss_of_logprobs(name)


def test_bfloat16_padded_vocabulary_and_a_temperature_for_each_token():
    hidden, weight, targets = head_case(30, 16, 128)
    case, temperature = (hidden, weight, targets % 100), torch.rand(30) + 0.5
    arguments = arguments_for(case, "entropy bonus", temperature=temperature, real_vocab_size=100)
    compare_policy_loss(case, arguments, torch.bfloat16)
    compare_logprob(case, temperature, real=100, dtype=torch.bfloat16)


def test_two_runs_give_the_same_bits():
    cases.check_same_bits_twice()


def test_the_sums_of_many_agents_are_kept_apart():
    cases.check_many_agents()
