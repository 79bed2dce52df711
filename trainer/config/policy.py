"""Settings under policies.<name>: model, layout over ranks, optimizer, engines; rules for adapters and their bases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field, model_validator

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.agents.byte_tokenizer import byte_tokenizer_directory
from marsrl.rollout.config import (
    MOST_RANKS,
    CountOr0,
    OpenAIOptions,
    Ranks,
    RolloutConfig,
    Settings,
    Share,
    ShareBelow1,
    VllmOptions,
)
from marsrl.rollout.model_shape import ModelShape


class LayoutConfig(Settings):
    """Parallel sizes of a policy (Megatron's); all trained policies use the same (docs/parallelism.md)."""

    tensor: Ranks = 1
    """tensor-parallel size: ranks that split every matrix and the vocabulary; for a model too large for one GPU; keep these
    ranks on one host, because each layer has two collectives"""
    expert: Ranks = 1
    """expert-parallel size: ranks that split a layer's experts, each expert whole on one rank; MoE models only; raise it before
    `tensor`"""
    expert_tensor: int | None = Field(None, gt=0, le=MOST_RANKS)
    """ranks that split each expert's matrices; default: `tensor` if expert is 1, else 1"""
    pipeline: Ranks = 1
    """pipeline-parallel size: ranks that split the layers; for a model too large for one host; ranks idle during the first and
    last micro-batches"""
    context: Ranks = 1
    """context-parallel size: ranks that split each sequence; for sequences whose activations do not fit even with recompute:
    full"""

    @property
    def tensor_of_experts(self) -> int:
        """expert_tensor, with its default filled in."""
        return self.expert_tensor or (self.tensor if self.expert == 1 else 1)


class OptimizerConfig(Settings):
    """AdamW. MarsRL uses a constant learning rate of 1e-6."""

    lr: float = Field(1e-6, ge=0)
    """peak learning rate; lower it if actor/entropy or actor/grad_norm diverges (docs/troubleshooting.md)"""
    warmup_steps: CountOr0 = 0
    """steps of linear warm-up, from lr / warmup_steps to lr"""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """schedule after the warm-up, down to lr x final_lr_ratio at run.steps; resuming with a larger run.steps stretches the
    schedule and logs both rates"""
    final_lr_ratio: Share = Field(0.0, description="final learning rate divided by `lr`, if it decays")
    betas: tuple[ShareBelow1, ShareBelow1] = (0.9, 0.95)
    """decay rates of the running averages of the gradient and of its square"""
    eps: float = Field(1e-8, gt=0)
    """added to the denominator for numerical stability"""
    weight_decay: float = Field(0.0, ge=0)
    """weight decay coefficient; not applied to norms and biases; default 0, because RL moves weights little"""
    grad_clip: float = Field(1.0, gt=0)
    """largest gradient norm over all weights of the policy; larger gradients are scaled down to it"""
    offload: bool = Field(False, description="keep the optimizer state in CPU memory (GPU only)")
    distributed: bool = Field(True, description="shard the state over data-parallel ranks; false: a full copy on each")
    overlap_grad_reduce: bool = False
    """reduce gradients while the backward pass runs; no effect on adapters, whose gradients are small"""
    overlap_param_gather: bool = False
    """gather updated weights as the next forward pass needs them; adapters are gathered at once"""

    def lr_at(self, step: int, total_steps: int) -> float:
        """Return the learning rate of step `step` (from 0) of `total_steps`: linear warm-up, then decay.

        Warm-up: lr (step + 1) / warmup_steps. The decay reaches lr * final_lr_ratio at the last step and stays there.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.lr
        span = max(1, total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        share = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.final_lr_ratio + (1.0 - self.final_lr_ratio) * share)

    @model_validator(mode="after")
    def _parts_agree(self) -> OptimizerConfig:
        if self.offload and not self.distributed:
            raise ValueError("optimizer.offload needs optimizer.distributed; set distributed=true, or remove offload")
        if self.overlap_param_gather and not (self.distributed and self.overlap_grad_reduce):
            raise ValueError(
                "optimizer.overlap_param_gather needs optimizer.distributed and optimizer.overlap_grad_reduce; set both true"
            )
        return self


class PolicyConfig(Settings):
    model: str | None = None
    """HF directory (Qwen2.5, Qwen3, Llama 3, Mistral); null: the warm-started model"""
    base: str | None = None
    """another policy whose frozen model this one shares; only `adapter` is trained (docs/adapters.md)"""
    adapter: AdapterConfig | None = None
    """train a low-rank adapter (LoRA) and keep the model's weights (docs/adapters.md); null: train all weights"""
    shape: Literal["tiny", "cpu_default"] | None = None
    """size of the warm-started model, as `marsrl init` names it; default: cpu_default"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of weights and activations in training, and the engines' default; auto: bfloat16 on GPUs and on CPUs with native
    support (AVX512-BF16, AMX-BF16), else float32. A resumed run keeps its dtype, even on another machine (config.yaml)"""
    layout: LayoutConfig = LayoutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    recompute: Literal["none", "selective", "full_but_attention", "full", "full_offload"] = "none"
    """activations that the backward pass recomputes; selective: norms and the activation of MLP or experts; full: all of a
    layer, from its input; full_but_attention: as full, but attention's output is kept; full_offload: as full, with the inputs in
    CPU memory (GPU only)"""
    dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    """exchange of tokens between ranks with different experts; alltoall: NCCL's all-to-all; deepep, hybridep: DeepEP's
    kernels, which must be installed and need a GPU and bfloat16 (docs/parallelism.md); not tested on GPUs"""
    overlap_dispatch: bool = False
    """exchange experts' tokens of one micro-batch while another computes (docs/parallelism.md); needs layout.expert above 1,
    bfloat16, and recompute none or selective; not tested on GPUs"""
    layers: Literal["auto", "transformer_engine", "ours"] = "auto"
    """implementation of norms and linear layers; auto: ours; transformer_engine is not tested on GPUs"""
    deterministic: bool = False
    """on a GPU, attention and embedding accumulate gradients in a fixed order, which needs more memory with flash-attn
    (docs/plan.md); CPUs are always deterministic"""
    router_aux_loss: float = Field(0.0, ge=0)
    """coefficient of the MoE load-balancing loss over all tokens of an update on all ranks, without padding. If it is above 0, an
    update of several micro-batches takes an extra forward pass to count tokens per expert, unless the pass for the old log-probs
    has counted them (docs/numerics.md)"""
    reference: str = "none"
    """reference weights of loss.kl, on the same ranks: none | start (the initial weights) | HF directory | past (an earlier
    version of this policy, see reference_every; docs/credit.md)"""
    reference_every: int | None = Field(None, gt=0)
    """reference=past: number of versions between refreshes; the reference is the newest version that is a multiple of this
    number, and before the first of these the initial weights"""
    engines: int | None = Field(None, gt=0, le=MOST_RANKS)
    """engine replicas of this policy; default: rollout.engines"""
    vllm: VllmOptions | None = Field(None, description="overrides rollout.vllm, key by key, for this policy's engines")
    frozen: bool = False
    """do not train this policy: no learner and no weight sync; the engines keep `model` (docs/frozen_policies.md)"""
    engine: Literal["openai"] | None = None
    """openai: an OpenAI-compatible server answers (frozen policies only); `model` then gives the tokenizer, except with
    openai.api=chat; default: rollout.engine"""
    openai: OpenAIOptions | None = Field(None, description="the server, for engine: openai")
    tool_parser: str | None = None
    """vLLM's name of the tool-call parser (Qwen2.5, Qwen3: hermes), for orchestration=external (docs/external.md); default:
    programs cannot pass tools"""
    reasoning_parser: str | None = None
    """vLLM's name of the reasoning parser (Qwen3: qwen3), for orchestration=external (docs/external.md); default: reasoning stays
    part of the text"""

    @property
    def directory(self) -> str | None:
        """Directory with the policy's tokenizer; None for a warm-started model."""
        return byte_tokenizer_directory() if self.is_chat else self.model

    @property
    def is_chat(self) -> bool:
        """True if a server renders the chats and counts their tokens."""
        return self.openai is not None and self.openai.api == "chat"

    @property
    def decided_dtype(self) -> Literal["float32", "bfloat16"]:
        """The dtype, after preflight has resolved auto."""
        assert self.dtype != "auto", "decided by preflight"
        return self.dtype

    def why_not(self, key: str, rollout: RolloutConfig, *, kl: str, is_trained: bool) -> Iterator[str]:
        """Yield settings that contradict each other, the rollout, or loss.kl. key: `policies.<name>`, for the messages."""
        if self.shape is not None and self.model is not None:
            yield (
                f"{key}.shape is {self.shape}, the size of a warm-started policy, but {key}.model is {self.model}; set one null"
            )
        if self.optimizer.offload and self.dtype == "float32":
            yield (
                f"{key}.optimizer.offload needs bfloat16 weights, but {key}.dtype is float32; set bfloat16, or offload=false"
            )
        if (self.engine == "openai") != (self.openai is not None):
            yield (
                f"{key}: found engine={self.engine} {'with a' if self.openai else 'without a'} section openai; set both "
                "engine=openai and openai (base_url, model), or neither"
            )
        if self.engine == "openai" and (self.engines is not None or self.vllm is not None):
            yield (
                f"{key}.{'engines' if self.engines else 'vllm'} is set, but {key}.engine=openai starts no engines; remove it"
            )
        if self.dispatcher != "alltoall" and self.layout.expert * self.layout.tensor_of_experts == 1:
            yield (
                f"{key}.dispatcher is {self.dispatcher}, but {key}.layout keeps all experts on each rank; set layout.expert "
                "above 1, or dispatcher=alltoall"
            )
        if self.dispatcher != "alltoall" and self.dtype == "float32":
            yield (
                f"{key}.dispatcher is {self.dispatcher}, which sums only bfloat16, but {key}.dtype is float32; set bfloat16, or "
                "dispatcher=alltoall"
            )
        if self.overlap_dispatch:
            for setting, is_right, expected in (
                (f"layout.expert is {self.layout.expert}", self.layout.expert > 1, "above 1"),
                (f"layout.pipeline is {self.layout.pipeline}", self.layout.pipeline == 1, "1"),
                (f"recompute is {self.recompute}", self.recompute in ("none", "selective"), "none or selective"),
                (f"dtype is {self.dtype}", self.dtype != "float32", "bfloat16"),
            ):
                if not is_right:
                    yield f"{key}.overlap_dispatch is true, but {key}.{setting}; set {expected}, or overlap_dispatch=false"
        if self.engine == "openai" and not self.frozen:
            yield (
                f"{key}: a policy with engine=openai cannot be trained, because the server returns no token ids or log-probs "
                "and accepts no weights; set frozen=true and remove its agents from credit.train_agents"
            )
        if not self.is_chat and self.frozen and self.model is None:
            yield (
                f"{key}: a frozen policy needs `model`, a Hugging Face directory (with engine=openai the tokenizer is enough; "
                "with openai.api=chat nothing is needed)"
            )
        if self.adapter is not None and self.frozen:
            yield f"{key}.adapter is set, but {key}.frozen is true; adapters are trained: remove one of them"
        if self.adapter is not None and self.router_aux_loss:
            yield (
                f"{key}.router_aux_loss is {self.router_aux_loss:g}, but {key}.adapter does not train the router; set 0"
            )
        if rollout.placement == "colocated" and self.engines not in (None, rollout.engines):
            yield (
                f"{key}.engines is {self.engines}, but rollout.placement=colocated puts one engine of every policy on each "
                "rank's GPU; remove it, or set rollout.placement=disaggregated"
            )
        if kl != "none" and self.reference == "none" and is_trained:
            yield f"loss.kl={kl} needs a reference, but {key}.reference is none; set start, past or an HF directory"
        if (self.reference == "past") != (self.reference_every is not None):
            yield (
                f"{key}.reference is {self.reference}, but {key}.reference_every is {self.reference_every or 'not set'}; set "
                "both reference=past and reference_every (versions between refreshes), or neither"
            )
        if self.reference == "past" and kl == "none":
            yield f"{key}.reference is past, but loss.kl is none; set loss.kl=k3, or {key}.reference=none"


OF_BASE = (
    "model",
    "shape",
    "dtype",
    "layout",
    "recompute",
    "dispatcher",
    "overlap_dispatch",
    "layers",
    "deterministic",
)
"""Settings that a policy takes from its base, because both use one frozen copy of the weights."""


def on_base(policies: Mapping[str, PolicyConfig], name: str) -> PolicyConfig:
    """Return the policy with the model settings of its base, if it has one.

    Raises ValueError if the base is missing, cannot serve as a base, or contradicts the policy.
    """
    policy = policies[name]
    if policy.base is None:
        return policy
    base = policies.get(policy.base)
    key = f"policies.{name}.base is {policy.base}"
    if base is None or base is policy:
        others = ", ".join(other for other in policies if other != name) or "none is configured"
        raise ValueError(f"{key}; expected the name of another policy: {others}")
    if base.base is not None:
        raise ValueError(f"{key}, which itself has base {base.base}; name {base.base} instead")
    if base.openai is not None or base.engine == "openai":
        raise ValueError(
            f"{key}, which a server serves (engine: openai), but an adapter needs local weights; name another"
        )
    if policy.adapter is None:
        raise ValueError(f"{key}, but policies.{name}.adapter is not set; set it ({{}} for the defaults)")
    if policy.frozen:
        raise ValueError(
            f"{key}, but policies.{name}.frozen is true; only a trained policy can have a base: remove one"
        )
    for setting in OF_BASE:
        value, expected = getattr(policy, setting), getattr(base, setting)
        if setting in policy.model_fields_set and value != expected:
            value, expected = (v.model_dump() if isinstance(v, LayoutConfig) else v for v in (value, expected))
            raise ValueError(f"policies.{name}.{setting} is {value}, but its base has {expected}; remove the setting")
    return policy.model_copy(update={setting: getattr(base, setting) for setting in OF_BASE})


def why_not_adapter(adapter: AdapterConfig, shape: ModelShape, layout: LayoutConfig) -> str | None:
    """Return why the adapter does not fit the model or the layout; None if it fits."""
    if set(adapter.targets) == {"mlp"} and shape.num_experts:
        return f"adapter.targets is mlp only, but {shape.architecture} has experts instead; set attention or experts"
    if "experts" not in adapter.targets:
        return None
    if not shape.num_experts:
        return f"adapter.targets includes experts, but {shape.architecture} has none; set mlp"
    if layout.tensor_of_experts > 1:
        return (
            f"adapter.targets includes experts, which layout.expert_tensor={layout.tensor_of_experts} splits; set layout.expert "
            "above 1 with expert_tensor 1, or remove experts"
        )
    return None
