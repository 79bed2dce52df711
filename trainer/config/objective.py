"""Training objective: credit, loss, and the mask of well-mastered positive tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from marsrl.rollout.config import AgentConfig, Settings, Share, Tokens
from marsrl.rollout.orchestrations.registry import find_orchestration
from marsrl.trainer.config.sections import OFF

ONE_NAME = BeforeValidator(lambda value: (value,) if isinstance(value, str) and value != "all" else value)
"""`credit.train_agents=solver` means [solver]."""


class CreditConfig(Settings):
    """Conversion of a sample's reward to its advantage (docs/credit.md)."""

    normalise: Literal["group", "agent", "trajectory", "global", "agent_mean", "agent_std", "step"] = "group"
    """samples whose mean and standard deviation normalise a reward. group: the sample's group; agent: the agent's calls for the
    problem (Dr. MAS); global: all agents' calls for the problem; agent_mean: the mean as in agent, the deviation as in global;
    agent_std: the mean as in global, the deviation as in agent; trajectory: the episode's mean reward is compared with the
    problem's other episodes (the GRPO baseline of Dr. MAS); step: the agent's samples for all problems of the step. Samples of
    all policies and of untrained agents count; the samples of an agent in one session (orchestration=external) count as one"""
    std: Literal["biased", "unbiased", "none"] = "biased"
    """standard deviation that divides every advantage: over n rewards (biased) or n - 1 (unbiased). none: no division, and each
    reward is compared with the mean of the others (RLOO), which gives Dr. GRPO's advantages times n / (n - 1)"""
    turns: Literal["sample", "returns"] = "sample"
    """advantages of a sample's turns. sample: all turns share one; returns: each turn has its own: the sum of its reward and the
    later ones, compared with the same turn of other samples or sessions (needs std=none; docs/credit.md)"""
    singleton: Literal["zero", "raw"] = "zero"
    """advantage of a sample without others to compare with: zero (it has no gradient) or raw (its reward)"""
    reward_scheme: Literal["agentic", "outcome"] = "agentic"
    """agentic: each sample keeps its own reward; outcome: a sample's reward is the mean correctness of the final samples that
    descend from it"""
    train_agents: Annotated[Literal["all"] | tuple[str, ...], ONE_NAME] = "all"
    """agents to train; the others still generate, get rewards and count in the statistics (to play only a Solver, set
    orchestration=solver)"""
    count_zero_groups: bool = Field(True, description="count samples of groups with equal rewards in the denominator")
    balance: Annotated[Literal["off", "uniform"], OFF] = "off"
    """uniform: train exactly rollout.group_size samples of each agent for a problem: a random choice if there are more, with
    repetition if there are fewer. Advantages are computed before that, from all samples (MARS)"""
    denominator: Literal["all", "agent"] = "all"
    """tokens (or samples) that divide the loss. all: the tokens of all trained agents; agent: each agent's loss is divided by
    that agent's tokens, and these means are added"""

    @model_validator(mode="after")
    def _std_has_a_set(self) -> CreditConfig:
        if self.std == "none" and self.normalise in ("agent_mean", "agent_std"):
            same = "agent" if self.normalise == "agent_mean" else "global"
            raise ValueError(
                f"credit.normalise={self.normalise} takes mean and std over different samples, but credit.std=none divides by "
                f"no std; set credit.normalise={same}, which has the same mean, or credit.std=biased"
            )
        if self.turns == "returns" and (self.std != "none" or self.normalise not in ("group", "agent")):
            raise ValueError(
                f"credit.turns=returns needs credit.std=none and credit.normalise=group or agent, found std={self.std} and "
                f"normalise={self.normalise}; set these, or credit.turns=sample"
            )
        return self

    def trains(self, agent: str) -> bool:
        return self.train_agents == "all" or agent in self.train_agents

    def why_not(
        self, agents: Collection[str], orchestration: str, *, aggregation: str, has_whole_instances: bool
    ) -> Iterator[str]:
        """Yield why the samples of this team cannot be compared, balanced or trained as set.

        aggregation: loss.aggregation. has_whole_instances: a step trains all samples for a problem (RunConfig).
        """
        if self.turns == "returns" and aggregation == "sequence":
            yield (
                "loss.aggregation=sequence weighs a turn by the length of the sample's other turns, which biases "
                "credit.turns=returns; set loss.aggregation=token or sequence_sum_constant, or credit.turns=sample"
            )
        if self.balance == "uniform" and not has_whole_instances:
            yield (
                "credit.balance=uniform needs all samples for a problem in one step; set rollout.pipeline=trajectory, or "
                "credit.normalise=agent"
            )
        if self.normalise == "trajectory" and find_orchestration(orchestration).is_one_episode:
            yield (
                f"credit.normalise=trajectory compares episodes, but orchestration={orchestration} plays one per problem; "
                "set credit.normalise=group or global"
            )
        if not self.train_agents:
            yield "credit.train_agents is empty; expected at least one agent: name agents, or set all"
        for name in self.train_agents if self.train_agents != "all" else ():
            if name not in agents:
                yield f"credit.train_agents names {name!r}; the agents are {', '.join(agents)}"


