"""Training objective: credit, loss, and the mask of well-mastered positive tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from marsrl.rollout.config import Settings, Share, Tokens
from marsrl.trainer.config.sections import OFF

ONE_NAME = BeforeValidator(lambda value: (value,) if isinstance(value, str) and value != "all" else value)
"""`credit.train_agents=solver` means [solver]."""


class CreditConfig(Settings):
    """Comparison that turns a sample's reward into its advantage (docs/credit.md)."""

    normalise: Literal["group", "agent", "trajectory", "global", "agent_mean", "agent_std"] = "group"
    """what a reward is compared with: its group, its agent's calls for the problem (Dr. MAS), all agents' calls (global), or
    mean and std of one each; trajectory: the mean reward of its episode with those of the problem's other episodes (the GRPO
    baseline of Dr. MAS). Over all policies, agents that are not trained included; an agent's samples of one session of a program
    (orchestration=external) count as one"""
    std: Literal["biased", "unbiased"] = "biased"
    """standard deviation that divides every advantage: of n rewards by n (biased), or by n - 1; to leave the division out, as Dr.
    GRPO and RLOO do, is not possible"""
    singleton: Literal["zero", "raw"] = "zero"
    """advantage of a sample with nobody to be compared with: zero, so it trains nothing; raw: its reward"""
    reward_scheme: Literal["agentic", "outcome"] = "agentic"
    """outcome: each sample's reward is the mean correctness of the last samples below it"""
    train_agents: Annotated[Literal["all"] | tuple[str, ...], ONE_NAME] = "all"
    """agents that have a gradient; the others play, are judged and are compared with all the same (a Solver that plays alone:
    orchestration=solver)"""
    count_zero_groups: bool = Field(True, description="samples of groups without spread count in the denominator")
    balance: Annotated[Literal["off", "uniform"], OFF] = "off"
    """uniform: of each agent's samples for a problem as many are trained as rollout.group_size has, drawn from more, or fewer
    repeated, after their advantages (MARS)"""
    denominator: Literal["all", "agent"] = "all"
    """whose tokens (or samples) divide a token's loss: all trained agents', or its own agent's, the agents' means then added
    up"""

    def trains(self, agent: str) -> bool:
        return self.train_agents == "all" or agent in self.train_agents


class LossConfig(Settings):
    """Clipped surrogate of a token, and how tokens are averaged (docs/credit.md)."""

    aggregation: Literal["token", "sequence", "sequence_sum_constant"] = "token"
    """token: mean over all tokens (DAPO); sequence: each sample's mean first (GRPO, MarsRL's equation 2), where an agent's n
    samples of one session of a program weigh 1/n each; sequence_sum_constant: each sample's sum over
    rollout.max_response_tokens (Dr. GRPO's constant length; its advantages, which no std divides, are not here)"""
    old_policy: Literal["pois", "sais", "recompute"] = "pois"
    """what the ratio's old log-probs are: pois: those of the weights at the step's start, without a pass of its own for its
    first update (ratio 1; UloRL); sais: those recorded at decoding, each segment's own; recompute: those of a forward pass at
    the step's start"""
    clip_low: Share = Field(0.2, description="a ratio below 1 - clip_low has no gradient where A < 0")
    clip_high: float = Field(0.2, ge=0)
    """a ratio above 1 + clip_high has no gradient where A > 0; above clip_low (DAPO: 0.28) it keeps the entropy up"""
    dual_clip: float | None = Field(None, gt=1)
    """where A < 0, the surrogate is at least dual_clip x A, however large the ratio (arXiv:1912.09729); above 1 + clip_high;
    null: off"""
    ratio: Literal["token", "sequence"] = "token"
    """each token's own, or the geometric mean of its sample's (GSPO), whose clip range is far smaller"""
    kind: Literal["clip", "cispo"] = "clip"
    """clip: PPO's clipped surrogate; cispo: the clipped ratio, held constant, times A log p: no token loses its gradient"""
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    """what d = p_old / p_rollout does, p_old being old_policy's: tis: weighs a token's surrogate by d, at most correction_high;
    icepop: masks tokens with d out of bounds; sequence_mask: masks samples whose geometric mean of d is. For engines that round
    otherwise, or old samples (docs/numerics.md)"""
    correction_low: float = Field(0.5, ge=0, description="lower bound of d for icepop and sequence_mask")
    correction_high: float | None = Field(None, gt=0)
    """upper bound of d, with tis of the KL term's p / p_rollout too; default: 2 (tis, sequence_mask), 5 (icepop)"""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """estimate of KL(policy || policies.<name>.reference) from x = log p - log p_reference, which is logged and is the value of
    the KL term: k1: x, k2: x^2 / 2 (biased), k3: e^-x + x - 1; times p / p_rollout, as older weights may have drawn the token.
    All three have the same gradient, p / p_rollout times x, which in expectation is that of KL(policy || reference)
    (docs/credit.md)"""
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL term or penalty; 0: loss.kl is logged only")
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: each token has its own KL term; reward: a token's advantage loses kl_coef times log p_rollout - log p_reference,
    summed over it and the later tokens of its sample, less a mean, after normalisation and without a gradient; loss.kl is logged
    only. Tokens of older weights bias reward, and not loss (docs/numerics.md)"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus, nats a token; other than 0, samples with an advantage of 0 are trained too"""
    truncated: Literal["train", "mask"] = "train"
    """samples that were cut at their maximum length. train: as all others, with their reward of 0; mask: no gradient, and out of
    the denominator, but their rewards stay in the statistics of their group (DAPO's overlong filtering)"""
    truncation: Literal["refuse", "renormalise"] = "refuse"
    """trained agents with top_p below 1 or a top_k; renormalise: every log-prob is of the softmax over the tokens that the
    sampler kept at that place, which the engine records"""
    max_support: Tokens = 1024
    """renormalise: top_p of a trained agent keeps so many tokens at a place at most, the likeliest"""

    @model_validator(mode="after")
    def _correction_corrects(self) -> LossConfig:
        if self.old_policy == "sais" and self.correction != "none":
            raise ValueError(
                f"loss.correction={self.correction} changes nothing with loss.old_policy=sais, whose ratio is the correction: "
                "set none, or loss.old_policy=pois or recompute"
            )
        return self

    @property
    def keeps_zero(self) -> bool:
        """True if samples with advantage 0 have a gradient too, of a term that needs none."""
        return self.entropy_coef != 0 or self.kl_coef != 0

    @property
    def upper_bound(self) -> float:
        """correction_high, or its default."""
        return self.correction_high or (5.0 if self.correction == "icepop" else 2.0)


class MptConfig(Settings):
    """Dynamic masking of well-mastered positive tokens (UloRL; docs/credit.md)."""

    scope: Annotated[Literal["sample", "batch", "off"], OFF] = "sample"
    """whose mean entropy is compared with mpt.entropy: the sample's, or the whole batch's (which must fit into one
    micro-batch a rank); off: nothing is masked"""
    probability: float = Field(0.99, gt=0, le=1)
    """tokens this likely or more are well mastered, and masked where the gate is open"""
    entropy: float = Field(0.2, gt=0)
    """nats; positive samples with a mean entropy below it mask their well-mastered tokens; lower it for a model whose entropy
    is below it from the start"""
    temperature: Literal["sampling", 1] = "sampling"
    """at which p and the entropy are taken: the agent's sampling temperature, as the loss, or 1, the model's own"""
    success: float = Field(1.0, gt=0, le=1)
    """a sample is positive whose reward (credit.reward_scheme's, before penalties) is at least this and whose advantage is
    above 0"""
