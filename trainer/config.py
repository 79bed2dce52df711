"""The settings of a run. Import-light: what steers the rollout lives in marsrl.rollout.config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from marsrl.rollout.config import (
    LONGEST_S,
    MOST,
    MOST_MIB,
    MOST_RANKS,
    MOST_TOKENS,
    SILENCE_S,
    AgentConfig,
    EvaluateConfig,
    OpenAIOptions,
    RolloutConfig,
    Settings,
    VllmOptions,
)
from marsrl.rollout.orchestrations.registry import find_orchestration, read_options
from marsrl.rollout.rewards.config import JudgeConfig
from marsrl.rollout.tasks.config import DualSystemSlips, SearchSlips, TrainFile, read_train_files
from marsrl.rollout.tools.config import ToolsConfig
from marsrl.trainer.curate.config import CurateConfig

OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads the word off as false; `mpt.scope=off` means the word."""

ONE_NAME = BeforeValidator(lambda value: (value,) if isinstance(value, str) and value != "all" else value)
"""`credit.train_agents=solver` means [solver]."""

MOST_SEED = 2**31 - 1  # Megatron adds to it, and NumPy's generators take 32 bits


class RunSection(Settings):
    name: str | None = Field(None, description="directory under `dir`; default: preset and UTC time, never a collision")
    dir: str = Field("runs", description="where run directories go")
    steps: int = Field(32, gt=0, le=MOST, description="policy updates")
    seed: int = Field(0, ge=0, le=MOST_SEED, description="every generator of the run derives from it")
    resume: Annotated[Literal["off", "auto", "previous"], OFF] = Field(
        "off",
        description="auto: go on from the latest checkpoint of run.name, stop if it is damaged; previous: go back to the "
        "newest whole one then",
    )
    evaluate: bool = Field(True, description="evaluate before and after")
    eval_every: int = Field(0, ge=0, le=MOST, description="steps between evaluations on the way; 0 = none")
    checkpoint_every: int = Field(0, ge=0, le=MOST, description="steps between checkpoints; 0 = only the last")
    keep_checkpoints: int = Field(2, gt=0, le=MOST, description="how many of the last checkpoints stay")
    keep_every: int = Field(0, ge=0, le=MOST, description="checkpoints of steps divisible by it stay too; 0 = none")
    async_checkpoint: bool = Field(
        False, description="write checkpoints beside training, from copies in CPU memory (weights and optimizer state)"
    )
    silence_s: float = Field(
        SILENCE_S,
        gt=0,
        le=LONGEST_S,
        description="a rank or an engine whose process says nothing for so long is lost: the run ends, an engine is replaced",
    )
    wandb: str | None = Field(None, description="wandb project; default: no wandb, no network")


class DataConfig(Settings):
    train: Annotated[str | tuple[TrainFile, ...] | None, BeforeValidator(read_train_files)] = Field(
        None,
        description="jsonl, parquet or HF dataset directory, or a list of {path, count}, or of {path, weight} (docs/data.md); "
        "null: the task generates problems",
    )
    eval: str | None = None
    question_key: str | None = Field(
        None, description="default: found from the first line (question, query, problem, prompt)"
    )
    answer_key: str | None = Field(
        None, description="default: found from the first line (answer, final_answer, ans_box, label, ...)"
    )
    on_bad_line: Literal["error", "skip"] = "error"


class LayoutConfig(Settings):
    """How a policy is cut over ranks (Megatron's sizes)."""

    tensor: int = Field(1, gt=0, le=MOST_RANKS)
    expert: int = Field(1, gt=0, le=MOST_RANKS)
    expert_tensor: int | None = Field(None, gt=0, le=MOST_RANKS, description="default: `tensor` for expert 1, else 1")
    pipeline: int = Field(1, gt=0, le=MOST_RANKS)
    context: int = Field(1, gt=0, le=MOST_RANKS)


