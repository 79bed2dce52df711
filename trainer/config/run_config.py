"""Settings of a whole run. Rules between sections are in agreement.py; read.py checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.config import (
    MOST_TOKENS,
    AgentConfig,
    EvaluateConfig,
    FolderName,
    OptionValue,
    RolloutConfig,
    Settings,
)
from marsrl.rollout.engines.protocol import Records
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.orchestrations.registry import find_orchestration, read_options
from marsrl.rollout.rewards.config import JudgeConfig
from marsrl.rollout.tools.config import ToolsConfig
from marsrl.trainer.config.curate import CurateConfig
from marsrl.trainer.config.objective import CreditConfig, LossConfig, MptConfig
from marsrl.trainer.config.policy import PolicyConfig, on_base
from marsrl.trainer.config.sections import (
    DataConfig,
    LeagueConfig,
    RunSection,
    SftConfig,
    SyncConfig,
    TrainerConfig,
    WarmStartConfig,
)

Asker = TypeVar("Asker", AgentConfig, JudgeConfig)


class RunConfig(Settings):
    preset: Literal["none"] = "none"
    """built-in preset to inherit from, in addition to the task's; none: inherit nothing (a resolved config always says none)"""
    run: RunSection = RunSection()
    task: str = "arithmetic"
    """arithmetic; math: problems of data.train; qa: questions to answer by search; reasoning_gym: generators and scorers of that
    library; or your own, FILE.py:CLASS (docs/own_task.md)"""
    task_options: dict[str, OptionValue] = Field(default_factory=dict)
    """options of the task. math, reasoning_gym and your own have workers (default 2), timeout_s (10) and max_answer_chars (2000);
    docs/own_task.md"""
    data: DataConfig = DataConfig()
    policies: dict[FolderName, PolicyConfig] = Field(default_factory=lambda: {"main": PolicyConfig()})
    """models with their optimizers and engines, by the name that `agents.<name>.policy` refers to; default: one, `main`"""
    orchestration: str = "verifier_corrector"
    """your own, FILE.py:CLASS (docs/own_team.md), or verifier_corrector: Solver, Verifier, Corrector, Verifier, Corrector
    (MarsRL); solver: a Solver alone, plain RL; solver_verifier: Solver and Verifier in turn (Dr. MAS); search_team: Verifier,
    Search and Answer agents over a search tool (Dr. MAS; docs/search.md); dual_system: a reasoning and a reading agent (MARS;
    docs/dual_system.md); debate: several Solvers that read each other; external: any program (docs/external.md)"""
    orchestration_options: dict[str, int | float | str | bool | None] = Field(
        default_factory=dict, validate_default=True
    )
    """options of the orchestration. solver_verifier: max_loops (default 2); search_team: max_turns (4); debate: debaters (3) and
    rounds (2); your own options: docs/own_team.md"""
    agents: dict[str, AgentConfig] = Field(default_factory=dict, validate_default=True)
    """the orchestration's agents; agents that are not listed get the defaults (docs/own_team.md)"""
    external: ExternalConfig | None = None
    """the program to run with orchestration=external (docs/external.md)"""
    tools: ToolsConfig = Field(ToolsConfig(), description="tools that the agents can call (docs/tools.md)")
    judge: JudgeConfig | None = None
    """a frozen policy that judges answers instead of the task (docs/judge.md); null: the task judges"""
    rollout: RolloutConfig = RolloutConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    league: LeagueConfig | None = None
    """past versions of a policy as its opponents in evaluations, for agents that play each other (docs/evaluate.md); null: off"""
    curate: CurateConfig = Field(
        CurateConfig(), description="marsrl curate: selection of problems to train on (docs/curate.md)"
    )
    credit: CreditConfig = CreditConfig()
    loss: LossConfig = LossConfig()
    mpt: MptConfig = MptConfig()
    trainer: TrainerConfig = TrainerConfig()
    sync: SyncConfig = SyncConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    sft: SftConfig = SftConfig()

    @property
    def trains_whole(self) -> bool:
        """True if a step must train all samples of a rollout instance together, because their advantages depend on each other."""
        team = find_orchestration(self.orchestration)
        needs_outcome = team.plays_sessions or any(spec.advises for spec in team.agents)
        return self.credit.normalise not in ("group", "step") or self.credit.reward_scheme == "outcome" or needs_outcome

    @property
    def curators(self) -> dict[str, PolicyConfig]:
        """Policies that only `marsrl curate` uses, as judges."""
        named = {judge.policy for judge in self.curate.judges.values()}
        used = {agent.policy for agent in self.agents.values()} | ({self.judge.policy} if self.judge else set())
        used |= self.teachers
        return {name: policy for name, policy in self.policies.items() if name in named - used}

    def without_curators(self) -> RunConfig:
        curators = self.curators
        policies = {name: policy for name, policy in self.policies.items() if name not in curators}
        return self.model_copy(update={"policies": policies})

    @property
    def teachers(self) -> set[str]:
        """Policies that score agents' samples (agents.<name>.teacher)."""
        return {agent.teacher.policy for agent in self.agents.values() if agent.teacher is not None}

    def without_teachers(self) -> RunConfig:
        """Return the config without teachers and league, for commands that do not train."""
        agents = {name: agent.model_copy(update={"teacher": None}) for name, agent in self.agents.items()}
        policies = {name: policy for name, policy in self.policies.items() if name not in self.teachers}
        return self.model_copy(update={"agents": agents, "policies": policies, "league": None})

    @property
    def has_whole_instances(self) -> bool:
        """True if a step trains whole rollout instances."""
        return self.trains_whole or self.rollout.pipeline == "trajectory"

    @property
    def rewarded_agents(self) -> tuple[str, ...]:
        """Agents that are trained on their rewards, in order."""
        return tuple(name for name, agent in self.agents.items() if self.credit.trains(name) and agent.loss_weight)

    @property
    def counted_agent(self) -> str | None:
        """Agent whose groups are counted by rollout.refill and data.rest; None: whole rollout instances are counted."""
        return None if self.has_whole_instances else self.rewarded_agents[0]

    @property
    def ends_in_step(self) -> bool:
        """True if, without overlap, a problem ends in the step that starts it."""
        return self.rollout.pipeline == "trajectory" or find_orchestration(self.orchestration).plays_sessions

    @property
    def waits_for_team(self) -> bool:
        """True if a problem's first samples wait for its last, because each call of the team takes a step."""
        return self.trains_whole and not self.ends_in_step and len(self.agents) > 1

    @property
    def versions_old(self) -> int:
        """Approximate largest lag, in versions, between a sample's first token and the weights that train on it."""
        overlap = self.rollout.overlap
        if self.ends_in_step and not overlap:
            return 0
        calls = len(self.agents) if self.waits_for_team else 1
        return calls * self.rollout.segments - 1 + (overlap + 1 if overlap else 0)

    def rollout_of(self, policy: str) -> RolloutConfig:
        """Return `rollout` with `engines` and `vllm` of the policy; an adapter uses the engines of its base."""
        served = self.policies[self.policies[policy].base or policy]
        return self.rollout.model_copy(
            update={"engines": served.engines or self.rollout.engines, "vllm": served.vllm or self.rollout.vllm}
        )

    @property
    def max_kept(self) -> dict[str, int]:
        """{agent: largest number of tokens that the sampler keeps at a position}, for trained agents with top_p or top_k."""
        return {
            name: self.loss.max_support
            for name, agent in self.agents.items()
            if self.credit.trains(name) and (agent.top_p < 1 or agent.top_k > 0)
        }

    def in_bytes(self) -> RunConfig:
        """Return the config with max_input_tokens in bytes for agents and judges on chat servers.

        Only the server can count the tokens of a chat, so a token of the limit becomes four bytes.
        """

        def counted(asker: Asker) -> Asker:
            is_chat = self.policies[asker.policy].is_chat
            most = min(MOST_TOKENS, asker.max_input_tokens * (4 if is_chat else 1))
            return asker.model_copy(update={"max_input_tokens": most})

        agents = {name: counted(agent) for name, agent in self.agents.items()}
        return self.model_copy(update={"agents": agents, "judge": self.judge and counted(self.judge)})

    def records_of(self, policy: str) -> Records:
        """Return the values that the policy's engines record for each token besides the log-prob."""
        return Records(
            kept_tokens=any(self.agents[name].policy == policy for name in self.max_kept),
            experts=policy in self.trained_policies and self.trainer.router_replay == "rollout",
        )

    @property
    def served_rollouts(self) -> dict[str, RolloutConfig]:
        """Rollout settings by policy, for policies with local engines."""
        served = [name for name, policy in self.policies.items() if policy.openai is None and policy.base is None]
        return {name: self.rollout_of(name) for name in served}

    def policies_in(self, pool: str) -> tuple[str, ...]:
        """Return the policies that the engines of `pool` serve: `pool` itself and the policies that have it as base."""
        return (pool, *(name for name, policy in self.policies.items() if policy.base == pool))

    def adapters_in(self, pool: str) -> tuple[AdapterConfig, ...]:
        """Return the trained adapters that the engines of `pool` serve."""
        policies = (self.trained_policies.get(name) for name in self.policies_in(pool))
        return tuple(policy.adapter for policy in policies if policy is not None and policy.adapter is not None)

    def past_adapters(self, pool: str) -> dict[str, AdapterConfig]:
        """Return {slot name: adapter} of the slots for past adapters in the engines of `pool` (league)."""
        league = self.league
        if league is None or league.policy not in self.policies_in(pool):
            return {}
        adapter = self.policies[league.policy].adapter
        assert adapter is not None, "agreement.py refuses a league of whole weights"
        return dict.fromkeys(league.slots, adapter.model_copy(update={"start": None}))

    @property
    def pools_of_adapters(self) -> dict[str, str]:
        """Policy with an adapter -> policy whose engines serve it."""
        return {name: policy.base or name for name, policy in self.policies.items() if policy.adapter is not None}

    @property
    def trained_policies(self) -> dict[str, PolicyConfig]:
        """Policies that are trained: every rank holds them, and their engines get new weights.

        Excludes frozen policies, and bases without an adapter of their own.
        """
        return {
            name: policy
            for name, policy in self.policies.items()
            if not policy.frozen and (policy.adapter is not None or name not in self.bases)
        }

    @property
    def bases(self) -> frozenset[str]:
        """Policies on whose weights others train adapters."""
        return frozenset(policy.base for policy in self.policies.values() if policy.base is not None)

    @property
    def parsers(self) -> dict[str, tuple[str | None, str | None]]:
        """vLLM's names of the tool-call parser and the reasoning parser, by policy."""
        return {name: (policy.tool_parser, policy.reasoning_parser) for name, policy in self.policies.items()}

    def engine_dtype(self, policy: str) -> Literal["float32", "bfloat16", "float16"]:
        """Return the compute dtype of the policy's engines, after preflight has resolved auto."""
        asked = self.rollout_of(policy).vllm.dtype if self.rollout.engine == "vllm" else None
        return asked or self.policies[policy].decided_dtype

    @property
    def undecided(self) -> list[str]:
        """Policies with local weights whose dtype is auto."""
        return [name for name, policy in self.policies.items() if policy.dtype == "auto" and policy.openai is None]

    def with_dtypes(self, dtypes: Mapping[str, str]) -> RunConfig:
        """Return the config with these dtypes, by policy."""
        policies = {
            name: policy.model_copy(update={"dtype": dtypes.get(name, policy.dtype)})
            for name, policy in self.policies.items()
        }
        return self.model_copy(update={"policies": policies})

    @model_validator(mode="before")
    @classmethod
    def _vllm_of_policies_is_whole(cls, section: Any) -> Any:
        """Merge policies.<name>.vllm over rollout.vllm, key by key, so that the saved config is complete."""
        match section:
            case {"rollout": {"vllm": dict(common)}, "policies": dict(policies)}:
                whole = dict(policies)
                for name, policy in policies.items():
                    match policy:
                        case {"vllm": dict(policy_vllm)}:
                            whole[name] = {**policy, "vllm": {**common, **policy_vllm}}
                return {**section, "policies": whole}
        return section

    @field_validator("policies")
    @classmethod
    def _have_their_base_s_model(cls, policies: dict[str, PolicyConfig]) -> dict[str, PolicyConfig]:
        return {name: on_base(policies, name) for name in policies}

    @field_validator("agents")
    @classmethod
    def _are_the_whole_team(cls, agents: dict[str, AgentConfig], others: ValidationInfo) -> dict[str, AgentConfig]:
        if "orchestration" not in others.data:  # An invalid orchestration is reported separately.
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
