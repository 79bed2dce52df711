"""What the row kernels of csrc/cuda must do, on the device that is the default; the test files choose it."""

from dataclasses import replace

import torch
from fused_head import arguments_for, head_case, policy_loss, run_policy_loss
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.kernels.head.rows.cuda import CudaRowKernels
from marsrl.kernels.head.rows.protocol import Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import Head, make_head
from marsrl.kernels.testing import assert_accurate


def head_for(
    targets: Tensor, width: int, num_columns: int, first_column: int = 0, temperature: Tensor | float = 1.0
) -> Head:
    hidden = torch.zeros(targets.numel(), 1)
    head = make_head("case", hidden, torch.zeros(width, 1), targets, temperature, None, None)
    return replace(head, num_columns=num_columns, first_column=first_column)


def exact_statistics(z: Tensor, targets: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(z * inverse[:, None], dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * torch.where(logp.isinf(), 0, logp)).sum(-1)


def hard_rows(columns: int) -> Tensor:
    """[6, columns] float32: usual, large, peaked at the first and at the last column, flat, one column at -inf."""
    rows = torch.randn(6, columns)
    rows[1] *= 100
    rows[2, 0] += 60
    rows[3, -1] += 200
    rows[4] = 88.0
    if columns > 1:
        rows[5, columns // 2] = -torch.inf
    return rows


# 1, 31, 33: less and more than a warp; 64; 1024: no rest; 8197: many vectors for each of 512 threads; odd ones: rows
# that begin in the middle of a vector
COLUMNS = (1, 31, 33, 64, 131, 1024, 8197)


def check_statistics(columns: int) -> None:
    padding = 3
    z = torch.cat((hard_rows(columns), torch.full((6, padding), torch.nan)), dim=1)
    targets = torch.tensor([0, columns - 1, 0, columns - 1, 0, 0])
    temperature = torch.rand(6) + 0.5
    head = head_for(targets, columns + padding, columns, temperature=temperature)
    out = Statistics.zeros(6, z.device)
    CudaRowKernels().statistics(z, Rows.of(None, 6), head, out)
    real, inverse = z[:, :columns], head.inverse_temperature
    exact = exact_statistics(real.double(), targets, inverse.double())
    plain = exact_statistics(real, targets, inverse)
    assert_accurate("logprobs", out.logprobs, exact[0], plain[0])
    assert_accurate("entropy", out.entropy, exact[1], plain[1])
    assert (out.logprobs <= 0).all() and torch.equal(out.maximum, real.max(dim=1).values)

    some = torch.tensor([1, 4])
    again = Statistics.zeros(6, z.device)
    CudaRowKernels().statistics(z[some], Rows(some, 0, 2), head, again)
    for field in vars(out):
        assert torch.equal(getattr(again, field)[some], getattr(out, field)[some])  # other rows change no bit
        assert not getattr(again, field)[torch.tensor([0, 2, 3, 5])].any()


def check_partials() -> None:
    z = hard_rows(131)
    targets = torch.tensor([100, 230, 231, 99, 150, 400])  # the shard holds 100 .. 230
    head = head_for(targets, 131, 131, first_column=100)
    partials = CudaRowKernels().partials(z, Rows.of(None, 6), head)
    maximum = z.double().max(dim=1, keepdim=True).values
    d = z.double() - maximum
    e = d.exp()
    targeted = torch.tensor([z[0, 0], z[1, 130], 0, 0, z[4, 50], 0], dtype=torch.float64)
    expected = torch.stack((maximum[:, 0], e.sum(1), torch.where(d.isinf(), 0, d * e).sum(1), targeted))
    torch.testing.assert_close(partials, expected, rtol=1e-6, atol=1e-30)
    nothing = CudaRowKernels().partials(z, Rows.of(None, 6), replace(head, num_columns=0))
    assert nothing[0].isneginf().all() and not nothing[1:].any()


def check_gradients(columns: int, dtype: torch.dtype, padding: int) -> None:
    z = torch.cat((hard_rows(columns), torch.full((6, padding), torch.nan)), dim=1)
    targets = torch.tensor([0, columns - 1, 0, columns - 1, 0, 0])
    head = head_for(targets, columns + padding, columns)
    statistics = Statistics.zeros(6, z.device)
    CudaRowKernels().statistics(z, Rows.of(None, 6), head, statistics)
    coefficient = torch.tensor([0.5, 0.0, -1.5, 2.0, 0.0, 0.25])
    entropy_coefficient = torch.tensor([0.0, 0.0, 0.1, 0.0, -0.2, 0.1])
    out = torch.full((7, columns + padding), torch.nan, dtype=dtype)
    active = torch.full((6,), -7)
    count = CudaRowKernels().gradients(
        z, Rows.of(None, 6), head, statistics, coefficient, entropy_coefficient, out, active
    )
    kept = [0, 2, 3, 4, 5]
    assert count.wait() == 5 and active.tolist() == [*kept, -7]
    assert out[5:].isnan().all() and not out[:5, columns:].any()

    def gradient(x: Tensor) -> Tensor:
        leaf = torch.nan_to_num(x[:, :columns], neginf=-1e30).requires_grad_()
        logp, entropy = exact_statistics(leaf, targets, torch.ones(6, dtype=x.dtype))
        (coefficient.to(x.dtype) * logp + entropy_coefficient.to(x.dtype) * entropy).sum().backward()
        return leaf.grad[kept]

    assert_accurate("dz", out[:5, :columns], gradient(z.double()), gradient(z).to(dtype))


def check_bad_targets_give_nan() -> None:
    head = head_for(torch.tensor([2, 33, -1]), 33, 33)
    out = Statistics.zeros(3, head.weight.device)
    CudaRowKernels().statistics(torch.randn(3, 33), Rows.of(None, 3), head, out)
    assert out.logprobs.isnan().tolist() == [False, True, True] and not out.entropy.isnan().any()


def check_same_bits_twice() -> None:
    case = head_case(60, 8)
    arguments = arguments_for(case, "k3, entropy bonus, tis")

    def run() -> list[Tensor]:
        result, *gradients = run_policy_loss(case, arguments, torch.float32)
        return [result.loss.detach(), *gradients, *result.agent_sums.values()]

    assert all(torch.equal(a, b) for a, b in zip(run(), run()))


def check_many_agents() -> None:
    """More agents than a block has kinds of, and tokens in several blocks: the sums of each are its own."""
    num_tokens, num_agents = 700, 40
    agent_of = torch.randint(0, num_agents, (num_tokens,))
    logprobs, entropy = -torch.rand(num_tokens), torch.rand(num_tokens)
    advantages = torch.randn(num_tokens)
    result = policy_loss(
        logprobs,
        entropy,
        objective=PolicyObjective(),
        advantages=advantages,
        cu_seqlens=torch.arange(num_tokens + 1),
        agent_of=agent_of,
        num_agents=num_agents,
        normaliser=2.0,
    )
    exact = torch.zeros(num_agents, dtype=torch.float64).index_add_(0, agent_of, -advantages.double() / 2)
    torch.testing.assert_close(result.agent_sums["loss"].double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(result.agent_sums["tokens"], agent_of.bincount(minlength=num_agents).float())