class OptimizerConfig(Settings):
    """AdamW. The paper: 1e-6 constant."""

    lr: float = Field(1e-6, ge=0)
    warmup_steps: int = Field(0, ge=0, le=MOST, description="linear from lr / warmup_steps")
    decay: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_ratio: float = Field(0.0, ge=0, le=1, description="learning rate of the last step over `lr`, for a decay")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0, description="global gradient norm")
    offload: bool = Field(False, description="optimizer state in CPU memory (GPU only)")
    distributed: bool = Field(True, description="state cut over data-parallel ranks; false: a whole copy on each")
    overlap_grad_reduce: bool = Field(False, description="gradients are reduced while the backward still runs")
    overlap_param_gather: bool = Field(False, description="updated weights are gathered as the next forward needs them")

    @model_validator(mode="after")
    def _parts_agree(self) -> OptimizerConfig:
        if self.offload and not self.distributed:
            raise ValueError(
                "optimizer.offload needs optimizer.distributed (Megatron's precision-aware optimizer); set distributed=true, or "
                "leave offload out"
            )
        if self.overlap_param_gather and not (self.distributed and self.overlap_grad_reduce):
            raise ValueError(
                f"optimizer.overlap_param_gather needs optimizer.distributed (found {self.distributed}) and "
                f"optimizer.overlap_grad_reduce (found {self.overlap_grad_reduce}); set both, or leave it off"
            )
        return self


class PriceConfig(Settings):
    """Of a million tokens, in any one currency."""

    input: float = Field(ge=0, description="prompt tokens")
    cached_input: float | None = Field(
        None, ge=0, description="prompt tokens from the engine's cache; default: as input"
    )
    output: float = Field(ge=0, description="decoded tokens")

    def of(self, input_tokens: float, cached_tokens: float, output_tokens: float) -> float:
        """What so many cost; cached_tokens are among input_tokens."""
        cached = self.input if self.cached_input is None else self.cached_input
        whole = (input_tokens - cached_tokens) * self.input + cached_tokens * cached + output_tokens * self.output
        return whole / 1e6


class PolicyConfig(Settings):
    model: str | None = Field(None, description="HF directory (Qwen2.5, Qwen3, Qwen3-MoE); null: the warm-started one")
    shape: Literal["tiny", "cpu_default"] | None = Field(
        None, description="size of the warm-started one, as `marsrl init` names it; default: cpu_default"
    )
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    layout: LayoutConfig = LayoutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    recompute: Literal["none", "selective", "full"] = "none"
    layers: Literal["auto", "transformer_engine", "ours"] = Field(
        "auto",
        description="norms and linear layers; auto: TransformerEngine's where it is installed with a GPU, else ours",
    )
    router_aux_loss: float = Field(0.0, ge=0, description="coefficient of the MoE load-balancing loss")
    reference: str = Field(
        "none",
        description="frozen weights of loss.kl on the same ranks: none | start (those that training starts from) | HF directory",
    )
    engines: int | None = Field(
        None, gt=0, le=MOST_RANKS, description="engine replicas of this policy; default: rollout.engines"
    )
    vllm: VllmOptions | None = Field(None, description="of this policy's engines; what it leaves out is rollout.vllm's")
    price: PriceConfig | None = Field(
        None, description="of a million tokens: what agents spend is logged (cost/<agent>/spent) and evaluated"
    )
    frozen: bool = Field(False, description="never trained: no learner, no weight sync; its engines keep `model`")
    engine: Literal["openai"] | None = Field(
        None,
        description="openai: a server answers (frozen policies only), `model` gives the tokenizer; default: rollout.engine",
    )
    openai: OpenAIOptions | None = Field(None, description="the server of engine: openai")


class CreditConfig(Settings):
    normalise: Literal["group", "agent", "global", "agent_mean", "agent_std"] = Field(
        "group",
        description="what a reward is compared with: its group, its agent's calls for the problem (Dr. MAS), all agents' calls "
        "(global), or mean and std of one each; over all policies, agents that are not trained included",
    )
    std: Literal["biased", "unbiased"] = "biased"
    singleton: Literal["zero", "raw"] = "zero"
    reward_scheme: Literal["agentic", "outcome"] = Field(
        "agentic", description="outcome: each sample's reward is the mean correctness of the last samples below it"
    )
    train_agents: Annotated[Literal["all"] | tuple[str, ...], ONE_NAME] = Field(
        "all",
        description="agents that have a gradient; the others play, are judged and are compared with all the same (a Solver "
        "that plays alone: orchestration=solver)",
    )
    count_zero_groups: bool = Field(True, description="samples of groups without spread count in the denominator")
    balance: Annotated[Literal["off", "uniform"], OFF] = Field(
        "off",
        description="uniform: of each agent's samples for a problem as many are trained as rollout.group_size has, drawn from "
        "more, or fewer repeated, after their advantages (MARS)",
    )
    denominator: Literal["all", "agent"] = Field(
        "all",
        description="whose tokens (or samples) divide a token's loss: all trained agents', or its own agent's, the agents' "
        "means then added up",
    )

    def trains(self, agent: str) -> bool:
        """Do the agent's samples have a gradient?"""
        return self.train_agents == "all" or agent in self.train_agents


