"""Two systems that share an outcome have gradients of their own: MARS's loss, by hand, fused, by the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from marsrl.kernels import LossInputs, PolicyObjective, linear_policy_loss
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import Finish, Group, Reward, Sample, Segment
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import Credited, credit
from marsrl.trainer.data.mini_batches import Average, mini_batches
from marsrl.trainer.data.packing import PackedBatch, pack

SIZE, VOCAB, GROUP_SIZE, SEED = 6, 24, 3, 5
AGENTS = {"system2": AgentConfig(), "system1": AgentConfig()}
RULES = CreditConfig(normalise="agent", reward_scheme="outcome", denominator="agent", balance="uniform")
OUTCOMES = {"a": (1.0, 0.0, 0.0), "b": (1.0, 1.0, 0.0)}  # by problem, of its trajectories
READINGS = {"a": (1, 1, 0), "b": (3, 2, 2)}  # of System 1 in each: fewer than three samples, and more


def groups() -> list[Group]:
    rng = np.random.default_rng(0)

    def sample(uid: str, problem: str, agent: str, outcome: float, tokens: int) -> Sample:
        is_sampled = rng.random(tokens) < (0.6 if agent == "system2" else 1.0)  # the rest are distillates
        is_sampled[-1] = True
        return Sample(
            uid, problem, problem, agent, f"{problem}/{agent}", None, rng.integers(0, VOCAB, 2).astype(np.int32),
            rng.integers(0, VOCAB, tokens).astype(np.int32), is_sampled, np.zeros(tokens, np.float32),
            (Segment(0, tokens, 0),), Finish.STOP, reward=Reward(0.5, 0.5), outcome=outcome,
        )  # fmt: skip

    found = []
    for problem, outcomes in OUTCOMES.items():
        reasoned = [sample(f"{problem}.{i}/2:0", problem, "system2", o, 5 + i) for i, o in enumerate(outcomes)]
        read = [
            sample(f"{problem}.{i}/1#{n}:0", problem, "system1", outcomes[i], 2 + n)
            for i, number in enumerate(READINGS[problem])
            for n in range(number)
        ]
        found += [Group(f"{problem}/{own[0].agent}", problem, own[0].agent, tuple(own)) for own in (reasoned, read)]
    return found


def credited(rules: CreditConfig = RULES) -> Credited:
    return credit(groups(), rules, AGENTS, group_size=GROUP_SIZE, seed=SEED)


def model() -> tuple[Tensor, Tensor]:
    """(what stands for a hidden state: a row for each token id, [V, H]; the head, [V, H])."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(VOCAB, SIZE, generator=generator), torch.randn(VOCAB, SIZE, generator=generator)


def packed(each: Credited) -> tuple[PackedBatch, float]:
    (update,) = mini_batches(each, 1, Average("sequence", "agent"), seed=0, step=1)
    return pack(list(update.sequences)), update.normaliser


def gradients(each: Credited) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, of the hidden states [T, H], of the head) as the trainer forms them."""
    batch, normaliser = packed(each)
    rows, head = model()
    hidden, head = rows[batch.token_ids].requires_grad_(), head.requires_grad_()
    inputs = LossInputs(
        PolicyObjective(), batch.cu_seqlens, normaliser, batch.advantages, mask=batch.mask, weights=batch.weights,
        agent_of=batch.agent_of, num_agents=2,
    )  # fmt: skip
    loss = linear_policy_loss(hidden, head, batch.targets, inputs)
    loss.loss.backward()
    assert hidden.grad is not None and head.grad is not None
    return loss.loss.detach(), hidden.grad, head.grad


def by_hand(copies: dict[str, int]) -> tuple[Tensor, Tensor]:
    """(loss, of the head) in float64, by equations 6, 7 and 9 of arXiv:2510.04935, a token after the other.

    copies: of each sample of System 1; those of System 2 have one.
    """
    rows, head = (each.double() for each in model())
    head.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for system in ("system2", "system1"):
        of_system, num_samples = torch.zeros((), dtype=torch.float64), 0
        for group in groups():
            if group.agent != system:
                continue
            rewards = np.array([sample.outcome for sample in group.samples])
            for sample, advantage in zip(
                group.samples, (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True
            ):
                num_copies = copies.get(sample.uid, 0) if system == "system1" else 1
                ids = np.concatenate([sample.prompt_ids, sample.token_ids])
                logprobs = []
                for place in np.flatnonzero(sample.is_sampled):
                    logits = head @ rows[ids[len(sample.prompt_ids) + place - 1]]
                    logprobs.append(logits.log_softmax(0)[sample.token_ids[place]])
                of_system = of_system - num_copies * advantage * torch.stack(logprobs).mean()
                num_samples += num_copies
        total = total + of_system / num_samples
    total.backward()
    assert head.grad is not None
    # on policy the ratio is 1, and the gradient that of advantage x log-prob
    return total.detach(), head.grad


def copies_of(each: Credited) -> dict[str, int]:
    return {uid: each.copies.get(uid, 1) for uid in each.counted if "/1#" in uid}


@pytest.mark.parametrize("kernels", ["", "reference"])
def test_the_loss_is_a_mean_of_each_system_by_hand(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels:
        monkeypatch.setenv("MARSRL_KERNELS", f"linear_policy_loss={kernels}")
    _, expected = by_hand(copies_of(credited()))
    _, _, found = gradients(credited())
    assert float((found - expected).abs().max()) < 1e-6 < float(expected.abs().max()) / 100


def scaled(each: Credited, system: int, factor: float) -> Credited:
    """The advantages of one system times a factor."""
    return replace(
        each,
        sequences=tuple(
            replace(s, advantage=s.advantage * factor) if f"/{system}" in s.uid else s for s in each.sequences
        ),
    )


@pytest.mark.parametrize("system", [1, 2])
def test_no_token_gets_the_gradient_of_the_other_system(system: int) -> None:
    batch, _ = packed(credited())
    sequence_of = np.repeat(np.arange(len(batch.uids)), np.diff(batch.cu_seqlens.numpy()))
    is_own = torch.tensor([f"/{system}" in batch.uids[i] for i in sequence_of])
    _, before, _ = gradients(credited())
    _, after, _ = gradients(scaled(credited(), system, 7.0))
    assert torch.equal(after[~is_own], before[~is_own])
    assert torch.allclose(after[is_own], 7 * before[is_own], atol=1e-6) and bool(before[is_own].abs().sum() > 0)
    assert bool((before[~batch.mask] == 0).all()) and int((~batch.mask).sum()) > 20  # prompts and distillates


def test_a_copy_is_as_good_as_the_sample_twice() -> None:
    """Three samples of System 1 of two, one of them twice: as three samples of which two are the same."""
    each = credited()
    twice = next(uid for uid, number in each.copies.items() if number == 2)
    (sequence,) = (s for s in each.sequences if s.uid == twice)
    again = replace(sequence, uid=twice + "'")
    own = [
        replace(g, samples=(*g.samples, *(replace(s, uid=again.uid) for s in g.samples if s.uid == twice)))
        for g in each.groups
    ]
    written_out = Credited(
        tuple(own), (*each.sequences, again), {**each.counted, again.uid: each.counted[twice]}, {}, each.advantages
    )
    assert written_out.num_tokens == each.num_tokens
    for one, other in zip(gradients(each)[::2], gradients(written_out)[::2], strict=True):
        assert torch.allclose(one, other, atol=1e-6)
