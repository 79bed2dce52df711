"""Settings of the team and of its rollouts. Import-light: pydantic only."""

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

# Bounds of counts and sizes: far above any real use, far below a typo that adds a few zeros.
MOST = 1_000_000
MOST_RANKS = 65_536  # processes, threads, GPUs
MOST_TOKENS = 1 << 24  # of one sequence
MOST_MIB = 1 << 24  # 16 TiB
LONGEST_S = 30 * 86_400.0
LONGEST_STOP = 64  # characters of a stop text
SILENCE_S = 40.0  # default of run.silence_s
HEAD_PORT = 6379  # of a Ray cluster that is started `here`, and of `marsrl join HOST`: Ray's own
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
"""Options of a task or a team, before they are checked."""


class Settings(BaseModel):
    """Base of every settings model: frozen, no unknown keys, numbers are numbers and strings are strings.

    The docstring below a field is its description, where that is too long to stand in it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


Read = TypeVar("Read", bound=Settings)


def read_key(variable: str, setting: str) -> str:
    """The secret in an environment variable; ValueError names the setting, never the secret."""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(
            f"{setting} names {variable}, which is {'not a key that a header can carry' if key else 'not set or empty'}; export "
            "it before the run starts"
        )
    return key


def is_started_here(ray_address: str) -> bool:
    """True if rollout.ray_address asks for a cluster of our own that other hosts join: here, or here:port."""
    return ray_address.partition(":")[0] == HERE


def problems_of(error: ValidationError, prefix: str = "", keys: Collection[str] = ()) -> str:
    """All errors of the options in one line, key by key. keys: the valid ones; the nearest is suggested for an unknown key."""
    problems = []
    for each in error.errors():
        name, message = ".".join(map(str, each["loc"])), each["msg"]
        if keys and each["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, keys, n=1)
            message = "unknown key; " + (f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(keys)}")
        problems.append(f"{prefix}{name}: {message}")
    return "; ".join(problems)


def read_settings(kind: type[Read], values: Mapping[str, object], prefix: str = "", where: str = "") -> Read:
    """The settings with these values; ValueError lists the wrong keys in one line, which begins with `where`."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError(where + problems_of(error, prefix, kind.model_fields)) from error


def _http_url(value: str, info: ValidationInfo) -> str:
    """A server's URL without a trailing slash."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # .port raises ValueError too
        raise ValueError(f"{info.field_name} is {value!r}; expected http://host[:port]... or https://...")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"{info.field_name} holds a user, password or query, and the config is saved: leave it out")
    return value.rstrip("/")


def _variable_name(value: str, info: ValidationInfo) -> str:
    """The name of an environment variable. The message does not show what is none: it may be the secret itself."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        key = info.field_name
        raise ValueError(f"{key} is not the name of an environment variable; put the key into one, name it here")
    return value


def _above_0(value: float, info: ValidationInfo) -> float:
    """A sampling temperature."""
    if value <= 0:
        raise ValueError(f"{info.field_name} is {value:g}; expected above 0 (top_k=1 decodes greedily, in evaluations)")
    return value


def _typed_text(value: str, info: ValidationInfo) -> str:
    r"""A text for an agent. In double quotes YAML makes control characters of LaTeX's commands, such as \boxed and \text."""
    if found := next((char for char in value if ord(char) < 32 and char != "\n"), None):
        raise ValueError(
            f"{info.field_name} has the control character {found!r}, which YAML makes of a backslash in double quotes; quote it "
            "with single ones, or double the backslash"
        )
    return value


HttpUrl = Annotated[str, AfterValidator(_http_url)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_typed_text)]
Temperature = Annotated[float, AfterValidator(_above_0)]
VariableName = Annotated[str, AfterValidator(_variable_name)]


class TeacherConfig(Settings):
    """agents.<name>.teacher: a larger model that says how likely each token of the agent is to it (docs/teachers.md)."""

    policy: str = Field(description="name under `policies`, frozen and with engines of its own")
    coef: float = Field(1.0, gt=0, le=MOST)
    """of log p_teacher - log p_rollout, less a mean of it, which is added to each token's advantage"""