class LossConfig(Settings):
    """Clipped surrogate per token, and its average over tokens (docs/credit.md)."""

    aggregation: Literal["token", "sequence", "sequence_sum_constant"] = "token"
    """token: mean over all tokens (DAPO); sequence: mean of per-sample means (GRPO; MarsRL, equation 2), in which n samples of
    one agent and session weigh 1/n each; sequence_sum_constant: mean of per-sample sums divided by rollout.max_response_tokens
    (as in Dr. GRPO, which also needs credit.std=none)"""
    old_policy: Literal["pois", "sais", "recompute"] = "pois"
    """source of the ratio's old log-probs. pois: the weights at the step's start; the first update needs no extra pass, as its
    ratio is 1 (UloRL); sais: the log-probs that the engine recorded for each segment; recompute: a forward pass at the step's
    start"""
    clip_low: Share = Field(
        0.2, description="no gradient where the advantage A < 0 and the ratio is below 1 - clip_low"
    )
    clip_high: float = Field(0.2, ge=0)
    """no gradient where the advantage A > 0 and the ratio is above 1 + clip_high; values above clip_low (DAPO: 0.28) keep entropy
    up"""
    dual_clip: float | None = Field(None, gt=1)
    """lower bound dual_clip x A of the surrogate where A < 0 (arXiv:1912.09729); must exceed 1 + clip_high; null: off"""
    ratio: Literal["token", "sequence"] = "token"
    """token: a ratio per token; sequence: the geometric mean over the sample (GSPO), which needs a far smaller clip range"""
    kind: Literal["clip", "cispo"] = "clip"
    """clip: PPO's clipped surrogate; cispo: A log p times the clipped, detached ratio, so every token keeps its gradient"""
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    """correction by d = p_old / p_rollout, with p_old from old_policy. tis: multiply a token's surrogate by min(d,
    correction_high); icepop: mask tokens with d out of bounds; sequence_mask: mask samples whose geometric mean of d is out of
    bounds. For engines that round differently from the trainer, and for old samples (docs/numerics.md)"""
    correction_low: float = Field(
        0.5, ge=0, description="lower bound of d in loss.correction, for icepop and sequence_mask"
    )
    correction_high: float | None = Field(None, gt=0)
    """upper bound of d in loss.correction; tis also applies it to the KL term's p / p_rollout; default: 2 (tis, sequence_mask), 5
    (icepop)"""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """estimator of KL(policy || policies.<name>.reference) from x = log p - log p_reference. k1: x; k2: x^2 / 2 (biased); k3:
    e^-x + x - 1. Each is multiplied by p / p_rollout, because older weights may have sampled the token. The choice affects the
    logged value and the loss value; the gradient is the same for all: x times p / p_rollout, in expectation the gradient of the
    KL (docs/credit.md)"""
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL term or penalty; 0: loss.kl is only logged")
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: add a KL term per token; reward: subtract a penalty from each token's advantage, after normalisation: kl_coef times
    the sum of log p_rollout - log p_reference over this and the later tokens of the sample, less a mean over other samples. No
    gradient flows through the penalty, and loss.kl is only logged. Tokens that older weights sampled bias the gradient of
    reward, but not of loss (docs/numerics.md)"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus, nats per token; unless 0, samples with advantage 0 are trained too"""
    truncated: Literal["train", "mask"] = "train"
    """samples cut at their maximum length. train: train them like any other, with reward 0; mask: they have no gradient and do
    not count in the denominator, but still count in their group's reward statistics (DAPO's overlong filtering)"""
    truncation: Literal["refuse", "renormalise"] = "refuse"
    """how to train agents with top_p below 1 or a top_k. refuse: reject the config; renormalise: take log-probs over the tokens
    that the sampler kept at each position, which the engine records"""
    max_support: Tokens = 1024
    """for truncation=renormalise: largest number of tokens that top_p keeps at a position (the likeliest ones)"""

    @model_validator(mode="after")
    def _correction_corrects(self) -> LossConfig:
        if self.old_policy == "sais" and self.correction != "none":
            raise ValueError(
                f"loss.correction={self.correction} has no effect with loss.old_policy=sais, whose ratio already corrects; "
                "set none, or loss.old_policy=pois or recompute"
            )
        return self

    @property
    def keeps_zero(self) -> bool:
        """True if samples with advantage 0 have a gradient, from the entropy or KL term."""
        return self.entropy_coef != 0 or self.kl_coef != 0

    @property
    def upper_bound(self) -> float:
        """Upper bound of d: correction_high, or its default."""
        return self.correction_high or (5.0 if self.correction == "icepop" else 2.0)

    def why_not(self, agents: Mapping[str, AgentConfig]) -> Iterator[str]:
        """Yield settings of the loss that contradict each other or the agents' clip ranges."""
        if self.kl == "none" and self.kl_coef:
            yield f"loss.kl_coef is {self.kl_coef:g} but loss.kl is none; set loss.kl to k1, k2 or k3"
        if self.kl_in == "reward" and not self.kl_coef:
            yield "loss.kl_in is reward but loss.kl_coef is 0; set loss.kl_coef above 0, or loss.kl_in=loss"
        highest = max(self.clip_high if agent.clip_high is None else agent.clip_high for agent in agents.values())
        if self.dual_clip is not None and self.dual_clip <= 1 + highest:
            yield (
                f"loss.dual_clip is {self.dual_clip:g}, but the largest clip_high is {highest:g}; set loss.dual_clip above "
                f"{1 + highest:g}, or null"
            )
        if self.correction_low > self.upper_bound:
            yield (
                f"loss.correction_low is {self.correction_low:g}, above loss.correction_high = {self.upper_bound:g}; lower it"
            )


