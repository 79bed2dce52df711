"""Credit assignment: advantages from groups of rewards, and the samples that train.

Credit is computed once per step, over all samples of all policies: comparisons depend neither on the policy nor on
which agents are trained. It is then split by policy (Credited.of) and into updates (mini_batches.py).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from marsrl.kernels import group_advantage
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.player.refill import Spread
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.types import PENALTIES, Finish, FloatArray, Group, Reward, Sample
from marsrl.trainer.config import CreditConfig, RunConfig
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.turns import turn_advantages


def why_not(config: RunConfig) -> str | None:
    """Return why no sample can have a gradient, neither from its advantage nor from a KL or entropy term; None if some can."""
    credit, loss = config.credit, config.loss
    if config.teachers:
        return None
    trained = [name for name in config.agents if credit.trains(name)]
    if all(config.agents[name].loss_weight == 0 for name in trained):
        keys = ", ".join(f"agents.{name}.loss_weight" for name in trained)
        return f"{keys}: 0 for every trained agent, so nothing would train; raise one"
    if loss.keeps_zero:
        return None
    compared_with = {"group": "a sample is compared with those of its group", "trajectory": "episodes are compared"}
    if config.rollout.group_size == 1 and credit.normalise in compared_with and credit.singleton == "zero":
        return (
            f"rollout.group_size is 1, and with credit.normalise={credit.normalise} {compared_with[credit.normalise]}: every "
            "advantage would be 0; raise rollout.group_size, or set credit.singleton=raw or another credit.normalise"
        )
    return None


@dataclass(frozen=True, slots=True)
class Credited:
    """A step's samples with their credit, for all agents or for one policy's agents.

    Example: a group of two samples, one right with 3 tokens, one wrong with 2:

        Credited((group,), (sequence, other), counted={"000017/solver:0": 3, "000017/solver:1": 2},
                 advantages={"000017/solver:0": 1.0, "000017/solver:1": -1.0})

    groups: every group, trained or not, with the rewards that credit uses (outcomes, with credit.reward_scheme=outcome).
    sequences: the trained samples with a gradient.
    counted: {uid: number of sampled tokens}, for the samples in the loss's denominator: trained samples with a reward. Those of
        groups without spread count only with credit.count_zero_groups.
    copies: {uid: weight in gradient and denominator}, for weights above 1 (credit.balance).
    advantages: {uid: advantage} of every trained sample with a reward, for the samples log.
    masked: uids of samples that are not trained only because they were cut (loss.truncated=mask).
    turns: {uid: advantage of each turn} with credit.turns=returns; `advantages` then has the value farthest from 0.
    """

    groups: tuple[Group, ...] = ()
    sequences: tuple[TrainSequence, ...] = ()
    counted: Mapping[str, int] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    advantages: Mapping[str, float] = field(default_factory=dict)
    masked: frozenset[str] = frozenset()
    turns: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the loss's denominator."""
        return sum(self.copies.get(uid, 1) * count for uid, count in self.counted.items())

    def of(self, agents: Collection[str]) -> Credited:
        """Return the credit of these agents' samples, without computing it again."""
        groups = tuple(group for group in self.groups if group.agent in agents)
        uids = {sample.uid for group in groups for sample in group.samples}
        return Credited(
            groups,
            tuple(sequence for sequence in self.sequences if sequence.uid in uids),
            {uid: count for uid, count in self.counted.items() if uid in uids},
            {uid: number for uid, number in self.copies.items() if uid in uids},
            {uid: value for uid, value in self.advantages.items() if uid in uids},
            self.masked & uids,
            {uid: values for uid, values in self.turns.items() if uid in uids},
        )


