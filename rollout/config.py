"""Settings of the team and of rollouts. Imports only pydantic."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

# Upper bounds of counts and sizes: far above real use, but low enough to reject a typo with a few extra zeros.
MOST = 1_000_000
MOST_RANKS = 65_536  # processes, threads, GPUs
MOST_TOKENS = 1 << 24  # per sequence
MOST_MIB = 1 << 24  # 16 TiB
LONGEST_S = 30 * 86_400.0
LONGEST_STOP = 64  # characters of a stop string
SILENCE_S = 40.0  # default of run.silence_s
HEAD_PORT = 6379  # Ray's default port
HERE = "here"

Count = Annotated[int, Field(gt=0, le=MOST)]
CountOr0 = Annotated[int, Field(ge=0, le=MOST)]
Tokens = Annotated[int, Field(gt=0, le=MOST_TOKENS)]
Ranks = Annotated[int, Field(gt=0, le=MOST_RANKS)]
Size = Annotated[int, Field(gt=0, le=MOST_MIB)]
SizeOr0 = Annotated[int, Field(ge=0, le=MOST_MIB)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
SecondsOr0 = Annotated[float, Field(ge=0, le=LONGEST_S)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
FolderName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
OptionValue = int | float | str | bool | list[int | float | str | dict[str, Any]] | None
OptionValues = Mapping[str, OptionValue]
"""Options of a task or a team, not yet validated."""


class Settings(BaseModel):
    """Base of every settings model. It is frozen and rejects unknown keys, NaN and infinity. Numbers are not accepted as strings.

    A field's description is in its Field(), or in the docstring below it if it is long.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


Read = TypeVar("Read", bound=Settings)


def read_key(variable: str, setting: str) -> str:
    """Return the secret in an environment variable; ValueError names the setting, never the secret."""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(
            f"{setting} names {variable}, which is {'not printable ASCII, as headers require' if key else 'not set or empty'}; "
            "export the key in it before starting the run"
        )
    return key


def is_started_here(ray_address: str) -> bool:
    """Return True if rollout.ray_address starts a cluster that other hosts join: here, or here:port."""
    return ray_address.partition(":")[0] == HERE


def problems_of(error: ValidationError, prefix: str = "", keys: Collection[str] = ()) -> str:
    """Format all validation errors in one line, key by key.

    prefix: text before each key. keys: valid keys; the message for an unknown key suggests the closest.
    """
    problems = []
    for each in error.errors():
        name, message = ".".join(map(str, each["loc"])), each["msg"]
        if keys and each["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, keys, n=1)
            message = "unknown key; " + (
                f"did you mean {prefix}{near[0]}?" if near else f"expected one of {', '.join(keys)}"
            )
        problems.append(f"{prefix}{name}: {message}")
    return "; ".join(problems)


def read_settings(kind: type[Read], values: Mapping[str, object], prefix: str = "", where: str = "") -> Read:
    """Validate settings; ValueError lists the wrong keys in one line that begins with `where`."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError(where + problems_of(error, prefix, kind.model_fields)) from error


def _http_url(value: str, info: ValidationInfo) -> str:
    """Validate a server's URL and strip its trailing slash."""
    parts = urlsplit(value)
    # .port raises ValueError if invalid.
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{info.field_name} is {value!r}; expected http://host[:port]... or https://...")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            f"{info.field_name} contains a user, password, query or fragment, and would be saved with the config; remove it"
        )
    return value.rstrip("/")


