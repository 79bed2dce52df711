"""Two gloo processes, each with half of the vocabulary, against one with all of it."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from marsrl.kernels import PolicyObjective, linear_logprob, linear_policy_loss, mpt_gate

WORLD, SIZE, WIDTH, TOKENS = 2, 12, 40, 30
OBJECTIVES = {
    "single pass": PolicyObjective(entropy_coef=0.05, kl="k3", kl_coef=0.1),
    "recompute": PolicyObjective(ratio="sequence"),
}
# 71: padding in the second shard; 40: the second shard is nothing but padding
CASES = [("single pass", 71), ("recompute", 80), ("single pass", 40)]


def case(real_vocab_size):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, SIZE, generator=generator)
    weight = torch.randn(WORLD * WIDTH, SIZE, generator=generator)
    targets = torch.randint(0, real_vocab_size, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, real_vocab_size - 1
    return (
        hidden,
        weight,
        targets,
        {
            "advantages": torch.randn(3, generator=generator),
            "mask": torch.rand(TOKENS, generator=generator) < 0.7,
            "cu_seqlens": torch.tensor([0, 11, 11, TOKENS]),
            "old_logprobs": -3 + torch.rand(TOKENS, generator=generator),
            "reference_logprobs": -3 + torch.rand(TOKENS, generator=generator),
            "normaliser": 21.0,
            "temperature": 0.5 + torch.rand(TOKENS, generator=generator),
        },
    )


def results(hidden, weight, targets, arguments, objective, real, group):
    """log-probs, entropy, dX and dW of linear_logprob, then loss, coefficient, dX and dW of linear_policy_loss."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = linear_logprob(
        hidden, weight, targets, temperature=arguments["temperature"], tp_group=group, real_vocab_size=real
    )
    (out.logprobs.sum() + 0.3 * out.entropy.square().sum()).backward()
    first = [out.logprobs.detach(), out.entropy.detach(), hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    main_grad = torch.zeros_like(weight)
    loss = linear_policy_loss(
        hidden,
        weight,
        targets,
        objective=objective,
        tp_group=group,
        real_vocab_size=real,
        main_grad=main_grad,
        **arguments,
    )
    loss.loss.backward()
    return [*first, loss.loss.detach(), loss.coefficient, hidden.grad, main_grad]


def worker(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    found = []
    for name, real in CASES:
        hidden, weight, targets, arguments = case(real)
        shard = weight[rank * WIDTH : (rank + 1) * WIDTH]
        found.append(results(hidden, shard, targets, arguments, OBJECTIVES[name], real, dist.group.WORLD))
        for index in (2, 6):  # dX is this shard's part
            dist.all_reduce(found[-1][index])
    with pytest.raises(ValueError, match=r"targets\[0\] is 80, expected 0..79"):
        linear_logprob(hidden, shard, targets * 0 + 80, tp_group=dist.group.WORLD)
    gate = mpt_gate(
        torch.full((2,), 0.1 + 0.15 * rank),  # 0.1 and 0.25: together 0.175
        torch.ones(2, dtype=torch.bool),
        torch.tensor([0, 2]),
        torch.tensor([True]),
        process_group=dist.group.WORLD,
    )
    torch.save((found, gate), f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_both_ranks(tmp_path_factory):
    """[(results of each case, gate)] of the two ranks. Scripts, not mp.spawn: that cannot import this file by name."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(folder)]) for rank in range(WORLD)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * WORLD
    return [torch.load(folder / str(rank)) for rank in range(WORLD)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{name}, {real}" for name, real in CASES])
def test_two_shards_equal_one(number, of_both_ranks):
    name, real = CASES[number]
    (first, _), (second, _) = of_both_ranks
    for index, value in enumerate(results(*case(real), OBJECTIVES[name], real, None)):
        if index in (3, 7):  # dW
            found = torch.cat((first[number][index], second[number][index]))
        else:
            found = first[number][index]
            assert torch.equal(found, second[number][index])
        torch.testing.assert_close(found, value, atol=2e-6, rtol=2e-5)


def test_the_gate_sums_over_the_ranks_of_a_sample(of_both_ranks):
    assert [gate.tolist() for _, gate in of_both_ranks] == [[True], [True]]


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
