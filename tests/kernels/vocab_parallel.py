"""The fused head with its vocabulary cut over gloo processes, and what one process makes of all of it.

A script of its own: `python vocab_parallel.py WORLD TOKENS CHUNK FOLDER` forks so many ranks when it has imported
what they need; CHUNK: rows of float32 logits.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_head import chunks_of, forced, in_double, linear_policy_loss, support_of, without_target
from head_tests import use_device_chunks
from torch import Tensor
from torch.multiprocessing import start_processes

from marsrl.kernels import PolicyObjective, linear_logprob, mpt_gate
from marsrl.kernels.testing import assert_accurate, off_by_an_ulp

SIZE, VOCAB = 12, 80
OBJECTIVES = {
    "single pass": PolicyObjective(entropy_coef=0.05, kl="k3", kl_coef=0.1),
    "recompute": PolicyObjective(ratio="sequence"),
    "support": PolicyObjective(entropy_coef=0.05, kl="k3", kl_coef=0.1),
}
# 71: padding in the last shard; 40: half of the shards are nothing but padding
CASES = [("single pass", 71), ("recompute", 80), ("single pass", 40), ("support", 71)]


def make_case(tokens: int, real_vocab_size: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, SIZE, generator=generator)
    weight = torch.randn(VOCAB, SIZE, generator=generator)
    targets = torch.randint(0, real_vocab_size, (tokens,), generator=generator)
    targets[0], targets[1] = 0, real_vocab_size - 1
    arguments = {
        "advantages": torch.randn(3, generator=generator),
        "mask": torch.rand(tokens, generator=generator) < 0.7,
        "cu_seqlens": torch.tensor([0, tokens // 3, tokens // 3, tokens]),
        "old_logprobs": -3 + torch.rand(tokens, generator=generator),
        "reference_logprobs": -3 + torch.rand(tokens, generator=generator),
        "normaliser": 21.0,
        "temperature": 0.5 + torch.rand(tokens, generator=generator),
    }
    return hidden, weight, targets, arguments


def results(
    hidden: Tensor, weight: Tensor, targets: Tensor, arguments: dict[str, Any], name: str, real: int, group: Any
) -> list[Tensor]:
    """log-probs, entropy, dX and dW of linear_logprob, then loss, coefficient, dX and dW of linear_policy_loss."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    support = support_of(targets, real, whole=0.2, most=5) if name == "support" else None  # most shards keep nothing
    out = linear_logprob(
        hidden,
        weight,
        targets,
        temperature=arguments["temperature"],
        tp_group=group,
        real_vocab_size=real,
        support=support,
    )
    (out.logprobs.sum() + 0.3 * out.entropy.square().sum()).backward()
    first = [out.logprobs.detach(), out.entropy.detach(), hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    # the reference leaves it to autograd
    main_grad = None if weight.dtype == torch.float64 else torch.zeros(weight.shape)
    loss = linear_policy_loss(
        hidden,
        weight,
        targets,
        objective=OBJECTIVES[name],
        tp_group=group,
        real_vocab_size=real,
        main_grad=main_grad,
        support=support,
        **arguments,
    )
    loss.loss.backward()
    of_weight = weight.grad if main_grad is None else main_grad
    return [*first, loss.loss.detach(), loss.coefficient, hidden.grad, of_weight]  # type: ignore[list-item]


@dataclass(frozen=True)
class OfRank:
    """cases: results() of each case; gate: of mpt_gate."""

    cases: list[list[Tensor]]
    gate: Tensor


def run_rank(rank: int, world: int, tokens: int, chunk: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.set_num_threads(1)
    group, width = dist.group.WORLD, VOCAB // world
    patch = pytest.MonkeyPatch()  # for the life of this process
    chunks_of(chunk, patch)
    use_device_chunks(chunk, patch, width)
    found = []
    for name, real in CASES:
        hidden, weight, targets, arguments = make_case(tokens, real)
        shard = weight[rank * width : (rank + 1) * width]
        found.append(results(hidden, shard, targets, arguments, name, real, group))
        for index in (2, 6):  # dX is this shard's part
            dist.all_reduce(found[-1][index])
    with pytest.raises(ValueError, match=r"targets\[0\] is 80, expected 0..79"):
        linear_logprob(hidden, shard, targets * 0 + 80, tp_group=group)
    gate = mpt_gate(
        torch.full((2,), 0.1 + 0.15 * (rank % 2)),  # 0.1 and 0.25: together 0.175
        torch.ones(2, dtype=torch.bool),
        torch.tensor([0, 2]),
        torch.tensor([True]),
        process_group=group,
    )
    torch.save((found, gate), f"{folder}/{rank}")
    dist.destroy_process_group()


def run_ranks(world: int, tokens: int, chunk: int, folder: Path, **environment: str) -> list[OfRank]:
    """Results of each rank for CASES. A script, not mp.spawn: that cannot import a test's file by name."""
    words = [str(world), str(tokens), str(chunk), str(folder)]
    subprocess.run([sys.executable, __file__, *words], env={**os.environ, **environment}, timeout=240, check=True)
    return [OfRank(*torch.load(folder / str(rank))) for rank in range(world)]


NAMES = ("logprobs", "entropy", "dX", "dW", "loss", "coefficient", "dX of the loss", "dW of the loss")


def assert_shards_equal_the_whole(number: int, tokens: int, of_ranks: list[OfRank]) -> None:
    """Case `number` is as exact as this process with all of the vocabulary; the ranks agree to the bit."""
    name, real = CASES[number]
    shards = [rank.cases[number] for rank in of_ranks]
    hidden, weight, targets, arguments = make_case(tokens, real)
    whole = results(hidden, weight, targets, arguments, name, real, None)
    with forced("reference"):
        exact, moved = (
            results(h, w, targets, in_double(arguments), name, real, None)
            for h, w in ((hidden.double(), weight.double()), (off_by_an_ulp(hidden), off_by_an_ulp(weight)))
        )
    for index, values in enumerate(zip(exact, whole, moved, strict=True)):
        apart = None
        if index in (3, 7):  # dW
            found = torch.cat([shard[index] for shard in shards])
            apart = without_target(targets, VOCAB)
        else:
            found = shards[0][index]
            assert all(torch.equal(found, shard[index]) for shard in shards)
        terms = max(VOCAB, tokens)
        assert_accurate(NAMES[index], found, values[0], values[1], moved=values[2], terms=terms, apart=apart)


if __name__ == "__main__":
    _, WORLD, TOKENS, CHUNK, FOLDER = sys.argv
    words = int(WORLD), int(TOKENS), int(CHUNK), FOLDER
    start_processes(run_rank, words, nprocs=int(WORLD), start_method="fork")  # the first that fails ends all
