"""Values and gradients of moe_permute and moe_unpermute against autograd in float64, for any implementation and device."""

import torch
from judging import judge, run
from torch import Tensor

from marsrl.kernels import RowOrder, moe_permute, moe_unpermute
from marsrl.kernels.moe_permute.reference import moe_permute_reference, moe_unpermute_reference


def random_map(num_tokens: int, num_experts: int, top_k: int, device: str = "cpu") -> Tensor:
    """[T, E] bool: so many experts of each token; the first expert has no token, where others are enough."""
    scores = torch.rand(num_tokens, num_experts, device=device)
    if num_experts > top_k:
        scores[:, 0] = -1
    return torch.zeros_like(scores).bool().scatter(1, scores.topk(top_k).indices, True)


def ragged_map(device: str = "cpu") -> Tensor:
    """Tokens with any number of experts, as a rank has that holds some of them: the first and the last token none."""
    counts = (0, 3, 1, 0, 2, 5, 0)
    return torch.tensor([[expert < count for expert in range(5)] for count in counts], device=device)


def compare(routing_map: Tensor, width: int, dtype: torch.dtype, weight_dtype: torch.dtype = torch.float32) -> None:
    (num_tokens, num_experts), num_rows, device = routing_map.shape, int(routing_map.sum()), routing_map.device
    order = RowOrder.of_map(routing_map, num_rows)
    hidden = torch.randn(num_tokens, width, device=device).to(dtype)
    weights = torch.rand(num_tokens, num_experts, device=device).to(weight_dtype)
    rows, upstream = (torch.randn(num_rows, width, device=device).to(dtype) for _ in range(2))
    judge(
        ("rows", "row weights", "hidden.grad", "weights.grad"),
        lambda hidden, weights: moe_permute(hidden, weights, order),
        lambda hidden, weights: moe_permute_reference(hidden, weights, *order),
        (hidden, weights),
        [upstream, torch.randn(num_rows, device=device)],
    )
    judge(
        ("sums", "rows.grad"),
        lambda rows: moe_unpermute(rows, order),
        lambda rows: moe_unpermute_reference(rows, *order[:3]),
        (rows,),
        [torch.randn(num_tokens, width, device=device).to(dtype)],
    )


def check_order(device: str = "cpu") -> None:
    """Rows are sorted by expert, then by token, and each weight is that of its token and expert."""
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
    """Rows that came chunk by chunk from other ranks, sorted by expert and back, with the gradients of a sort."""
    expert_of = torch.tensor([0, 0, 1, 2, 0, 2, 2, 1, 1, 1], device=device)
    order = RowOrder.of_experts(expert_of)
    rows, weights = torch.randn(10, 6, device=device), torch.randn(10, device=device)
    upstream = torch.randn(10, 6, device=device), torch.randn(10, device=device)
    place = expert_of.argsort(stable=True)
    found = run(lambda rows, weights: moe_permute(rows, weights, order), (rows, weights), upstream)
    expected = run(lambda rows, weights: (rows[place], weights[place]), (rows, weights), upstream)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    there_and_back = run(lambda rows: moe_unpermute(moe_permute(rows, weights, order)[0], order), (rows,), upstream[:1])
    assert torch.equal(there_and_back[0], rows) and torch.equal(there_and_back[1], upstream[0])


def check_sums_round_once(device: str = "cpu") -> None:
    """256 and eight times 1: in bfloat16 256 + 1 is 256 again, and in float32 264."""
    routing_map = torch.ones(2, 9, dtype=torch.bool, device=device)
    order = RowOrder.of_map(routing_map, 18)
    rows = torch.ones(18, 4, dtype=torch.bfloat16, device=device)
    rows[:2] = 256
    hidden, weights = torch.zeros(2, 4, dtype=torch.bfloat16, device=device), torch.zeros(2, 9, device=device)
    _, _, of_hidden, _ = run(
        lambda hidden, weights: moe_permute(hidden, weights, order), (hidden, weights), [rows, torch.zeros(18)]
    )
    assert moe_unpermute(rows, order).tolist() == of_hidden.tolist() == [[264.0] * 4] * 2