class OverlongConfig(Settings):
    """agents.<name>.overlong: a penalty on completions near their maximum length (DAPO's soft overlong punishment)."""

    buffer: Tokens = Field(description="tokens below the agent's max_response_tokens at which the penalty begins")
    penalty: float = Field(1.0, gt=0, le=MOST)
    """taken off the reward of a completion of the maximum length; it rises linearly over the buffer (arXiv:2503.14476, eq. 13)"""


class AgentConfig(Settings):
    """One agent of the team: which policy answers, how it is prompted and sampled, how it is picked and weighed."""

    policy: str = Field("main", description="name under `policies` whose weights answer")
    prompt: str | None = None
    """prompt set that ships (`marsrl prompts`), or FILE.yaml (docs/prompts.md): how the agent is asked and read; default: the
    task's set"""
    system: Text | None = None
    """the system turn that the agent reads, in place of the prompt set's; placeholders as there (docs/prompts.md)"""
    suffix: Text | None = None
    r"""what the user's last turn ends with, below the prompt set's text: 'Put your answer in \boxed{}.'; placeholders as there
    (docs/prompts.md)"""
    temperature: Temperature = Field(1.0, description="sampling temperature in training, above 0")
    top_p: PositiveShare = Field(1.0, description="trained agents need 1, or loss.truncation=renormalise")
    top_k: int = Field(-1, ge=-1, le=MOST_TOKENS)
    """trained agents need -1 (off), or loss.truncation=renormalise"""
    max_input_tokens: Tokens = Field(32768, description="of a prompt; a longer one: long_prompts")
    long_prompts: Literal["skip", "cut_middle", "cut_left"] = "skip"
    """a prompt above max_input_tokens is not asked, or the contents of its longest messages are cut to fit, in the middle or
    on the left (counted: rollout/prompts_too_long, rollout/prompts_cut)"""
    max_response_tokens: Tokens | None = None
    """of this agent's completions; default and at most: rollout.max_response_tokens"""
    stop: list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]] = Field(default_factory=list, max_length=4)
    """texts that end a completion, as part of it (`</search>`), beside the chat template's end of a turn, eos_token and those of
    generation_config.json; engines of ours"""
    tools: list[str] = Field(default_factory=list)
    """names under `tools` that the agent calls by its chat template (docs/tools.md)"""
    max_tool_turns: Count = 8
    """turns of a completion that call tools; a call in a later one is not made, and its turn is the last"""
    max_tool_tokens: Tokens = 2048
    """tokens of what the tools give in a turn; the longest are cut to fit"""
    template_options: dict[str, bool | str] = Field(default_factory=dict)
    """of the chat template for this agent (Qwen3: enable_thinking)"""
    loss_weight: float = Field(1.0, ge=0)
    """factor on this agent's advantages, but not on a teacher's part or a KL penalty (loss.kl_in); 0: without the reward"""
    teacher: TeacherConfig | None = None
    """distils a frozen policy into this agent on the agent's own samples, at the agent's temperature (docs/teachers.md)"""
    clip_low: Share | None = Field(None, description="of this agent's tokens; default: loss.clip_low")
    clip_high: float | None = Field(None, ge=0, description="of this agent's tokens; default: loss.clip_high")
    format_penalty: float = Field(0.0, ge=0, le=MOST)
    """taken off the reward of a completion without a readable answer or verdict (Dr. MAS)"""
    overlong: OverlongConfig | None = None
    """taken off the reward of a completion that is nearly or fully as long as it may be (docs/credit.md); null: nothing"""
    pick: Literal["adaptive", "balanced", "paired", "random"] = "adaptive"
    """which of the predecessor's outputs this agent is asked about"""
    pick_unparsable: bool = False
    """picks among outputs without a readable answer too; a Corrector's among reports without a verdict, where the Verifier's
    missing_verdict is wrong"""
    parser: Literal["strict", "compat", "boxed", "final_answer"] = "strict"
    """strict: as the prompt set says. Of answers: boxed, final_answer (docs/prompts.md); of verdicts: compat, as the code
    published with a paper reads them, where the prompt asks for what that looks for (docs/evaluate.md)"""
    missing_verdict: Literal["wrong", "correct"] = "wrong"
    """how the loop goes on without a verdict; the reward is 0 either way"""


