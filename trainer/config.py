"""The settings of a run. Import-light: what steers the rollout lives in marsrl.rollout.config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from marsrl.rollout.config import AgentConfig, EvaluateConfig, RolloutConfig, Settings

OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads the word off as false; `mpt.scope=off` means the word."""


class RunSection(Settings):
    name: str | None = Field(None, description="directory under `dir`; default: preset and UTC time, never a collision")
    dir: str = Field("runs", description="where run directories go")
    steps: int = Field(32, gt=0, description="policy updates")
    seed: int = Field(0, ge=0, description="every generator of the run derives from it")
    resume: Annotated[Literal["off", "auto"], OFF] = Field(
        "off", description="auto: go on from the last whole checkpoint of run.name"
    )
    evaluate: bool = Field(True, description="evaluate before and after")
    eval_every: int = Field(0, ge=0, description="steps between evaluations on the way; 0 = none")
    checkpoint_every: int = Field(0, ge=0, description="steps between checkpoints; 0 = only the last")
    keep_checkpoints: int = Field(2, gt=0, description="how many checkpoints stay")
    wandb: str | None = Field(None, description="wandb project; default: no wandb, no network")


class DataConfig(Settings):
    train: str | None = Field(
        None, description="jsonl, parquet or HF dataset directory; null: the task generates problems"
    )
    eval: str | None = None
    question_key: str | None = Field(
        None, description="default: found from the first line (question, query, problem, prompt)"
    )
    answer_key: str | None = Field(None, description="default: found from the first line (answer, ans_box, label, ...)")
    on_bad_line: Literal["error", "skip"] = "error"


class LayoutConfig(Settings):
    """How a policy is cut over ranks (Megatron's sizes)."""

    tensor: int = Field(1, gt=0)
    expert: int = Field(1, gt=0)
    expert_tensor: int | None = Field(None, gt=0, description="default: `tensor` for expert 1, else 1")
    pipeline: int = Field(1, gt=0)
    context: int = Field(1, gt=0)


class OptimizerConfig(Settings):
    """AdamW. The paper: 1e-6 constant."""

    lr: float = Field(1e-6, ge=0)
    warmup_steps: int = Field(0, ge=0, description="linear from lr / warmup_steps")
    decay: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_ratio: float = Field(0.0, ge=0, le=1, description="learning rate of the last step over `lr`, for a decay")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0, description="global gradient norm")
    offload: bool = Field(False, description="optimizer state in CPU memory (GPU only)")


class PolicyConfig(Settings):
    model: str | None = Field(None, description="HF directory (Qwen2.5, Qwen3, Qwen3-MoE); null: the warm-started one")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    layout: LayoutConfig = LayoutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    recompute: Literal["none", "selective", "full"] = "none"
    router_aux_loss: float = Field(0.0, ge=0, description="coefficient of the MoE load-balancing loss")


class CreditConfig(Settings):
    normalise: Literal["group", "agent", "global", "agent_mean", "agent_std"] = "group"
    std: Literal["biased", "unbiased"] = "biased"
    singleton: Literal["zero", "raw"] = "zero"
    reward_scheme: Literal["agentic", "outcome"] = "agentic"
    train_agents: Literal["all"] | tuple[str, ...] = "all"
    count_zero_groups: bool = Field(True, description="tokens of groups without spread count in the denominator")


class LossConfig(Settings):
    """Token-level clipped surrogate; see kernels.PolicyObjective."""

    old_policy: Literal["pois", "sais", "recompute"] = "pois"
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    ratio: Literal["token", "sequence"] = "token"
    kind: Literal["clip", "cispo"] = "clip"
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    correction_low: float = Field(0.5, ge=0)
    correction_high: float = Field(2.0, gt=0)
    entropy_coef: float = 0.0


class MptConfig(Settings):
    """Dynamic masking of well-mastered positive tokens (UloRL)."""

    scope: Annotated[Literal["sample", "batch", "off"], OFF] = "sample"
    probability: float = Field(0.99, gt=0, le=1)
    entropy: float = Field(0.2, gt=0, description="nats; a sample below it masks its mastered tokens")


class TrainerConfig(Settings):
    max_tokens_per_micro_batch: int = Field(16384, gt=0)
    max_bad_steps: int = Field(
        3, gt=0, description="consecutive steps with a non-finite loss or gradient before the run stops"
    )
    threads: int | None = Field(None, gt=0, description="CPU threads of the trainer; default: torch's")