def _variable_name(value: str, info: ValidationInfo) -> str:
    """Validate the name of an environment variable. The message omits an invalid name: it may be the secret itself."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        key = info.field_name
        raise ValueError(
            f"{key} is not the name of an environment variable; export the key in a variable, and set its name here"
        )
    return value


def _above_0(value: float, info: ValidationInfo) -> float:
    """Validate a sampling temperature."""
    if value <= 0:
        raise ValueError(
            f"{info.field_name} is {value:g}; expected above 0; for greedy decoding in evaluations set top_k=1"
        )
    return value


def _typed_text(value: str, info: ValidationInfo) -> str:
    r"""Validate a text for an agent.

    Rejects control characters: inside double quotes, YAML converts the \b of \boxed and the \t of \text to such characters.
    """
    if found := next((char for char in value if ord(char) < 32 and char != "\n"), None):
        raise ValueError(
            f"{info.field_name} contains the control character {found!r}: YAML reads a backslash in double quotes as an "
            "escape; use single quotes, or double the backslash"
        )
    return value


HttpUrl = Annotated[str, AfterValidator(_http_url)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_typed_text)]
Temperature = Annotated[float, AfterValidator(_above_0)]
VariableName = Annotated[str, AfterValidator(_variable_name)]


class TeacherConfig(Settings):
    """agents.<name>.teacher: a frozen policy, usually larger. Training moves the agent's log-probs of its own tokens towards the
    teacher's (docs/teachers.md)."""

    policy: str = Field(description="name under `policies` of a frozen policy with its own engines")
    coef: float = Field(1.0, gt=0, le=MOST)
    """added to each token's advantage: coef x (log p_teacher - log p_rollout, minus the mean of this difference)"""


class OverlongConfig(Settings):
    """agents.<name>.overlong: a penalty on completions near their maximum length (DAPO's soft overlong punishment)."""

    buffer: Tokens = Field(description="tokens below the agent's max_response_tokens at which the penalty begins")
    penalty: float = Field(1.0, gt=0, le=MOST)
    """subtracted from the reward at the maximum length; rises linearly over the buffer (arXiv:2503.14476, eq. 13)"""


class AgentConfig(Settings):
    """One agent of the team: its policy, prompts, sampling, input picks and loss weight."""

    policy: str = Field("main", description="name under `policies`")
    prompt: str | None = None
    """built-in prompt set (`marsrl prompts`) or FILE.yaml (docs/prompts.md). A prompt set also specifies how outputs are parsed.
    Default: the task's prompt set"""
    system: Text | None = None
    """replaces the prompt set's system message; same placeholders (docs/prompts.md)"""
    suffix: Text | None = None
    r"""text appended to the prompt set's last user message, such as 'Put your answer in \boxed{}.'; same placeholders
    (docs/prompts.md)"""
    temperature: Temperature = Field(1.0, description="sampling temperature in training, above 0")
    top_p: PositiveShare = Field(
        1.0, description="as evaluate.top_p; trained agents need 1, or loss.truncation=renormalise"
    )
    top_k: int = Field(-1, ge=-1, le=MOST_TOKENS)
    """as evaluate.top_k; trained agents need -1 (all), or loss.truncation=renormalise"""
    max_input_tokens: Tokens = Field(32768, description="maximum prompt length; long_prompts handles longer ones")
    long_prompts: Literal["skip", "cut_middle", "cut_left"] = "skip"
    """prompts above max_input_tokens: skip them, or cut the contents of their longest messages to fit, in the middle or on the
    left (metrics: rollout/prompts_too_long, rollout/prompts_cut)"""
    max_response_tokens: Tokens | None = None
    """maximum completion length of this agent; default and upper bound: rollout.max_response_tokens"""
    stop: list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]] = Field(default_factory=list, max_length=4)
    """stop strings, kept in the completion (`</search>`), in addition to the end-of-turn tokens of the chat template, tokenizer
    and generation_config.json; vllm and local engines only"""
    tools: list[str] = Field(default_factory=list)
    """names under `tools` that the agent can call through its chat template (docs/tools.md)"""
    max_tool_turns: Count = 8
    """maximum turns of a completion that call tools; later calls are not executed and end the completion"""
    max_tool_tokens: Tokens = 2048
    """maximum tokens of tool outputs per turn; the longest outputs are cut to fit"""
    template_options: dict[str, bool | str] = Field(default_factory=dict)
    """chat template options of this agent (Qwen3: enable_thinking)"""
    loss_weight: float = Field(1.0, ge=0)
    """factor on this agent's advantages, but not on a teacher's term or a KL penalty (loss.kl_in); 0: no training on rewards"""
    teacher: TeacherConfig | None = None
    """frozen policy that is distilled into this agent, on the agent's samples and at its temperature (docs/teachers.md)"""
    clip_low: Share | None = Field(None, description="lower clip bound for this agent's tokens; default: loss.clip_low")
    clip_high: float | None = Field(
        None, ge=0, description="upper clip bound for this agent's tokens; default: loss.clip_high"
    )
    format_penalty: float = Field(0.0, ge=0, le=MOST)
    """subtracted from the reward of a completion without a readable answer or verdict (Dr. MAS)"""
    overlong: OverlongConfig | None = None
    """penalty on completions near or at their maximum length (docs/credit.md); null: none"""
    pick: Literal["adaptive", "balanced", "paired", "random"] = "adaptive"
    """rule that picks, among the outputs of the previous agent, those that this agent reads (docs/concepts.md)"""
    pick_unparsable: bool = False
    """true: outputs without a readable answer can be picked too; for a Corrector, so can reports without a verdict if the
    Verifier's missing_verdict is wrong"""
    parser: Literal["strict", "compat", "boxed", "final_answer"] = "strict"
    """strict: parse as the prompt set specifies. boxed, final_answer: other formats of answers (docs/prompts.md). compat: parse
    verdicts like the code published with the prompt's paper (docs/evaluate.md)"""
    missing_verdict: Literal["wrong", "correct"] = "wrong"
    """verdict assumed for a report without a readable one; the report's reward is 0 either way"""