Sampler = Literal["engine", "marsrl"]
"""The sampler of an engine's tokens: its own, or ours."""


class VllmOptions(Settings):
    """Passed on to vLLM."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="default: the policy's dtype")
    max_num_seqs: Count = Field(256, description="requests decoded at once by one engine")
    kv_cache_mib: Size | None = None
    """KV cache of each of an engine's GPUs, MiB; default: vLLM decides (GPU), 256 (CPU)"""
    gpu_memory_utilization: PositiveShare = Field(0.9, description="share of the GPU's memory vLLM may take")
    tensor_parallel: Ranks = 1
    """GPUs of one engine, all on one host; every matrix is cut over them (on a CPU: processes)"""
    expert_parallel: bool = False
    """each expert whole on one of tensor_parallel's GPUs, in place of a share of it on all"""
    sampler: Sampler | Literal["auto"] = "auto"
    """who draws tokens. engine: vLLM's own sampler with a seed a request (on GPUs in its Model Runner V2, with async
    scheduling); marsrl: ours, whose draws repeat bitwise whatever else is in the batch (in the older Model Runner V1). auto:
    engine on GPUs, marsrl on CPUs"""
    draft_tokens: int = Field(0, ge=0, le=32)
    """GPUs: tokens that vLLM guesses at once, those that followed when the last five came before (n-gram); the policy accepts
    or rejects them so that draws stay its own; 0: none (docs/weight_sync.md)"""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """of the KV cache; auto: the engine's dtype. fp8 holds twice the tokens, and log-probs differ from the trainer's by more:
    set loss.correction and watch train_rollout/"""
    quantization: Literal["fp8"] | None = None
    """of the layers' matrices, rounded by vLLM as it loads them, in blocks of 128 x 128: half the memory and traffic. A
    trained policy's want loss.correction and sync.backend=shm: docs/weight_sync.md"""
    extra: dict[str, Any] = Field(default_factory=dict)
    """any other field of vLLM's EngineArgs ({max_num_batched_tokens: 16384}), as it is spelled there"""

    def sampler_on(self, device: str) -> Sampler:
        """`sampler` of an engine on "cpu" or "cuda"."""
        if self.sampler == "auto":
            return "engine" if device == "cuda" else "marsrl"
        return self.sampler

    @model_validator(mode="after")
    def _experts_have_where_to_go(self) -> VllmOptions:
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "rollout.vllm.expert_parallel spreads experts over the GPUs of an engine, and rollout.vllm.tensor_parallel is 1: "
                "raise it, or set expert_parallel=false"
            )
        return self


class LocalOptions(Settings):
    """Our own engine (rollout.engine=local), which computes in the policy's dtype."""

    max_num_seqs: Count = Field(256, description="requests decoded at once by one engine")


class OpenAIOptions(Settings):
    """A server that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, hosted ones)."""

    base_url: HttpUrl = Field(description="http(s)://host[:port]/v1; requests go to base_url/completions; see `api`")
    model: str = Field(description="the model's name on that server")
    api_key_env: VariableName | None = None
    """environment variable that holds the key; never the key itself"""
    api: Literal["completions", "chat"] = "completions"
    """completions: the prompt is rendered here, with the chat template of policies.<name>.model; chat: messages go to
    base_url/chat/completions, for servers that have nothing else, and the policy has no `model` (docs/frozen_policies.md)"""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """more fields of each request (chat_template_kwargs: {enable_thinking: false}), which replace ours of the same name; null
    leaves one out"""
    prompt: Literal["text", "tokens"] = "text"
    """text: for any server, without the first token (BOS) that its tokenizer adds; tokens: ids, and the ends of a turn as
    stop_token_ids, for a server that has the tokenizer of policies.<name>.model (docs/frozen_policies.md)"""
    concurrency: Ranks = Field(32, description="requests under way at once")
    timeout_s: Seconds = Field(600.0, description="one attempt at one request, from connection to last byte")
    retries: CountOr0 = Field(5, description="further attempts after 429, 5xx, or a failed connection")
    backoff_s: SecondsOr0 = Field(1.0, description="wait before the first retry; doubles, up to 60 s")
    max_response_kib: Size = Field(4096, description="a larger answer is refused, KiB")