class LossConfig(Settings):
    """Clipped surrogate of a token (kernels.PolicyObjective), and how tokens are averaged (mini_batches.Average)."""

    aggregation: Literal["token", "sequence", "sequence_sum_constant"] = Field(
        "token",
        description="token: mean over all tokens (DAPO); sequence: each sample's mean first (GRPO, MarsRL's equation 2); "
        "sequence_sum_constant: each sample's sum over rollout.max_response_tokens (Dr. GRPO)",
    )
    old_policy: Literal["pois", "sais", "recompute"] = "pois"
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    ratio: Literal["token", "sequence"] = "token"
    kind: Literal["clip", "cispo"] = "clip"
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    correction_low: float = Field(0.5, ge=0, description="icepop and sequence_mask; of p_trainer / p_rollout")
    correction_high: float | None = Field(None, gt=0, description="default: 2 (tis, sequence_mask), 5 (icepop)")
    kl: Literal["none", "k1", "k2", "k3"] = Field(
        "none", description="estimate of KL(policy || policies.<name>.reference)"
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL term; 0 with an estimate: it is logged only")
    entropy_coef: float = 0.0
    truncation: Literal["refuse", "renormalise"] = Field(
        "refuse",
        description="trained agents with top_p below 1 or a top_k; renormalise: every log-prob is of the softmax over the tokens "
        "that the sampler kept at that place, which the engine records",
    )
    max_support: int = Field(
        1024,
        gt=0,
        le=MOST_TOKENS,
        description="renormalise: top_p of a trained agent keeps so many tokens at a place at most, the likeliest",
    )

    @model_validator(mode="after")
    def _correction_corrects(self) -> LossConfig:
        if self.old_policy == "sais" and self.correction != "none":
            raise ValueError(
                f"loss.correction={self.correction} changes nothing with loss.old_policy=sais, whose ratio is to the "
                "rollout's own log-probs already: set loss.correction=none, or loss.old_policy=pois or recompute"
            )
        return self

    @property
    def upper_bound(self) -> float:
        """correction_high, or its default."""
        return self.correction_high or (5.0 if self.correction == "icepop" else 2.0)


class MptConfig(Settings):
    """Dynamic masking of well-mastered positive tokens (UloRL)."""

    scope: Annotated[Literal["sample", "batch", "off"], OFF] = "sample"
    probability: float = Field(0.99, gt=0, le=1)
    entropy: float = Field(0.2, gt=0, description="nats; a sample below it masks its mastered tokens")
    temperature: Literal["sampling", 1] = Field(
        "sampling",
        description="at which p and the entropy are taken: the agent's sampling temperature, as the loss, or 1, the model's own",
    )
    success: float = Field(
        1.0,
        gt=0,
        le=1,
        description="a sample is positive whose reward (credit.reward_scheme's, before penalties) is at least this and whose "
        "advantage is above 0",
    )


class TrainerConfig(Settings):
    max_tokens_per_micro_batch: int = Field(16384, gt=0, le=MOST_TOKENS)
    updates_per_step: int = Field(
        1, gt=0, le=MOST, description="optimizer steps a step, each on its part of the step's groups"
    )
    router_replay: Literal["none", "recompute", "rollout"] = Field(
        "none",
        description="experts forced in training: those of a forward pass under the step's starting weights (recompute, R2), "
        "or those of decoding (rollout, R3; rollout.engine=local records them)",
    )
    max_bad_steps: int = Field(
        3, gt=0, le=MOST, description="consecutive steps with a non-finite loss or gradient before the run stops"
    )
    max_empty_steps: int = Field(
        20,
        gt=0,
        le=MOST,
        description="consecutive steps with samples of which none has a gradient before the run stops",
    )
    agent_grad_norm_every: int = Field(
        0,
        ge=0,
        le=MOST,
        description="steps between measurements of the gradient norm of each agent's share, a forward and backward pass an "
        "agent; 0 = none",
    )
    threads: int | None = Field(None, gt=0, le=MOST_RANKS, description="CPU threads of the trainer; default: torch's")


SyncBackend = Literal["auto", "shm", "nccl", "ipc"]


class SyncConfig(Settings):
    backend: SyncBackend = Field(
        "auto",
        description="shm: files that every engine reads; nccl: each rank's shards straight to the engines' GPUs; ipc: the "
        "same between processes on one GPU; auto: ipc for rollout.placement=colocated, nccl for engines on GPUs of their own, "
        "shm without GPUs or where sync.directory is set",
    )
    cpu_twin: bool = Field(
        False, description="without CUDA: nccl over gloo, ipc over a file in /dev/shm (to try the path, not to be fast)"
    )
    bucket_mib: int = Field(
        256, gt=0, le=MOST_MIB, description="nccl, ipc: what travels at once, MiB; each side holds one such buffer"
    )
    host: str | None = Field(
        None,
        description="address of trainer rank 0 as the hosts of engines reach it, for nccl, ipc and rollout.ray_address=here; "
        "default: found by the way to the Ray cluster, MASTER_ADDR or the default route",
    )
    timeout_s: float = Field(
        600.0, gt=0, le=LONGEST_S, description="nccl, ipc: a side that does not answer for so long is an error"
    )
    directory: str | None = Field(
        None,
        description="shm: where the weights of a version are written for the engines, a folder that all their hosts see; "
        "default: /dev/shm of rank 0's host",
    )
    verify_every: int = Field(
        1, gt=0, le=MOST, description="versions between probe comparisons; checksums are compared every time"
    )


class SearchTeamLessons(SearchSlips):
    """What the search team is taught about linked facts."""

    drills: int = Field(4, ge=0, le=MOST, description="documents and questions about them, a step in phase 2")
    gate: tuple[float, float] = (0.35, 0.65)


class DualSystemLessons(DualSystemSlips):
    """What System 2 and System 1 are taught about linked facts and calculations."""

    drills: int = Field(4, ge=0, le=MOST, description="documents and questions about them, a step in phase 2")
    gate: tuple[float, float] = (0.35, 0.65)


class WarmStartConfig(Settings):
    """Supervised traces that turn random weights into a mediocre team (trainer/schools).

    The keys of phase 1 are called after the Solver, and those of phase 2 after the Verifier, whichever roles a team's are.
    """

    lr: float = Field(3e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.01, ge=0)
    router_aux_loss: float = Field(0.01, ge=0)
    warmup_steps: int = Field(50, ge=0, le=MOST)
    solver_batch: int = Field(
        32, gt=0, le=MOST, description="problems (search team: drills) a step in phase 1 (one role alone)"
    )
    solver_loss: float = Field(0.10, gt=0, description="phase 1 ends when the averaged loss is below it")
    max_solver_steps: int = Field(900, gt=0, le=MOST)
    team_batch: int = Field(16, gt=0, le=MOST, description="problems a step in phase 2 (all roles)")
    verifier_loss: float = Field(
        0.17, gt=0, description="the learning rate falls from when the averaged loss is below it"
    )
    max_team_steps: int = Field(400, gt=0, le=MOST, description="of phase 2 at the full learning rate")
    decay_steps: int = Field(170, ge=0, le=MOST, description="then, the learning rate falling to a tenth")
    verdict_weight: float = Field(6.0, gt=0, description="loss weight of verdict tokens")
    equality_drills: int = Field(64, ge=0, le=MOST, description="`are these digits equal` drills a step")
    table_drills: int = Field(256, ge=0, le=MOST, description="single operations a step in phase 1")
    short_steps: int = Field(120, ge=0, le=MOST, description="first steps of phase 1, on short problems")
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
    search_team: SearchTeamLessons = SearchTeamLessons()
    dual_system: DualSystemLessons = DualSystemLessons()


class RunConfig(Settings):
    preset: Literal["none"] = Field(
        "none",
        description="in a file or word: the shipped preset that it inherits beside the task's, or none; here, where all is "
        "resolved: none",
    )
    run: RunSection = RunSection()
    task: str = Field(
        "arithmetic",
        description="arithmetic; math: problems of data.train; qa: questions; or your own, FILE.py:CLASS (docs/own_task.md)",
    )
    task_options: dict[str, int | float | str | bool | None] = Field(
        default_factory=dict, description="math and your own: workers (2), timeout_s (10), max_answer_chars (2000)"
    )
    data: DataConfig = DataConfig()
    policies: dict[str, PolicyConfig] = Field(default_factory=lambda: {"main": PolicyConfig()})
    orchestration: str = Field(
        "verifier_corrector",
        description="verifier_corrector: Solver, Verifier, Corrector, Verifier, Corrector (MarsRL); solver: a Solver alone, "
        "plain RL; solver_verifier: in turn (Dr. MAS); search_team: Verifier, Search and Answer agent over a search tool "
        "(Dr. MAS; docs/search.md); debate; or your own, FILE.py:CLASS (docs/own_team.md)",
    )
    orchestration_options: dict[str, int | float | str | bool | None] = Field(
        default_factory=dict,
        validate_default=True,
        description="solver_verifier: max_loops (2); search_team: max_turns (4); debate: debaters (3), rounds (2)",
    )
    agents: dict[str, AgentConfig] = Field(
        default_factory=dict,
        validate_default=True,
        description="the orchestration's agents; defaults for those not given",
    )
    tools: ToolsConfig = Field(ToolsConfig(), description="what the orchestration's agents can call")
    judge: JudgeConfig | None = Field(
        None,
        description="a frozen policy that judges answers in place of the task (docs/judge.md); null: the task judges",
    )
    rollout: RolloutConfig = RolloutConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    curate: CurateConfig = Field(CurateConfig(), description="marsrl curate: which problems are worth training on")
    credit: CreditConfig = CreditConfig()
    loss: LossConfig = LossConfig()
    mpt: MptConfig = MptConfig()
    trainer: TrainerConfig = TrainerConfig()
    sync: SyncConfig = SyncConfig()
    warm_start: WarmStartConfig = WarmStartConfig()

    @property
    def trains_whole(self) -> bool:
        """Are all samples of a rollout instance trained in one step, because their credit is computed over all of them?"""
        return self.credit.normalise != "group" or self.credit.reward_scheme == "outcome"

    @property
    def curators(self) -> dict[str, PolicyConfig]:
        """The policies that nobody but `marsrl curate` asks: judges of its stages."""
        named = {judge.policy for judge in self.curate.judges.values()}
        used = {agent.policy for agent in self.agents.values()} | ({self.judge.policy} if self.judge else set())
        return {name: policy for name, policy in self.policies.items() if name in named - used}

    def without_curators(self) -> RunConfig:
        curators = self.curators
        left = {name: policy for name, policy in self.policies.items() if name not in curators}
        return self.model_copy(update={"policies": left})

    @property
    def has_whole_instances(self) -> bool:
        """Does a step hold whole rollout instances?"""
        return self.trains_whole or self.rollout.pipeline == "trajectory"

    def rollout_of(self, policy: str) -> RolloutConfig:
        """`rollout` with the policy's own engines and vllm."""
        own = self.policies[policy]
        return self.rollout.model_copy(
            update={"engines": own.engines or self.rollout.engines, "vllm": own.vllm or self.rollout.vllm}
        )

    @property
    def max_kept(self) -> dict[str, int]:
        """Of each trained agent that leaves tokens out (top_p, top_k): how many its sampler keeps at a place, at most."""
        return {
            name: self.loss.max_support
            for name, agent in self.agents.items()
            if self.credit.trains(name) and (agent.top_p < 1 or agent.top_k > 0)
        }

    @property
    def served_rollouts(self) -> tuple[RolloutConfig, ...]:
        """Of each policy that has engines of ours."""
        return tuple(self.rollout_of(name) for name, policy in self.policies.items() if policy.openai is None)

    @property
    def trained_policies(self) -> dict[str, PolicyConfig]:
        """Those that are not frozen, at least one: every rank holds them, the engines get new weights of them."""
        return {name: policy for name, policy in self.policies.items() if not policy.frozen}

    def engine_dtype(self, policy: str) -> str:
        """What the policy's engines compute in."""
        if self.rollout.engine == "scripted":  # it computes nothing: what it reports as its dtype
            return "float32"
        asked = self.rollout_of(policy).vllm.dtype if self.rollout.engine == "vllm" else None
        return asked or self.policies[policy].dtype

    @model_validator(mode="before")
    @classmethod
    def _vllm_of_policies_is_whole(cls, given: Any) -> Any:
        """policies.<name>.vllm over rollout.vllm, key by key, so that what is saved says all of it."""
        rollout, policies = (
            (given.get(key) for key in ("rollout", "policies")) if isinstance(given, dict) else (None, None)
        )
        common = rollout.get("vllm") if isinstance(rollout, dict) else None
        if not isinstance(common, dict) or not isinstance(policies, dict):
            return given
        whole = {
            name: {**policy, "vllm": {**common, **policy["vllm"]}}
            if isinstance(policy, dict) and isinstance(policy.get("vllm"), dict)
            else policy
            for name, policy in policies.items()
        }
        return {**given, "policies": whole}

    @field_validator("agents")
    @classmethod
    def _are_the_whole_team(cls, agents: dict[str, AgentConfig], others: ValidationInfo) -> dict[str, AgentConfig]:
        if "orchestration" not in others.data:  # it is wrong itself, which is said
            return agents
        return find_orchestration(others.data["orchestration"]).whole_team(agents)

    @field_validator("orchestration_options")
    @classmethod
    def _are_the_team_s(
        cls, options: dict[str, int | float | str | bool | None], others: ValidationInfo
    ) -> dict[str, int | float | str | bool | None]:
        if "orchestration" in others.data:
            read_options(others.data["orchestration"], options)
        return options

    @model_validator(mode="after")
    def _sections_agree(self, given: ValidationInfo) -> RunConfig:
        """context {"trains": False}: nothing is trained (marsrl curate), so every policy may be frozen."""
        trains = (given.context or {}).get("trains", True)
        for name, policy in self.policies.items():
            _check_policy(f"policies.{name}", policy)
        if not self.trained_policies and trains:
            raise ValueError(
                f"policies: every one is frozen ({', '.join(self.policies)}), and nothing is left to train"
            )
        trained = [n for n in self.agents if self.credit.trains(n)]
        for name, agent in self.agents.items():
            if (agent.max_response_tokens or 0) > self.rollout.max_response_tokens:
                raise ValueError(
                    f"agents.{name}.max_response_tokens is {agent.max_response_tokens}, above rollout.max_response_tokens = "
                    f"{self.rollout.max_response_tokens}: raise that"
                )
            if agent.policy not in self.policies:
                raise ValueError(
                    f"agents.{name}.policy is {agent.policy!r}, which is not under `policies` ({', '.join(self.policies)})"
                )
            if agent.stop and self.policies[agent.policy].openai:
                raise ValueError(
                    f"agents.{name}.stop is set, and policies.{agent.policy}.openai answers: its completions come without the "
                    "text that ended them; give the agent a policy with an engine of ours, or leave stop out"
                )
            if trains and name in trained and self.policies[agent.policy].frozen:
                raise ValueError(
                    f"agents.{name} is trained, but its policy {agent.policy} is frozen"
                    f"{' and served by policies.' + agent.policy + '.openai' if self.policies[agent.policy].openai else ''}"
                    f": name the agents to train in credit.train_agents (now {_listed(self.credit.train_agents)}), "
                    f"without {name}"
                )
            if name in self.max_kept and self.loss.truncation == "refuse":
                raise ValueError(
                    f"agents.{name}.top_p and agents.{name}.top_k are {agent.top_p} and {agent.top_k}, and a trained agent "
                    "needs 1 and -1: with loss.truncation=refuse the trainer's log-probs are of the untruncated "
                    "distribution; set them, or loss.truncation=renormalise, or leave the agent out of credit.train_agents"
                )
            if name in self.max_kept and agent.top_k > self.loss.max_support:
                raise ValueError(
                    f"agents.{name}.top_k is {agent.top_k}, above loss.max_support = {self.loss.max_support}, and of a trained "
                    f"agent every token that is kept is recorded: set loss.max_support={agent.top_k}, or lower top_k"
                )
            if name in self.max_kept and self.rollout.engine == "scripted":
                raise ValueError(
                    f"agents.{name}.top_p and agents.{name}.top_k are {agent.top_p} and {agent.top_k}, and "
                    "rollout.engine=scripted draws from no distribution and cannot say what was kept of it: set "
                    "rollout.engine=local or vllm, or top_p=1 and top_k=-1"
                )
        for name in find_orchestration(self.orchestration).tools:
            if name not in self.tools.names:
                known = ", ".join(ToolsConfig.model_fields)
                raise ValueError(
                    f"orchestration={self.orchestration} calls the tool {name}, and tools.{name} is not set (there are {known}): "
                    f"set tools.{name}.kind (docs/tools.md)"
                )
        if self.judge is not None:
            self._check_judge(self.judge)
        _check_sync(self.sync, self.rollout)
        for name, policy in self.policies.items():
            if self.rollout.placement == "colocated" and policy.engines not in (None, self.rollout.engines):
                raise ValueError(
                    f"policies.{name}.engines is {policy.engines}, and rollout.placement=colocated puts one engine of every "
                    f"policy on each trainer rank's GPU, rollout.engines={self.rollout.engines}: leave it out, or set "
                    "rollout.placement=disaggregated"
                )
        clips = {name: (self.agents[name].clip_low, self.agents[name].clip_high) for name in trained}
        if self.mpt.scope == "batch" and len(set(clips.values())) > 1:
            name = next(name for name, clip in clips.items() if clip != (None, None))
            raise ValueError(
                f"agents.{name}.clip_low and agents.{name}.clip_high are {clips[name][0]} and {clips[name][1]}, and "
                "mpt.scope=batch needs all agents' samples in one micro-batch, which has one clip range: set "
                "mpt.scope=sample or off, or the same range for every trained agent"
            )
        if self.credit.balance == "uniform" and not self.has_whole_instances:
            raise ValueError(
                "credit.balance=uniform counts an agent's samples for a problem, and with rollout.pipeline=agentic and "
                "credit.normalise=group a step has parts of them: set rollout.pipeline=trajectory, or credit.normalise=agent"
            )
        if not self.credit.train_agents:
            raise ValueError(
                "credit.train_agents is empty, and nothing is left to train: name agents, or set it to all"
            )
        if self.credit.train_agents != "all":
            for name in self.credit.train_agents:
                if name not in self.agents:
                    raise ValueError(f"credit.train_agents names {name!r}; the agents are {', '.join(self.agents)}")
        if self.loss.kl == "none" and self.loss.kl_coef:
            raise ValueError(f"loss.kl_coef is {self.loss.kl_coef:g} but loss.kl is none: set loss.kl to k1, k2 or k3")
        for name, policy in self.policies.items():
            if self.loss.kl != "none" and policy.reference == "none":
                raise ValueError(
                    f"loss.kl={self.loss.kl} needs a reference, and policies.{name}.reference is none: set it to start or to "
                    "an HF directory"
                )
        if self.trainer.router_replay == "rollout" and self.rollout.engine != "local":
            reasons = {
                "vllm": "vLLM 0.32 has them (enable_return_routed_experts) in its Model Runner V2 alone, which does not run "
                "the sampler that marsrl draws tokens with and, on a CPU, needs a Triton with a CPU backend",
                "scripted": "scripted completions come from no model",
            }
            raise ValueError(
                f"trainer.router_replay=rollout needs the experts chosen in decoding, and rollout.engine="
                f"{self.rollout.engine} does not return them: {reasons[self.rollout.engine]}; set "
                "rollout.engine=local, or trainer.router_replay=recompute"
            )
        return self

    def _check_judge(self, judge: JudgeConfig) -> None:
        key = f"judge.policy is {judge.policy!r}"
        policy = self.policies.get(judge.policy)
        if policy is None:
            raise ValueError(f"{key}, which is not under `policies` ({', '.join(self.policies)})")
        if not policy.frozen:
            raise ValueError(
                f"{key}, which is trained: a judge that changes with those it judges says nothing of them; name a policy of its "
                "own, `policies.judge: {frozen: true, model: DIRECTORY}`"
            )
        if policy.openai is not None:
            return
        agents = [name for name, agent in self.agents.items() if agent.policy == judge.policy]
        if agents:
            raise ValueError(
                f"{key}, whose engines answer for agents.{agents[0]} too: the judge has engines of its own, which judge while "
                f"others decode; give it another policy of the same model, or put policies.{judge.policy} behind a server "
                "(engine: openai), which both can ask"
            )
        rollout = self.rollout
        if rollout.placement == "local" and rollout.engine == "vllm" and rollout.overlap:
            raise ValueError(
                f"{key}, and with rollout.overlap={rollout.overlap} it judges while others decode, which two vLLM engines in one "
                "process (rollout.placement=local) cannot: set rollout.placement=disaggregated, rollout.engine=local, or "
                "rollout.overlap=0"
            )


def _check_sync(sync: SyncConfig, rollout: RolloutConfig) -> None:
    if sync.backend in ("auto", "shm"):
        if sync.cpu_twin and (sync.backend == "shm" or sync.directory is not None):
            files = "sync.directory" if sync.backend == "auto" else "sync.backend=shm"
            raise ValueError(
                f"sync.cpu_twin is true, but {files} is for weights in files, which need no GPU as it is: leave one of them "
                "out, or set sync.backend=nccl or ipc"
            )
        return
    key = f"sync.backend={sync.backend}"
    if sync.directory is not None:
        raise ValueError(f"sync.directory is set, but {key} writes no files; leave one of them out")
    if sync.backend == "nccl" and rollout.placement == "colocated":
        raise ValueError(
            f"{key} with rollout.placement=colocated: NCCL refuses two processes on one GPU; set sync.backend=ipc"
        )
    if rollout.engine == "scripted":
        raise ValueError(f"{key} writes into an engine's tensors, and rollout.engine=scripted has none; leave it out")
    if rollout.placement == "local":
        raise ValueError(
            f"{key} is between processes, and with rollout.placement=local the engines live in the trainer's: set "
            "another placement, or leave it out"
        )
    if sync.backend == "ipc" and rollout.placement == "disaggregated" and not sync.cpu_twin:
        raise ValueError(
            f"{key} is between two processes on one GPU, and rollout.placement=disaggregated gives engines GPUs of their own: "
            "set sync.backend=nccl, or rollout.placement=colocated"
        )


NO_OFFLOAD_ON_CPU = (
    "optimizer.offload is true: it moves optimizer state from a GPU's memory to the host's, and PyTorch sees no CUDA device "
    "here, where the state is in host memory anyway; set false"
)


def _check_policy(key: str, policy: PolicyConfig) -> None:
    if policy.shape is not None and policy.model is not None:
        raise ValueError(
            f"{key}.shape is {policy.shape}, the size of a warm-started policy, and {key}.model is {policy.model}: set one "
            "of them to null"
        )
    if policy.optimizer.offload and policy.dtype == "float32":
        raise ValueError(
            f"{key}.optimizer.offload keeps float32 weights and moments in CPU memory beside bfloat16 weights on the GPU, and "
            f"{key}.dtype is float32; set dtype=bfloat16, or offload=false"
        )
    if (policy.engine == "openai") != (policy.openai is not None):
        raise ValueError(
            f"{key}: engine=openai and the section openai (base_url, model) go together; found engine={policy.engine} "
            f"and {'the' if policy.openai else 'no'} section"
        )
    if policy.engine == "openai" and (policy.engines is not None or policy.vllm is not None):
        raise ValueError(
            f"{key}.{'engines' if policy.engines else 'vllm'} is of engines here, and {key}.engine=openai has none"
        )
    if policy.engine == "openai" and not policy.frozen:
        raise ValueError(
            f"{key}: a policy with engine=openai cannot be trained: the server gives neither the token ids nor the "
            "log-probs of the distribution that it drew from, and takes no new weights; set frozen=true and leave its "
            "agents out of credit.train_agents"
        )
    if policy.frozen and policy.model is None:
        raise ValueError(
            f"{key}: a frozen policy needs `model`, a Hugging Face directory (with engine=openai its tokenizer and chat "
            "template are enough)"
        )


def _listed(names: str | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else ", ".join(names)
