"""moe_permute and moe_unpermute against autograd in float64; also in interpreter/test_ops.py."""

import pytest
import torch
from judging import judge, run
from torch import Tensor

from marsrl.kernels import RowOrder, moe_permute, moe_unpermute
from marsrl.kernels.moe_permute.reference import moe_permute_reference, moe_unpermute_reference


def random_map(num_tokens: int, num_experts: int, top_k: int, device: str = "cpu") -> Tensor:
    """Return a random map [T, E] bool with top_k experts per token. If E exceeds top_k, the first expert has no tokens."""
    scores = torch.rand(num_tokens, num_experts, device=device)
    if num_experts > top_k:
        scores[:, 0] = -1
    return torch.zeros_like(scores).bool().scatter(1, scores.topk(top_k).indices, True)


def ragged_map(device: str = "cpu") -> Tensor:
    """Return a map in which tokens have 0 to 5 experts, as on a rank that holds some experts; the first and last have none."""
    counts = (0, 3, 1, 0, 2, 5, 0)
    return torch.tensor([[expert < count for expert in range(5)] for count in counts], device=device)


def compare(routing_map: Tensor, width: int, dtype: torch.dtype, weight_dtype: torch.dtype = torch.float32) -> None:
    (num_tokens, num_experts), num_rows, device = routing_map.shape, int(routing_map.sum()), routing_map.device
    order = RowOrder.of_map(routing_map, num_rows)
    hidden = torch.randn(num_tokens, width, device=device).to(dtype)
    weights = torch.rand(num_tokens, num_experts, device=device).to(weight_dtype)
    judge(
        ("rows", "row weights", "hidden.grad", "weights.grad"),
        lambda hidden, weights: moe_permute(hidden, weights, order),
        lambda hidden, weights: moe_permute_reference(hidden, weights, *order),
        (hidden, weights),
    )
    judge(
        ("sums", "rows.grad"),
        lambda rows: moe_unpermute(rows, order),
        lambda rows: moe_unpermute_reference(rows, *order[:3]),
        (torch.randn(num_rows, width, device=device).to(dtype),),
    )


def check_order(device: str = "cpu") -> None:
    """Check that rows are sorted by expert, then by token, and that weights belong to their token and expert."""
    routing_map = ragged_map(device)
    pairs = [(expert, token) for expert in range(5) for token in range(7) if routing_map[token, expert]]
    order = RowOrder.of_map(routing_map, len(pairs))
    hidden = torch.arange(7.0, device=device)[:, None].expand(7, 3)
    weights = torch.arange(35.0, device=device).view(7, 5)
    rows, of_rows = moe_permute(hidden, weights, order)
    assert rows[:, 1].tolist() == [token for _, token in pairs]
    assert of_rows.tolist() == [5 * token + expert for expert, token in pairs]
    back = moe_unpermute(rows, order)
    assert back[:, 2].tolist() == [token * int(routing_map[token].sum()) for token in range(7)]


def check_single_rows(device: str = "cpu") -> None:
    """Check that rows from other ranks are sorted by expert and back, with the gradients of a sort."""
    expert_of = torch.tensor([0, 0, 1, 2, 0, 2, 2, 1, 1, 1], device=device)
    order = RowOrder.of_experts(expert_of)
    rows, weights = torch.randn(10, 6, device=device), torch.randn(10, device=device)
    place = expert_of.argsort(stable=True)
    found, upstream = run(lambda rows, weights: moe_permute(rows, weights, order), (rows, weights))
    expected, _ = run(lambda rows, weights: (rows[place], weights[place]), (rows, weights), upstream)
    there_and_back, given = run(lambda rows: moe_unpermute(moe_permute(rows, weights, order)[0], order), (rows,))
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, there_and_back, (rows, *given)))


# Widths around a vector and a block of columns (16 when interpreted); one expert per token, and all experts.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 16, 33])
@pytest.mark.parametrize("routing_map", [(6, 5, 2), (7, 4, 1), (4, 3, 3), (1, 9, 8), None])
def test_each_expert_gets_its_tokens_and_each_token_their_sum(routing_map, width, dtype, implementation):
    compare(ragged_map() if routing_map is None else random_map(*routing_map), width, dtype)


@pytest.mark.smoke
def test_weights_may_differ_from_tokens_in_dtype(implementation):
    compare(random_map(5, 4, 2), 8, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("check", [check_order, check_single_rows])
def test_the_order_of_rows_there_and_back(check, implementation):
    check()


def test_sums_round_once(implementation):
    """256 plus eight times 1: in bfloat16 256 + 1 stays 256, in float32 the sum is 264."""
    order = RowOrder.of_map(torch.ones(2, 9, dtype=torch.bool), 18)
    rows = torch.ones(18, 4, dtype=torch.bfloat16)
    rows[:2] = 256
    hidden = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    moe_permute(hidden, torch.zeros(2, 9), order)[0].backward(rows)
    assert moe_unpermute(rows, order).tolist() == hidden.grad.tolist() == [[264.0] * 4] * 2


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
def test_permutation_does_not_wait_for_the_gpu():
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