def credit(
    groups: Sequence[Group],
    config: CreditConfig,
    agents: Mapping[str, AgentConfig],
    *,
    success: float = 1.0,
    keep_zero: bool = False,
    masks_truncated: bool = False,
    group_size: int = 1,
    seed: int = 0,
    teacher_logprobs: Mapping[str, FloatArray] | None = None,
) -> Credited:
    """Compute advantages of all samples, and select the sequences to pack.

    groups: finished groups of all agents and policies, trained or not: all count in the statistics of credit.normalise and in
        the outcomes. If programs play, an agent's samples of one session count as one (Sample.session_id).
    agents: every agent of the team in order; a sequence's agent index is the position here.
    success: smallest credited reward, before penalties, of a positive sample (mpt.success); its advantage must also be
        above 0.
    keep_zero: keep samples with advantage 0 (a KL term or an entropy bonus still gives them a gradient).
    masks_truncated: leave samples that were cut (Finish.LENGTH) out of sequences, denominator and credit.balance; they still
        count in the statistics of rewards (loss.truncated; arXiv:2503.14476, section 3.4).
    group_size: number of samples per agent and rollout instance under credit.balance, drawn by `seed`.
    teacher_logprobs: {uid: [N] log-probs under the teacher, nats} of the completions of samples whose agents have teachers.

    A teacher adds its part (_teachers_parts) to the advantage of each token. It affects neither rewards nor the statistics of
    groups, nor whether a sample is positive for the gate.

    With credit.turns=returns each turn has its own advantage (turns.py). A sample is then positive if the
    advantages of all its turns are above 0.

    A sample without a reward enters no statistic, sequence or denominator. A sample with an advantage of exactly 0 (in a group
    without spread, or alone) is not packed, unless keep_zero is set or the sample has teacher log-probs.
    """
    names = list(agents)
    if config.reward_scheme == "outcome":
        groups = outcome_rewards(groups)
    samples = [s for g in groups for s in g.samples]
    if not samples:
        return Credited(tuple(groups))
    advantage, by_turn = _advantages(samples, config)
    trained = [(s, float(a)) for s, a in zip(samples, advantage) if not s.reward.is_missing and config.trains(s.agent)]
    masked = frozenset(s.uid for s, _ in trained if masks_truncated and s.finish is Finish.LENGTH)
    trained = [(sample, value) for sample, value in trained if sample.uid not in masked]
    copies = balanced([sample for sample, _ in trained], group_size, seed) if config.balance == "uniform" else {}
    of_teachers = _teachers_parts([sample for sample, _ in trained], teacher_logprobs or {}, agents)
    sequences = []
    counted: dict[str, int] = {}
    advantages: dict[str, float] = {}
    for sample, value in trained:
        advantages[sample.uid] = value
        if copies.get(sample.uid, 1) == 0:
            continue
        of_teacher = of_teachers.get(sample.uid)
        enters = value != 0.0 or keep_zero or of_teacher is not None
        if enters or config.count_zero_groups:
            counted[sample.uid] = int(np.count_nonzero(sample.is_sampled))
        if enters:
            agent = agents[sample.agent]
            is_better = min(by_turn.get(sample.uid, [value])) > 0
            is_positive = (
                is_better and sample.reward.correct >= success and (of_teacher is None or agent.loss_weight > 0)
            )
            sequence = _sequence(sample, value, agent, names.index(sample.agent), is_positive)
            of_tokens: float | npt.NDArray[np.float64] = sequence.advantage
            if sample.uid in by_turn:
                of_tokens = np.zeros(len(sample.token_ids))
                for turn, of_turn in zip(sample.trained_turns, by_turn[sample.uid], strict=True):
                    of_tokens[turn.start : turn.end] = of_turn * agent.loss_weight
            if of_teacher is not None:
                of_tokens = np.where(sequence.is_sampled, of_tokens + of_teacher, 0)
            if not isinstance(of_tokens, float):
                sequence = replace(sequence, token_advantages=of_tokens.astype(np.float32))
            sequences.append(sequence)
    several = {uid: number for uid, number in copies.items() if number > 1}
    turns = {uid: own for uid, own in by_turn.items() if uid in advantages}
    return Credited(tuple(groups), tuple(sequences), counted, several, advantages, masked, turns)