Sampler = Literal["engine", "marsrl"]
"""Sampler of an engine: vLLM's, or marsrl's."""


class VllmOptions(Settings):
    """Options passed to vLLM."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="dtype of the engine; default: the policy's dtype"
    )
    max_num_seqs: Count = Field(256, description="requests decoded at once by one engine")
    kv_cache_mib: Size | None = None
    """size of the KV cache on each GPU of an engine, MiB; default: chosen by vLLM on GPUs, 256 on CPUs"""
    gpu_memory_utilization: PositiveShare = Field(0.9, description="share of the GPU's memory that vLLM may take")
    tensor_parallel: Ranks = 1
    """number of GPUs of one engine, all on one host, which split every matrix (on a CPU: number of processes)"""
    expert_parallel: bool = False
    """put whole experts on single GPUs of an engine, instead of splitting each expert over all"""
    sampler: Sampler | Literal["auto"] = "auto"
    """engine: vLLM's sampler, one seed per request (on GPUs: Model Runner V2, async scheduling). marsrl: our sampler, whose
    draws repeat bitwise in any batch (on GPUs: Model Runner V1). auto: engine on GPUs, marsrl on CPUs"""
    draft_tokens: int = Field(0, ge=0, le=32)
    """on GPUs: number of tokens proposed at once, by draft_model or by n-gram lookup of the last five tokens; the policy
    accepts or rejects them, which keeps its distribution; 0: off (docs/weight_sync.md)"""
    draft_model: str | None = None
    """folder of an EAGLE-3 draft for the policy's model: it proposes the draft_tokens, and is not trained
    (docs/weight_sync.md)"""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """dtype of the KV cache; auto: the engine's dtype. fp8 stores twice the tokens, but log-probs differ more from the
    trainer's: set loss.correction and watch the metrics train_rollout/..."""
    quantization: Literal["fp8"] | None = None
    """fp8: the engine rounds the layers' matrices when they arrive, in blocks of 128 x 128, which halves their memory and
    memory traffic. For a trained policy set loss.correction (docs/weight_sync.md)"""
    extra: dict[str, Any] = Field(default_factory=dict)
    """other EngineArgs of vLLM, with vLLM's names (example: {max_num_batched_tokens: 16384})"""

    def sampler_on(self, device: str) -> Sampler:
        """Return the sampler of an engine on "cpu" or "cuda"."""
        if self.sampler == "auto":
            return "engine" if device == "cuda" else "marsrl"
        return self.sampler

    @model_validator(mode="after")
    def _experts_have_where_to_go(self) -> VllmOptions:
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "rollout.vllm.expert_parallel=true needs several GPUs per engine, but rollout.vllm.tensor_parallel is 1; "
                "raise it, or set expert_parallel=false"
            )
        return self

    @model_validator(mode="after")
    def _draft_proposes_tokens(self) -> VllmOptions:
        if self.draft_model is not None and not self.draft_tokens:
            raise ValueError(
                "rollout.vllm.draft_model is set, but rollout.vllm.draft_tokens is 0, so it would propose nothing; set "
                "draft_tokens (3 is common), or remove draft_model"
            )
        return self


