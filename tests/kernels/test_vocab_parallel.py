"""The fused head with a vocabulary sharded over gloo processes, compared with the head in one process; also in interpreter/.

This file is also a script: `python test_vocab_parallel.py WORLD FOLDER` imports what the ranks need, and forks WORLD ranks.
"""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_op import IS_INTERPRETED
from fused_head import (
    arguments_for,
    chunks_of,
    forced,
    head_case,
    in_double,
    linear_policy_loss,
    support_of,
    use_device_chunks,
    without_target,
)
from torch import Tensor
from torch.multiprocessing import start_processes

from marsrl.kernels import linear_logprob, mpt_gate
from marsrl.kernels.testing import assert_accurate, off_by_an_ulp

TOKENS, CHUNK, WORLDS = 30, 8, [2, pytest.param(4, marks=pytest.mark.slow)]  # CHUNK: rows of float32 logits
if IS_INTERPRETED:
    TOKENS, CHUNK, WORLDS = 6, 3, [2]
SIZE, VOCAB = 12, 80
# {case: (objective, vocabulary size)}. With 71, the last shard has padding; with 40, half of the shards are only padding. Most
# shards have no column of a token's support.
CASES = {
    "single pass, 71": ("k3, entropy bonus, tis", 71),
    "recompute, 80": ("sequence ratio", 80),
    "single pass, 40": ("k3, entropy bonus, tis", 40),
    "support, 71": ("k3, entropy bonus, tis", 71),
}
NAMES = ("logprobs", "entropy", "dX", "dW", "loss", "coefficient", "dX of the loss", "dW of the loss")


def case_of(name: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return hidden, weight, targets and arguments, equal in every process. Columns beyond the vocabulary are padding."""
    torch.manual_seed(1)
    objective, real = CASES[name]
    hidden, weight, targets = case = head_case(TOKENS, SIZE, real)
    support = support_of(targets, real, whole=0.2, most=5) if name == "support, 71" else None
    words = {"temperature": 0.5 + torch.rand(TOKENS), "real_vocab_size": real, "support": support}
    arguments = arguments_for(case, objective, **words)
    return hidden, torch.cat((weight, torch.randn(VOCAB - real, SIZE))), targets, arguments


def results(
    hidden: Tensor, weight: Tensor, targets: Tensor, arguments: dict[str, Any], group: Any = None
) -> list[Tensor]:
    """Return the results named in NAMES: first of linear_logprob, then of linear_policy_loss."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    words = {name: arguments[name] for name in ("temperature", "real_vocab_size", "support")}
    out = linear_logprob(hidden, weight, targets, tp_group=group, **words)
    (out.logprobs.sum() + 0.3 * out.entropy.square().sum()).backward()
    first = [out.logprobs.detach(), out.entropy.detach(), hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    # The reference leaves the weight's gradient to autograd.
    main_grad = None if weight.dtype == torch.float64 else torch.zeros(weight.shape)
    loss = linear_policy_loss(hidden, weight, targets, tp_group=group, main_grad=main_grad, **arguments)
    loss.loss.backward()
    of_weight = weight.grad if main_grad is None else main_grad
    return [*first, loss.loss.detach(), loss.coefficient, hidden.grad, of_weight]  # type: ignore[list-item]


def run_rank(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.set_num_threads(1)
    group, width = dist.group.WORLD, VOCAB // world
    patch = pytest.MonkeyPatch()  # never undone: the process ends after these cases
    chunks_of(CHUNK, patch)
    use_device_chunks(CHUNK, patch, width)
    case_results = []
    for name in CASES:
        hidden, weight, targets, arguments = case_of(name)
        shard = weight[rank * width : (rank + 1) * width]
        case_results.append(results(hidden, shard, targets, arguments, group))
        for index in (2, 6):  # each shard computes a part of dX
            dist.all_reduce(case_results[-1][index])
    with pytest.raises(ValueError, match=r"targets\[0\] is 80, expected 0..79"):
        linear_logprob(hidden, shard, targets * 0 + 80, tp_group=group)
    gate = mpt_gate(
        torch.full((2,), 0.1 + 0.15 * (rank % 2)),  # entropies 0.1 and 0.25, with mean 0.175
        torch.ones(2, dtype=torch.bool),
        torch.tensor([0, 2]),
        torch.tensor([True]),
        process_group=group,
    )
    torch.save((case_results, gate), f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=WORLDS)
def of_ranks(request, tmp_path_factory):
    """Return (results of CASES, gate) of each rank.

    Ranks are forked by a script, because mp.spawn cannot import a test file by name.
    """
    folder = tmp_path_factory.mktemp("ranks")
    chosen = {"MARSRL_KERNELS": "triton"} if IS_INTERPRETED else {}
    words = [sys.executable, __file__, str(request.param), str(folder)]
    subprocess.run(words, env={**os.environ, **chosen}, timeout=240, check=True)
    return [torch.load(folder / str(rank)) for rank in range(request.param)]


@pytest.mark.parametrize("name", CASES)
def test_shards_equal_the_whole(name, of_ranks):
    """Shards are as exact as one process with the whole vocabulary, and bitwise equal on all ranks."""
    shards = [ours[list(CASES).index(name)] for ours, _ in of_ranks]
    hidden, weight, targets, arguments = case_of(name)
    whole = results(hidden, weight, targets, arguments)
    with forced("reference"):
        exact, moved = (
            results(convert(hidden), convert(weight), targets, in_double(arguments))
            for convert in (torch.Tensor.double, off_by_an_ulp)
        )
    for index, (truth, plain, off) in enumerate(zip(exact, whole, moved, strict=True)):
        ours, apart = shards[0][index], None
        if index in (3, 7):  # dW
            ours, apart = torch.cat([shard[index] for shard in shards]), without_target(targets, VOCAB)
        else:
            assert all(torch.equal(ours, shard[index]) for shard in shards)
        assert_accurate(NAMES[index], ours, truth, plain, moved=off, terms=max(VOCAB, TOKENS), apart=apart)


def test_the_gate_sums_over_the_ranks_of_a_sample(of_ranks):
    assert all(gate.tolist() == [True] for _, gate in of_ranks)


if __name__ == "__main__":
    _, WORLD, FOLDER = sys.argv
    # If a rank fails, the others are ended.
    start_processes(run_rank, (int(WORLD), FOLDER), nprocs=int(WORLD), start_method="fork")