def spread(groups: Sequence[Group], config: CreditConfig, trained: Collection[str]) -> Spread:
    """Return how the rewards of trained agents' samples differ.

    TASK: in the task's judgement; FORM: only in penalties of form; NONE: not at all; UNKNOWN: known rewards do not differ, and
    others are missing. Rewards differ if `credit` would give a trained sample an advantage other than 0.

    groups: one group, or all groups that are compared with each other. trained: names of agents that are trained on rewards.
    """
    if config.reward_scheme == "outcome":
        groups = outcome_rewards(groups)
    samples = [s for g in groups for s in g.samples]

    def differ(samples: Sequence[Sample]) -> bool:
        of_samples = zip(samples, _advantages(samples, config)[0], strict=True)
        return any(a != 0 and s.agent in trained and not s.reward.is_missing for s, a in of_samples)

    if not samples:
        return Spread.UNKNOWN
    if differ([replace(sample, reward=_without_penalties(sample.reward)) for sample in samples]):
        return Spread.TASK
    if differ(samples):
        return Spread.FORM
    is_missing = any(sample.reward.is_missing for sample in samples if sample.agent in trained)
    return Spread.UNKNOWN if is_missing else Spread.NONE


def _without_penalties(reward: Reward) -> Reward:
    """Return the reward without penalties of form. Rounding to float32 removes errors of the subtraction."""
    value = reward.value - sum(part for name, part in reward.parts.items() if name in PENALTIES)
    parts = {name: part for name, part in reward.parts.items() if name not in PENALTIES}
    return replace(reward, value=float(np.float32(value)), parts=parts)


def _advantages(
    samples: Sequence[Sample], config: CreditConfig
) -> tuple[npt.NDArray[np.float64], dict[str, list[float]]]:
    """Return each sample's advantage, [samples] float64, and with credit.turns=returns those of its turns, by uid.

    An advantage is meaningless for a sample without a reward.

    If a program played, each of an agent's n rewards in a session has the weight 1/n in mean and variance. Each sample's own
    reward is compared with that mean and variance.

    credit.normalise=trajectory: a trajectory's reward, the mean over its calls, is compared with the problem's other
    trajectories, and all its calls get its advantage (the GRPO baseline published with Dr. MAS, arXiv:2602.08847).

    credit.normalise=step: the agent's samples of all problems in the step are compared (a stateless form of SPIRAL's baseline of
    each role, arXiv:2506.24119).
    """
    if config.turns == "returns":
        by_turn = turn_advantages(samples, config)
        return np.array([max(by_turn.get(sample.uid, [0.0]), key=abs) for sample in samples]), by_turn
    whole, over_step = config.normalise == "trajectory", config.normalise == "step"
    rewards = [sample.reward.value for sample in samples]
    sessions = [sample.episode_id if whole else f"{sample.session_id}/{sample.agent}" for sample in samples]
    if whole:
        means = _means_by(sessions, rewards)
        rewards = [means.get(name, math.nan) for name in sessions]
    advantages = group_advantage(
        torch.tensor(rewards, dtype=torch.float32),
        _indices(s.rollout_id if whole else s.agent if over_step else s.group_id for s in samples),
        _indices(s.agent for s in samples),
        _indices(s.rollout_id for s in samples),
        session_of=_indices(sessions),
        normalise="group" if whole or over_step else config.normalise,
        std=config.std,
        singleton=config.singleton,
    )
    return advantages.double().numpy(), {}


def _means_by(names: Iterable[str], rewards: Iterable[float]) -> dict[str, float]:
    """Return {name: mean of its known rewards}, for the names that have any."""
    known: dict[str, list[float]] = {}
    for name, reward in zip(names, rewards, strict=True):
        if not math.isnan(reward):
            known.setdefault(name, []).append(reward)
    return {name: statistics.fmean(each) for name, each in known.items()}