class LocalOptions(Settings):
    """Built-in engine (rollout.engine=local); computes in the policy's dtype."""

    max_num_seqs: Count = Field(256, description="requests decoded at once by one engine")


class OpenAIOptions(Settings):
    """Server with an OpenAI-compatible API (vLLM, SGLang, llama.cpp, hosted ones)."""

    base_url: HttpUrl = Field(
        description="http(s)://host[:port]/v1; requests go to base_url/completions (but see `api`)"
    )
    model: str = Field(description="the model's name on that server")
    api_key_env: VariableName | None = None
    """environment variable that holds the key, never the key itself"""
    api: Literal["completions", "chat"] = "completions"
    """completions: prompts are rendered by marsrl with the chat template of policies.<name>.model. chat: messages go to
    base_url/chat/completions, for servers that support only that; omit policies.<name>.model (docs/frozen_policies.md)"""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """additional request fields (chat_template_kwargs: {enable_thinking: false}); they override marsrl's, and null removes one"""
    prompt: Literal["text", "tokens"] = "text"
    """text: works with any server; omits the BOS token that the server's tokenizer adds. tokens: sends token ids, and
    end-of-turn ids as stop_token_ids; the server must use the tokenizer of policies.<name>.model (docs/frozen_policies.md)"""
    concurrency: Ranks = Field(32, description="maximum concurrent requests")
    timeout_s: Seconds = Field(600.0, description="time limit of one attempt, from connection to last byte")
    retries: CountOr0 = Field(5, description="retries after 429, 5xx, or a failed connection")
    backoff_s: SecondsOr0 = Field(1.0, description="delay before the first retry; doubles, up to 60 s")
    max_response_kib: Size = Field(4096, description="maximum response size, KiB")


class RefillConfig(Settings):
    """rollout.refill: problems that a step adds to replace groups without spread (all rewards equal; docs/credit.md)."""

    groups: Count = Field(description="groups with spread that a step needs; it adds problems until it has this many")
    most: float = Field(2.0, gt=1, le=MOST)
    """maximum problems of a step, in multiples of prompts_per_step"""