class SyncConfig(Settings):
    backend: Literal["shm"] = "shm"
    verify_every: int = Field(
        1, gt=0, description="versions between probe comparisons; checksums are compared every time"
    )
    tolerance: float = Field(
        1e-4, gt=0, description="largest log-prob difference on the probe, nats (float32); bfloat16 needs more"
    )


class WarmStartConfig(Settings):
    """Supervised traces that turn random weights into a mediocre team (the built-in arithmetic task only)."""

    lr: float = Field(3e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.01, ge=0)
    router_aux_loss: float = Field(0.01, ge=0)
    warmup_steps: int = Field(50, ge=0)
    solver_batch: int = Field(32, gt=0, description="problems a step in phase 1 (Solver alone)")
    solver_loss: float = Field(0.10, gt=0, description="phase 1 ends when the averaged loss is below it")
    max_solver_steps: int = Field(900, gt=0)
    team_batch: int = Field(16, gt=0, description="problems a step in phase 2 (all roles)")
    team_steps: int = Field(280, gt=0)
    verdict_weight: float = Field(6.0, gt=0, description="loss weight of verdict tokens")
    equality_drills: int = Field(64, ge=0, description="`are these digits equal` drills a step")
    table_drills: int = Field(256, ge=0, description="single operations a step in phase 1")
    short_steps: int = Field(120, ge=0, description="first steps of phase 1, on short problems")
    slip_solver_phase1: float = Field(0.03, ge=0, le=1)
    slip_solver: float = Field(0.10, ge=0, le=1)
    slip_verifier: float = Field(0.10, ge=0, le=1)
    slip_corrector: float = Field(0.12, ge=0, le=1)
    anchor: float = Field(0.2, ge=0, le=1, description="share of reports that take the claim as their own result")
    restate: float = Field(0.4, ge=0, le=1, description="share of corrections that rebut whatever the report says")
    hard_claims: float = Field(0.5, ge=0, le=1, description="share of the Verifier's inputs that are full of slips")
    slip_hard: float = Field(0.4, ge=0, le=1, description="slips a line in those")
    gate_solver: tuple[float, float] = (0.40, 0.65)
    gate_verifier: tuple[float, float] = (0.57, 0.70)


class RunConfig(Settings):
    run: RunSection = RunSection()
    task: str = Field("arithmetic", description="arithmetic | math")
    task_options: dict[str, int | float | str | bool | None] = Field(
        default_factory=dict, description="options of the task"
    )
    data: DataConfig = DataConfig()
    policies: dict[str, PolicyConfig] = Field(default_factory=lambda: {"main": PolicyConfig()})
    agents: dict[str, AgentConfig] = Field(default_factory=dict, description="default: the orchestration's agents")
    orchestration: str = Field("verifier_corrector", description="verifier_corrector")
    rollout: RolloutConfig = RolloutConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    credit: CreditConfig = CreditConfig()
    loss: LossConfig = LossConfig()
    mpt: MptConfig = MptConfig()
    trainer: TrainerConfig = TrainerConfig()
    sync: SyncConfig = SyncConfig()
    warm_start: WarmStartConfig = WarmStartConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        trained = [n for n in self.agents if self.credit.train_agents == "all" or n in self.credit.train_agents]
        for name, agent in self.agents.items():
            if agent.policy not in self.policies:
                raise ValueError(
                    f"agents.{name}.policy is {agent.policy!r}, which is not under `policies` ({', '.join(self.policies)})"
                )
            if name in trained and (agent.top_p != 1 or agent.top_k != -1):
                raise ValueError(
                    f"agents.{name}: trained agents need top_p 1 and top_k -1 (found {agent.top_p}, {agent.top_k}): the "
                    "trainer's log-probs are of the untruncated distribution; set them, or leave the agent out of "
                    "credit.train_agents"
                )
        if self.credit.train_agents != "all":
            for name in self.credit.train_agents:
                if self.agents and name not in self.agents:
                    raise ValueError(f"credit.train_agents names {name!r}; the agents are {', '.join(self.agents)}")
        whole = self.credit.normalise != "group" or self.credit.reward_scheme == "outcome"
        if whole and self.rollout.pipeline != "trajectory":
            raise ValueError(
                f"credit.normalise={self.credit.normalise}, credit.reward_scheme={self.credit.reward_scheme} need every call "
                "of a rollout instance in one step: set rollout.pipeline=trajectory"
            )
        return self