def _sequence(
    sample: Sample, advantage: float, agent: AgentConfig, agent_index: int, is_positive: bool
) -> TrainSequence:
    """Return a sample in the form that packing takes. agent_index: index of its agent in the team."""
    return TrainSequence(
        uid=sample.uid,
        prompt_ids=sample.prompt_ids,
        token_ids=sample.token_ids,
        is_sampled=sample.is_sampled,
        rollout_logprobs=sample.rollout_logprobs,
        advantage=advantage * agent.loss_weight,
        agent=agent_index,
        temperature=agent.temperature,
        is_positive=is_positive,
        routed_experts=sample.routed_experts,
        kept_tokens=sample.kept_tokens,
    )


def _teachers_parts(
    samples: Sequence[Sample], teacher_logprobs: Mapping[str, FloatArray], agents: Mapping[str, AgentConfig]
) -> dict[str, npt.NDArray[np.float64]]:
    """Return {uid: [N]} for samples with a teacher: coef x (d - b) per token, d = log p_teacher - log p_rollout.

    p_rollout is the probability under the weights that sampled the token. The gradient is that of each position's reverse KL on
    the student's own samples, estimated at the sampled token. It is the gradient of GKD (arXiv:2306.13649), which does not
    backpropagate through the sampling of earlier tokens, and the single-step part of MiniLLM's (arXiv:2306.08543).

    b is a weighted mean of d over the agent's other samples (0 if there are none). It leaves the expected gradient unchanged and
    reduces the variance: a weak student mostly samples wrong tokens, with d far below 0. Each token's weight in the mean is
    (1 - p_rollout)^2, proportional to its squared gradient, which gives the constant of least variance (Greensmith et al., JMLR
    5:1471, 2004).
    """
    parts: dict[str, npt.NDArray[np.float64]] = {}
    for name, agent in agents.items():
        own = [sample for sample in samples if sample.agent == name and sample.uid in teacher_logprobs]
        if agent.teacher is None or not own:
            continue
        differences = [(teacher_logprobs[s.uid] - s.rollout_logprobs).astype(np.float64) for s in own]
        known = [s.is_sampled & np.isfinite(d) for s, d in zip(own, differences, strict=True)]
        squares = [np.expm1(s.rollout_logprobs[k].astype(np.float64)) ** 2 for s, k in zip(own, known, strict=True)]
        weights = np.array([w.sum() for w in squares])
        sums = np.array([w @ d[k] for w, d, k in zip(squares, differences, known, strict=True)])
        others = weights.sum() - weights
        has_others = others > 1e-9 * weights.sum()  # A smaller sum is a rounding error.
        baselines = np.divide(sums.sum() - sums, others, out=np.zeros_like(others), where=has_others)
        parts |= {s.uid: agent.teacher.coef * (d - b) for s, d, b in zip(own, differences, baselines, strict=True)}
    return parts


def teacher_metrics(samples: Iterable[Sample], teacher_logprobs: Mapping[str, FloatArray]) -> dict[str, float]:
    """Return teacher/{agent}/kl: mean of log p_rollout - log p_teacher over sampled tokens, nats, estimating the reverse KL."""
    differences: dict[str, list[FloatArray]] = {}
    for sample in samples:
        if (of_teacher := teacher_logprobs.get(sample.uid)) is not None:
            found = (sample.rollout_logprobs - of_teacher)[sample.is_sampled]
            differences.setdefault(sample.agent, []).append(found)
    return {
        f"teacher/{agent}/kl": float(np.concatenate(each).mean(dtype=np.float64)) for agent, each in differences.items()
    }


def balanced(samples: Iterable[Sample], number: int, seed: int) -> dict[str, int]:
    """Return {uid: number of copies} with which every agent has `number` samples per instance (MARS).

    If there are more samples, `number` of them are drawn, and the others get 0 copies. If there are fewer, each is repeated
    equally often, and samples drawn at random get one more copy. All samples of an agent and instance are drawn with equal
    probability, so the mean over copies is unbiased.
    """
    uids: dict[tuple[str, str], list[str]] = {}
    for sample in samples:
        uids.setdefault((sample.rollout_id, sample.agent), []).append(sample.uid)
    copies: dict[str, int] = {}
    for (rollout_id, agent), own in uids.items():
        each, rest = divmod(number, len(own))
        drawn = set(random.Random(derive_seed(seed, "balance", rollout_id, agent)).sample(sorted(own), rest))
        copies.update({uid: each + (uid in drawn) for uid in own})
    return copies