class RolloutConfig(Settings):
    """Engines, stages and limits of rollouts."""

    engine: Literal["vllm", "local"] = Field("vllm", description="engine that decodes tokens")
    placement: Literal["local", "disaggregated", "colocated"] = "disaggregated"
    """local: in the trainer's process, without Ray. disaggregated: Ray actors on separate GPUs. colocated: Ray actors on the
    trainer's GPUs, asleep during training (docs/clusters.md). Default: local for a single built-in engine
    (rollout.engine=local) without overlap, rebalance and ray_address; else disaggregated"""
    engines: Ranks = Field(1, description="engine replicas of every policy (docs/clusters.md)")
    rebalance: bool = False
    """between stages, move an engine from the least loaded policy to the most loaded one, if the latter's engines worked more
    than twice as long in two consecutive stages (docs/clusters.md)"""
    threads: Ranks | None = Field(None, description="CPU threads of one engine; default: an even share of all cores")
    ray_address: str | None = None
    """Ray cluster to join, host:port. here or here:port (default 6379): start one that other hosts join with `ray start`.
    Default: start one for this machine only (docs/clusters.md)"""
    ray_timeout_s: Seconds = Field(30.0, description="timeout for reaching the cluster")
    join_s: Seconds = 600.0
    """maximum wait for hosts with room for the engines: at startup with ray_address=here, and when a policy's only engine
    is lost with its host (docs/clusters.md)"""
    object_store_mib: int = Field(
        256, ge=80, le=MOST_MIB, description="size of the object store of a cluster started here, MiB"
    )
    prompts_per_step: Count = Field(8, description="new problems per stage; with stage_size=total, the maximum")
    stage_size: Literal["new", "total"] = "new"
    """new: every stage starts prompts_per_step new problems. total: carried-over samples, of any agent, replace new ones, so
    that a stage has about prompts_per_step x group_size samples in all"""
    refill: RefillConfig | None = None
    """add a problem for each group without spread, up to a limit; nothing that finished is dropped (docs/credit.md); null: off"""
    group_size: Count = Field(8, description="G: samples per agent and input")
    picks: Count = Field(2, description="number of outputs passed to the next agent, per rollout instance and agent")
    max_response_tokens: Tokens = Field(1024, description="maximum length of any completion")
    segments: Count = Field(1, description="maximum stages per completion; 1: whole completions")
    segment_length: Tokens | None = Field(
        None, description="tokens of a completion per stage; default: max_response_tokens / segments"
    )
    pipeline: Literal["agentic", "trajectory"] = "agentic"
    """agentic: train on finished groups. trajectory: train on whole trajectories"""
    overlap: CountOr0 = 0
    """number of stages that decoding may run ahead of training; 0: alternate stage and step, which repeats bitwise"""
    group_completion: Literal["wait", "drop_stragglers"] = "wait"
    """wait: a group waits for all its samples. drop_stragglers: after max_group_age, train it without the unfinished samples"""
    max_group_age: CountOr0 = Field(4, description="policy versions after which drop_stragglers closes a group")
    max_unfinished: Tokens = Field(
        4096, description="start no new problems while more samples than this are carried over"
    )
    deadline_s: Seconds = 1800.0
    """time limit of a stage (with overlap: of a request); beyond it the engine counts as lost. Its startup may take ten times as
    long"""
    max_engine_restarts: CountOr0 = 16
    """number of lost engines (dead, or silent for deadline_s) that a run replaces per policy; the next loss ends the run"""
    max_turns: Count = 256
    """maximum calls of agents and of the team's own tools in one episode, and continuations of one sample; beyond it the episode
    fails"""
    max_error_share: PositiveShare = 0.5
    """maximum share of a step's samples and episodes that end in an error (engine or team code); beyond it the run stops"""
    max_request_attempts: Count = 3
    """number of lost engines after which a request is retried alone; if it was alone already, its sample ends as an error"""
    vllm: VllmOptions = VllmOptions()
    local: LocalOptions = LocalOptions()

    @property
    def slots(self) -> int:
        """Requests that one engine decodes at once."""
        return self.vllm.max_num_seqs if self.engine == "vllm" else self.local.max_num_seqs

    @model_validator(mode="before")
    @classmethod
    def _keep_one_engine_here(cls, given: Any) -> Any:
        others = ("placement", "overlap", "rebalance", "ray_address")
        if not isinstance(given, Mapping) or given.get("engine") != "local" or any(given.get(key) for key in others):
            return given
        return {**given, "placement": "local"} if given.get("engines", 1) == 1 else given

    @field_validator("ray_address")
    @classmethod
    def _has_a_port_if_any(cls, value: str | None) -> str | None:
        port = value.partition(":")[2] if value is not None and is_started_here(value) else ""
        if port and not (port.isdigit() and 0 < int(port) < 1 << 16):
            raise ValueError(f"ray_address is {value!r}; expected here or here:PORT, with a port from 1 to 65535")
        return value

    @model_validator(mode="after")
    def _settings_agree(self) -> RolloutConfig:
        if self.segment_length is not None and self.segment_length * self.segments < self.max_response_tokens:
            raise ValueError(
                f"rollout.segments x rollout.segment_length = {self.segments} x {self.segment_length} is less than "
                f"rollout.max_response_tokens = {self.max_response_tokens}; raise one of the first two"
            )
        if self.refill is not None and self.most_problems == self.prompts_per_step:
            raise ValueError(
                f"rollout.refill.most x rollout.prompts_per_step = {self.refill.most:g} x {self.prompts_per_step}, which "
                "leaves no room for an added problem; raise one of them"
            )
        if self.most_problems * self.group_size * self.picks > MOST_TOKENS:
            raise ValueError(
                f"rollout.prompts_per_step x rollout.group_size x rollout.picks = {self.prompts_per_step:,} x "
                f"{self.group_size:,} x {self.picks:,} samples of one agent in a step; expected at most {MOST_TOKENS:,}"
                + (f" after multiplication by rollout.refill.most = {self.refill.most:g}" if self.refill else "")
            )
        if self.stage_size == "total" and self.pipeline == "trajectory":
            raise ValueError(
                "rollout.stage_size=total counts samples carried over between steps, but "
                "rollout.pipeline=trajectory carries none over; set stage_size=new, or pipeline=agentic"
            )
        if self.rebalance and self.placement != "disaggregated":
            raise ValueError(
                f"rollout.rebalance moves engines between their own GPUs, but rollout.placement is {self.placement}; set "
                "rebalance=false, or placement=disaggregated"
            )
        if self.placement == "colocated" and self.overlap:
            raise ValueError(
                f"rollout.placement=colocated puts engines to sleep during training, but rollout.overlap is "
                f"{self.overlap}; set overlap=0, or placement=disaggregated"
            )
        return self

    @property
    def most_problems(self) -> int:
        """Maximum new problems of a stage, including those that rollout.refill adds."""
        return self.prompts_per_step if self.refill is None else round(self.refill.most * self.prompts_per_step)

    @property
    def tokens_per_stage(self) -> int:
        """Decoding budget of one sample in one stage, in tokens."""
        return self.segment_length or -(-self.max_response_tokens // self.segments)


class EvaluateConfig(Settings):
    """Inference loop: Solver, then alternately Verifier and Corrector until a stop rule holds (MarsRL; docs/evaluate.md)."""

    num_problems: Count | None = None
    """maximum held-out problems of each set in data.eval; default: all of a set, but 64 if a task generates them or they are
    split off data.train"""
    repeat: Count = Field(1, description="n of avg@n: samples per problem")
    accept_after: Count = Field(4, description="consecutive 'correct' verdicts that accept a candidate")
    max_iterations: Count | None = None
    """maximum Verifier calls; default: 10, or the script's 11 with compat=marsrl"""
    compat: Literal["marsrl"] | None = None
    """marsrl: run and score like the script published with arXiv:2511.11373, for comparison with the paper's figures
    (docs/evaluate.md)"""
    temperature: Temperature = 0.6
    """sampling temperature of all agents in evaluations, above 0 (agents.<name>.temperature is for training); greedy:
    top_k=1"""
    top_p: PositiveShare = 0.95
    """sample from the likeliest tokens with this total probability; 1: all"""
    top_k: int = Field(-1, ge=-1, le=MOST_TOKENS)
    """sample from at most this many of the likeliest tokens; -1: all"""
    fixed_inputs: Count = 160
    """maximum number of fixed inputs (solutions). A Verifier gets half of them right and half wrong; a Corrector gets this many
    right and this many wrong ones"""

    @property
    def most_verdicts(self) -> int:
        """Maximum Verifier calls in an episode. MarsRL's script verifies once, then up to ten more times."""
        return self.max_iterations or (11 if self.compat == "marsrl" else 10)
