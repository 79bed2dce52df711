"""moe_permute and moe_unpermute against autograd in float64; again in interpreter/test_ops.py."""

import pytest
import torch
from moe_permute_cases import check_order, check_single_rows, check_sums_round_once, compare, ragged_map, random_map

from marsrl.kernels import RowOrder, moe_permute, moe_unpermute


@pytest.fixture(params=["cpu", "reference"])
def implementation(request, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", request.param)


# widths around a vector and a block of columns (that of the interpreter's run is 16); one expert a token and all of them
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 16, 33])
@pytest.mark.parametrize("routing_map", [(6, 5, 2), (7, 4, 1), (4, 3, 3), (1, 9, 8), None])
def test_each_expert_gets_its_tokens_and_each_token_their_sum(routing_map, width, dtype, implementation):
    compare(ragged_map() if routing_map is None else random_map(*routing_map), width, dtype)


def test_weights_have_a_dtype_of_their_own(implementation):
    compare(random_map(5, 4, 2), 8, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("check", [check_order, check_single_rows, check_sums_round_once])
def test_order_of_rows_there_and_back_and_their_sums(check, implementation):
    check()


def test_the_backward_keeps_neither_tokens_nor_rows(implementation):
    order, kept = RowOrder.of_map(random_map(6, 5, 2), 12), []
    hidden, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        moe_unpermute(moe_permute(hidden, weights, order)[0], order)
    assert kept and all(each.untyped_storage().nbytes() <= 8 for each in kept if each.is_floating_point())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [2048, 2560, 80])
def test_on_a_gpu(dtype, width, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    for routing_map in (random_map(1000, 128, 8, "cuda"), ragged_map("cuda")):
        compare(routing_map, width, dtype)
    check_order("cuda")
    check_single_rows("cuda")


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for():
    routing_map, hidden = random_map(1000, 128, 8, "cuda"), torch.randn(1000, 64, device="cuda", requires_grad=True)
    weights = torch.rand(1000, 128, device="cuda", requires_grad=True)
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            order = RowOrder.of_map(routing_map, 8000)
            rows, of_rows = moe_permute(hidden, weights, order)
            moe_unpermute(rows * of_rows[:, None], order).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