def outcome_rewards(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with every reward replaced by the outcome of its episode (Orchestration.outcomes).

    The turns' rewards and the penalties (agents.<name>.format_penalty, agents.<name>.overlong) of the replaced reward are kept.
    `correct` of the new reward is the outcome itself. A sample that ended in an error keeps its missing reward.
    """

    def outcome(sample: Sample) -> Sample:
        if sample.finish is Finish.ERROR:
            return sample
        kept = {name: part for name, part in sample.reward.parts.items() if name in ("turns", *PENALTIES)}
        value, turns = sample.outcome + sum(kept.values()), sample.reward.turns
        reward = Reward(value, sample.outcome, {"outcome": sample.outcome, **kept}, turns=turns)
        return replace(sample, reward=reward)

    return [replace(group, samples=tuple(outcome(sample) for sample in group.samples)) for group in groups]


def _indices(names: Iterable[str]) -> torch.Tensor:
    """Map each name to the index of its first appearance, int64."""
    seen: dict[str, int] = {}
    return torch.tensor([seen.setdefault(name, len(seen)) for name in names])


def masked_metrics(credited: Credited) -> dict[str, float]:
    """Return response_length/{agent}/masked: share of an agent's samples masked as truncated (loss.truncated=mask)."""
    uids: dict[str, set[str]] = {}
    for group in credited.groups:
        uids.setdefault(group.agent, set()).update(sample.uid for sample in group.samples)
    return {f"response_length/{agent}/masked": len(credited.masked & own) / len(own) for agent, own in uids.items()}


def drmas_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Return drmas/{agent}/mu, sigma and variance_inflation: the spread between agents' rewards (Dr. MAS, arXiv:2602.08847).

    mu_k and sigma_k are the mean and deviation over the calls of agent k for one prompt (rollout instance), mu and sigma those
    over the calls of all agents for that prompt. An agent's samples of a program's session are one call.

    variance_inflation: (sigma_k^2 + (mu_k - mu)^2) / sigma^2 (lemma 4.2), the factor by which one baseline for all agents would
    raise the second moment of agent k's gradient. An instance with equal rewards has no gradient under either baseline, and is
    left out.

    All three are averaged over the instances, weighted by the agent's number of calls. Each instance must be complete: from one
    agent's calls alone the factor would be 1.
    """
    instances: dict[str, dict[str, list[float]]] = {}
    for group in groups:
        sessions = [sample.session_id for sample in group.samples]
        means = _means_by(sessions, [sample.reward.value for sample in group.samples])
        instances.setdefault(group.rollout_id, {}).setdefault(group.agent, []).extend(means.values())
    weighted: dict[str, list[tuple[int, float]]] = {}  # (calls, value) of each instance
    for calls in instances.values():
        everything = torch.tensor([r for rewards in calls.values() for r in rewards], dtype=torch.float64)
        has_spread = len(set(everything.tolist())) > 1
        for agent, rewards in calls.items():
            if not rewards:
                continue
            own = torch.tensor(rewards, dtype=torch.float64)
            mean, variance = own.mean(), own.var(correction=0)
            values = {"mu": mean, "sigma": variance.sqrt()}
            if has_spread:
                inflated = variance + (mean - everything.mean()) ** 2
                values["variance_inflation"] = inflated / everything.var(correction=0)
            for name, value in values.items():
                weighted.setdefault(f"drmas/{agent}/{name}", []).append((len(rewards), value.item()))
    return {
        name: math.fsum(n * value for n, value in each) / sum(n for n, _ in each)
        for name, each in sorted(weighted.items())
    }