IGNORED_OF_LOSS = (
    ("kind", "cispo", {"dual_clip"}),
    ("correction", "none", {"correction_low", "correction_high"}),
    ("correction", "tis", {"correction_low"}),
    ("truncation", "refuse", {"max_support"}),
)
"""(key of `loss`, value, keys of `loss` that have no effect with this value)."""


class MptConfig(Settings):
    """Dynamic masking of well-mastered positive tokens (UloRL; docs/credit.md)."""

    scope: Annotated[Literal["sample", "batch", "off"], OFF] = "sample"
    """mean entropy to compare with mpt.entropy: per sample, or over the whole batch (which must fit into one micro-batch per
    rank); off: no masking"""
    probability: float = Field(0.99, gt=0, le=1)
    """tokens with at least this probability are well mastered; positive samples with a mean entropy below `entropy` mask them"""
    entropy: float = Field(0.2, gt=0)
    """mean entropy in nats below which a positive sample masks its well-mastered tokens; set it lower for a model whose entropy
    starts below it"""
    temperature: Literal["sampling", 1] = "sampling"
    """temperature of the probability and the entropy: the agent's sampling temperature, as in the loss, or 1"""
    success: float = Field(1.0, gt=0, le=1)
    """smallest reward (by credit.reward_scheme, before penalties) of a positive sample; its advantage must also be above 0"""

    def why_not(self, trained: Mapping[str, AgentConfig]) -> Iterator[str]:
        """Yield why the trained agents cannot share one gate for the batch."""
        clips = {name: (agent.clip_low, agent.clip_high) for name, agent in trained.items()}
        if self.scope == "batch" and len(set(clips.values())) > 1:
            name = next(name for name, clip in clips.items() if clip != (None, None))
            yield (
                f"agents.{name}.clip_low and agents.{name}.clip_high are {clips[name][0]} and {clips[name][1]}, but "
                "mpt.scope=batch needs one clip range; set mpt.scope=sample or off, or the same range for every trained agent"
            )