class RolloutConfig(Settings):
    """Playing problems: engines, stages and limits."""

    engine: Literal["vllm", "local"] = Field("vllm", description="what decodes tokens")
    placement: Literal["local", "disaggregated", "colocated"] = "disaggregated"
    """local: in the trainer's process, no Ray; disaggregated: Ray actors on GPUs of their own; colocated: Ray actors on the
    trainer's GPUs, asleep while it trains (docs/clusters.md)"""
    engines: Ranks = Field(1, description="engine replicas of every policy (docs/clusters.md)")
    rebalance: bool = False
    """between stages, move an engine from the policy whose engines had least to decode to the one whose had more than twice
    that, where it has room there: docs/clusters.md"""
    threads: Ranks | None = Field(None, description="CPU threads of one engine; default: all cores shared evenly")
    ray_address: str | None = None
    """Ray cluster to join, host:port; here or here:port (6379): start one that other hosts join by `marsrl join`; default:
    start one for this machine alone (docs/clusters.md)"""
    ray_timeout_s: Seconds = Field(30.0, description="give up on an unreachable cluster after this long")
    join_s: Seconds = 600.0
    """how long to wait for hosts that have room for the engines: with ray_address=here as the run starts, and when a policy's
    only engine is lost with its host (docs/clusters.md)"""
    object_store_mib: int = Field(256, ge=80, le=MOST_MIB, description="object store of a cluster started here, MiB")
    prompts_per_step: Count = Field(8, description="new problems a stage; with stage_size=total at most")
    stage_size: Literal["new", "total"] = "new"
    """new: every stage plays prompts_per_step new problems; total: carried-over samples, of any agent, take the places of new
    ones, so that a stage has about prompts_per_step x group_size of both"""
    group_size: Count = Field(8, description="G: samples of one agent on one input")
    picks: Count = Field(2, description="outputs handed to the next agent, for one rollout instance and agent")
    max_response_tokens: Tokens = Field(1024, description="global maximum length of a completion")
    segments: Count = Field(1, description="stages a completion may take; 1 = whole completions")
    segment_length: Tokens | None = Field(None, description="tokens a stage; default max_response_tokens / segments")
    pipeline: Literal["agentic", "trajectory"] = "agentic"
    """train on finished groups, or on whole trajectories"""
    overlap: CountOr0 = 0
    """stages that decoding may be ahead of training; 0: stage and step in turn, repeats bitwise"""
    group_completion: Literal["wait", "drop_stragglers"] = "wait"
    """what a group does about unfinished samples"""
    max_group_age: CountOr0 = Field(4, description="versions after which drop_stragglers closes a group")
    max_unfinished: Tokens = Field(4096, description="no new problems while more samples than this are carried over")
    deadline_s: Seconds = 1800.0
    """an engine that has a stage (with overlap: a request) for longer counts as lost; its start may take ten times as long"""
    max_engine_restarts: CountOr0 = 16
    """engines of a policy that are lost (died, silent for deadline_s) and replaced in a run; then it stops"""
    max_turns: Count = 256
    """calls of agents in one episode, and how often a sample goes on; a team that wants more has failed in it"""
    max_error_share: PositiveShare = 0.5
    """of a step's samples and episodes that ended in an error (an engine gave up, a team's own code raised); with more the
    run stops"""
    max_request_attempts: Count = 3
    """engines that may be lost with a request before its sample ends as an error"""
    vllm: VllmOptions = VllmOptions()
    local: LocalOptions = LocalOptions()

    @property
    def slots(self) -> int:
        """Requests that one engine decodes at once."""
        return self.vllm.max_num_seqs if self.engine == "vllm" else self.local.max_num_seqs

    @field_validator("ray_address")
    @classmethod
    def _has_a_port_if_any(cls, value: str | None) -> str | None:
        port = value.partition(":")[2] if value is not None and is_started_here(value) else ""
        if port and not (port.isdigit() and 0 < int(port) < 1 << 16):
            raise ValueError(f"ray_address is {value!r}; expected here or here:port, 1 to 65535")
        return value

    @model_validator(mode="after")
    def _settings_agree(self) -> RolloutConfig:
        if self.segment_length is not None and self.segment_length * self.segments < self.max_response_tokens:
            raise ValueError(
                f"rollout.segments x rollout.segment_length = {self.segments} x {self.segment_length} is less than "
                f"rollout.max_response_tokens = {self.max_response_tokens}; raise one of the first two"
            )
        if self.prompts_per_step * self.group_size * self.picks > MOST_TOKENS:
            raise ValueError(
                f"rollout.prompts_per_step x rollout.group_size x rollout.picks = {self.prompts_per_step:,} x "
                f"{self.group_size:,} x {self.picks:,} samples of one agent in a step, expected at most {MOST_TOKENS:,}"
            )
        if self.stage_size == "total" and self.pipeline == "trajectory":
            raise ValueError(
                "rollout.stage_size=total makes room for samples that are carried over from one step to the next, and "
                "rollout.pipeline=trajectory carries none: set stage_size=new, or pipeline=agentic"
            )
        if self.rebalance and self.placement != "disaggregated":
            raise ValueError(
                f"rollout.rebalance moves engines between GPUs of their own, and rollout.placement is {self.placement}: set it "
                "to false, or placement=disaggregated"
            )
        if self.placement == "colocated" and self.overlap:
            raise ValueError(
                f"rollout.placement=colocated puts engines to sleep while the trainer trains, and rollout.overlap is "
                f"{self.overlap}: set it to 0, or give engines GPUs of their own (disaggregated)"
            )
        return self

    @property
    def tokens_per_stage(self) -> int:
        """Decoding budget of one sample in one stage."""
        return self.segment_length or -(-self.max_response_tokens // self.segments)


class EvaluateConfig(Settings):
    """The inference loop: Solver, then Verifier and Corrector in turn until a stop rule holds (MarsRL; docs/evaluate.md)."""

    num_problems: Count | None = None
    """held-out problems at most, of each set of data.eval; default: all of a set, 64 where a task makes them or they are
    taken out of data.train"""
    repeat: Count = Field(1, description="avg@n: draws of every problem")
    accept_after: Count = Field(4, description="consecutive 'correct' verdicts that accept a candidate")
    max_iterations: Count | None = None
    """Verifier calls before giving up; default: 10, with compat=marsrl the script's 11"""
    compat: Literal["marsrl"] | None = None
    """marsrl: as the script published with arXiv:2511.11373 plays and counts (docs/evaluate.md), to compare with its
    figures"""
    temperature: Temperature = 0.6
    """sampling temperature in evaluations, above 0, of all agents; agents.<name>.temperature is training's; greedy: top_k=1"""
    top_p: PositiveShare = 0.95
    """likeliest tokens of this probability together are drawn from; 1: all"""
    top_k: int = Field(-1, ge=-1, le=MOST_TOKENS)
    """tokens that are drawn from at most, the likeliest; -1: no bound"""
    fixed_inputs: Count = 160
    """fixed inputs of a Verifier at most, half of them right; of a Corrector at most so many wrong and so many right ones"""

    @property
    def most_verdicts(self) -> int:
        """Upper bound of Verifier calls in an episode. The script verifies once, then up to ten times more."""
        return self.max_iterations or (11 if self.compat == "marsrl" else 10)
