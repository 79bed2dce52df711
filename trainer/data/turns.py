"""Advantages of single turns: the return from a turn on, compared with that of other sessions (credit.turns=returns)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum
from statistics import fmean, pstdev

from marsrl.rollout.types import PENALTIES, Sample
from marsrl.trainer.config import CreditConfig


def turn_advantages(samples: Iterable[Sample], config: CreditConfig) -> dict[str, list[float]]:
    """Return {uid: advantages of the sample's trained_turns, in order}, for samples with a reward.

    r_ik: reward of the agent's k-th turn in session i, in time order over the agent's samples there.
    G_ik = r_ik + r_i(k+1) + ...: return from turn k on. R_i = G_i1.
    S: the other sessions in which the agent has a k-th turn.

        A_ik = G_ik - (sum over S of G_jk + beta_ik) / (|S| + 1)
        beta_ik = mean over j != i of R_j, less r_i1 + ... + r_i(k-1)

    The baseline depends only on other sessions and on this session's past, so it does not change the expected gradient. A_ik is
    computed as a mean of differences, G_ik - G_jk and R_i - mean R_j, so that it is exactly 0 if all sessions are equal.

    Sessions are compared within a group or, with credit.normalise=agent, among all of the agent's sessions in a rollout instance.
    A sample without a program is a session of its own. The advantages of a session without others follow credit.singleton.
    """
    sets: dict[tuple[str, str], dict[str, list[Sample]]] = {}
    for sample in samples:
        if not sample.reward.is_missing and sample.trained_turns:
            name = sample.group_id if config.normalise == "group" else sample.rollout_id
            sets.setdefault((name, sample.agent), {}).setdefault(sample.session_id, []).append(sample)
    advantages: dict[str, list[float]] = {}
    for sessions in sets.values():
        played = [_rewards(own) for own in sessions.values()]
        to_go = [[fsum(reward for _, reward in turns[k:]) for k in range(len(turns))] for turns in played]
        for i, turns in enumerate(played):
            own, others = to_go[i], to_go[:i] + to_go[i + 1 :]
            whole = [fmean(own[0] - other[0] for other in others)] if others else []
            for k, (uid, _) in enumerate(turns):
                differences = whole + [own[k] - other[k] for other in others if len(other) > k]
                alone = own[k] if config.singleton == "raw" else 0.0
                advantages.setdefault(uid, []).append(fmean(differences) if differences else alone)
    return advantages


def turn_metrics(turns: Iterable[tuple[Sample, Sequence[float]]]) -> dict[str, float]:
    """Return turns/{agent}/number and turns/{agent}/advantage_std.

    number: mean number of the agent's turns per session. advantage_std: standard deviation of their advantages.
    turns: trained samples with the advantages of their turns.
    """
    by_agent: dict[str, list[float]] = {}
    sessions: dict[str, set[str]] = {}
    for sample, advantages in turns:
        by_agent.setdefault(sample.agent, []).extend(advantages)
        sessions.setdefault(sample.agent, set()).add(sample.session_id)
    return {
        f"turns/{agent}/{name}": value
        for agent, own in by_agent.items()
        for name, value in (("number", len(own) / len(sessions[agent])), ("advantage_std", pstdev(own)))
    }


def _rewards(samples: Sequence[Sample]) -> list[tuple[str, float]]:
    """Return (uid, reward) of each turn of an agent in one session, in time order.

    Parts of a reward that belong to no turn are added to a last turn: a program's reward for the agent to the agent's last turn
    in the session, and a sample's penalties to the last turn of that sample.
    """
    last = max(samples, key=lambda sample: sample.trained_turns[-1].call)
    turns: list[tuple[int, str, float]] = []
    for sample in samples:
        reward, calls = sample.reward, [turn.call for turn in sample.trained_turns]
        own = list(reward.turns) or [0.0] * len(calls)
        penalties = [part for name, part in reward.parts.items() if name in PENALTIES]
        own[-1] += reward.value - sum(reward.turns) if sample is last else sum(penalties)
        turns += [(call, sample.uid, each) for call, each in zip(calls, own, strict=True)]
    return [(uid, reward) for _, uid, reward in sorted(turns)]
