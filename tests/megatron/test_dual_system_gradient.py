"""Two systems that share an outcome have gradients of their own: MARS's loss, by hand, fused, by the reference, in two shards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import dual_worker
import numpy as np
import pytest
import torch
from dual_worker import GROUP_SIZE, RULES, by_hand, credited, gradients, groups, packed

from marsrl.trainer.data.credit import Credited, balanced

if TYPE_CHECKING:
    from rank_pair import RankPair


def copies_of(each: Credited) -> dict[str, int]:
    return {uid: each.copies.get(uid, 1) for uid in each.counted if "/1#" in uid}


def test_balancing_makes_as_many_samples_of_system_1_as_of_system_2() -> None:
    copies = copies_of(credited())
    of = {problem: [n for uid, n in copies.items() if uid.startswith(problem)] for problem in "ab"}
    assert sorted(of["a"]) == [1, 2] and of["b"] == [1, 1, 1]  # two become three, of seven three are drawn
    assert all("/2:" not in uid for uid in credited().copies)
    everything = credited(RULES.model_copy(update={"balance": "off"}))
    assert not everything.copies and len(everything.counted) == 15
    same = {uid: everything.advantages[uid] for uid in credited().advantages}
    assert same == credited().advantages and len(same) == 15  # of all samples, before any is drawn


@pytest.mark.parametrize("kernels", ["", "reference"])
def test_the_loss_is_a_mean_of_each_system_by_hand(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels:
        monkeypatch.setenv("MARSRL_KERNELS", f"linear_policy_loss={kernels}")
    _, expected = by_hand(copies_of(credited()))
    _, _, found = gradients(credited())
    assert float((found - expected).abs().max()) < 1e-6 < float(expected.abs().max()) / 100


def test_two_shards_of_the_vocabulary_form_the_same(two_ranks: RankPair) -> None:
    found = two_ranks.run(Path(dual_worker.__file__), {})
    loss, of_hidden, _ = gradients(credited())
    _, expected = by_hand(copies_of(credited()))
    assert found["loss"] == pytest.approx([float(loss)], abs=1e-6)
    assert float((torch.tensor(found["hidden"]) - of_hidden).abs().max()) < 1e-6
    assert float((torch.tensor(found["head"]) - expected).abs().max()) < 1e-6


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


def test_without_a_sample_of_system_1_the_loss_is_system_2_s_alone() -> None:
    each = credited()
    alone = each.of(["system2"])
    loss, _, of_head = gradients(alone)
    only, _, expected = gradients(scaled(each, 1, 0.0))
    assert torch.allclose(of_head, expected, atol=1e-6) and float(loss) == pytest.approx(float(only), abs=1e-6)


def test_every_sample_is_as_likely_to_be_drawn() -> None:
    """So the mean over what is drawn is expected to be that over all; the same seed draws the same."""
    samples = [sample for group in groups() for sample in group.samples]
    drawn: Counter[str] = Counter()
    for seed in range(2000):
        copies = balanced(samples, GROUP_SIZE, seed)
        assert copies == balanced(samples[::-1], GROUP_SIZE, seed)
        drawn.update(copies)
    for problem, number in (("a", 2), ("b", 7)):
        means = [drawn[s.uid] / 2000 for s in samples if s.agent == "system1" and s.problem_id == problem]
        assert len(means) == number and all(abs(mean - GROUP_SIZE / number) < 0.06 for mean in means)
