"""policies.<name>: a model, how ranks hold it, its optimizer, its engines; rules of adapters and their bases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.agents.byte_tokenizer import byte_tokenizer_directory
from marsrl.rollout.config import MOST_RANKS, CountOr0, OpenAIOptions, Ranks, Settings, Share, ShareBelow1, VllmOptions
from marsrl.rollout.model_shape import ModelShape


class LayoutConfig(Settings):
    """Split of a policy over ranks (Megatron's sizes); the same for all trained policies (docs/parallelism.md)."""

    tensor: Ranks = 1
    """ranks that share every matrix and the vocabulary; for a model too large for one GPU, within a host: two collectives a
    layer"""
    expert: Ranks = 1
    """ranks that share the experts of a layer, each whole on one; MoE models only, before a larger `tensor`"""
    expert_tensor: int | None = Field(None, gt=0, le=MOST_RANKS)
    """ranks that share each expert's matrices; default: `tensor` for expert 1, else 1"""
    pipeline: Ranks = 1
    """ranks that share the layers; for a model too large for one host: ranks idle while the first and last micro-batches
    pass"""
    context: Ranks = 1
    """ranks that share each sequence's tokens; for completions whose activations do not fit even with recompute: full"""


class OptimizerConfig(Settings):
    """AdamW. The paper: 1e-6 constant."""

    lr: float = Field(1e-6, ge=0)
    """learning rate at its peak; lower it where actor/entropy or actor/grad_norm runs away (docs/troubleshooting.md)"""
    warmup_steps: CountOr0 = 0
    """steps in which the learning rate rises from lr / warmup_steps to lr"""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """how the learning rate falls after the warm-up, to final_lr_ratio at run.steps; a resume with more steps stretches it, and
    tells both rates"""
    final_lr_ratio: Share = Field(0.0, description="learning rate of the last step over `lr`, for a decay")
    betas: tuple[ShareBelow1, ShareBelow1] = (0.9, 0.95)
    """how much the averages of the gradient and of its square keep of themselves a step"""
    eps: float = Field(1e-8, gt=0)
    """added to the root of the averaged square that divides the step, against a division by 0"""
    weight_decay: float = Field(0.0, ge=0)
    """share of each weight, times the learning rate, that a step takes off it, but for norms and biases; 0: RL moves weights
    little"""
    grad_clip: float = Field(1.0, gt=0)
    """gradients of a larger norm, over all of the policy's weights, are scaled down to it"""
    offload: bool = Field(False, description="optimizer state in CPU memory (GPU only)")
    distributed: bool = Field(True, description="state cut over data-parallel ranks; false: a whole copy on each")
    overlap_grad_reduce: bool = False
    """gradients are reduced while the backward still runs; an adapter's, which are few, are not"""
    overlap_param_gather: bool = False
    """updated weights are gathered as the next forward needs them; an adapter's at once"""

    def lr_at(self, step: int, total_steps: int) -> float:
        """The learning rate of step `step` (from 0) of `total_steps`: linear warm-up, then decay.

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
            raise ValueError(
                "optimizer.offload needs optimizer.distributed: set distributed=true, or leave offload out"
            )
        if self.overlap_param_gather and not (self.distributed and self.overlap_grad_reduce):
            raise ValueError(
                "optimizer.overlap_param_gather needs optimizer.distributed and optimizer.overlap_grad_reduce: set both"
            )
        return self


class PriceConfig(Settings):
    """The price of a million tokens, in any one currency."""

    input: float = Field(ge=0, description="prompt tokens")
    cached_input: float | None = Field(None, ge=0)
    """prompt tokens from the engine's cache; default: as input"""
    output: float = Field(ge=0, description="decoded tokens")

    def of(self, input_tokens: float, cached_tokens: float, output_tokens: float) -> float:
        """Cost of these tokens; input_tokens include cached_tokens."""
        cached = self.input if self.cached_input is None else self.cached_input
        whole = (input_tokens - cached_tokens) * self.input + cached_tokens * cached + output_tokens * self.output
        return whole / 1e6


class PolicyConfig(Settings):
    model: str | None = None
    """HF directory (Qwen2.5, Qwen3, Llama 3, Mistral); null: the warm-started one"""
    base: str | None = None
    """another policy, whose model it has, frozen; what is trained is `adapter` (docs/adapters.md)"""
    adapter: AdapterConfig | None = None
    """train a low-rank adapter (LoRA) of the model, whose own weights stay (docs/adapters.md); null: train all"""
    shape: Literal["tiny", "cpu_default"] | None = None
    """size of the warm-started one, as `marsrl init` names it; default: cpu_default"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of weights and activations in training, and of the engines by default; auto: bfloat16 on GPUs and on CPUs that compute with
    it (AVX512-BF16, AMX-BF16), else float32. A run keeps the one that it began with, also on another machine (config.yaml)"""
    layout: LayoutConfig = LayoutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    recompute: Literal["none", "selective", "full", "full_offload"] = "none"
    """what a layer's backward makes again; selective: norms and MLP or experts' activation; full: all, from the layer's
    input; full_offload: and that waits in CPU memory (GPU only)"""
    layers: Literal["auto", "transformer_engine", "ours"] = "auto"
    """norms and linear layers; auto: TransformerEngine's where it is installed with a GPU, else ours"""
    deterministic: bool = False
    """on a GPU, attention and embedding add their gradients in a fixed order, which flash-attn does with more memory
    (docs/plan.md); a CPU always does"""
    router_aux_loss: float = Field(0.0, ge=0)
    """coefficient of the MoE load-balancing loss over all tokens of an update, on all ranks, padding left out; above 0, an update
    of several micro-batches takes a forward pass more to count their experts first, unless the old log-probs' pass has
    (docs/numerics.md)"""
    reference: str = "none"
    """frozen weights of loss.kl on the same ranks: none | start (those that training starts from) | HF directory"""
    engines: int | None = Field(None, gt=0, le=MOST_RANKS)
    """engine replicas of this policy; default: rollout.engines"""
    vllm: VllmOptions | None = Field(None, description="of this policy's engines; what it leaves out is rollout.vllm's")
    price: PriceConfig | None = None
    """of a million tokens: what agents spend is logged (cost/<agent>/spent) and evaluated"""
    frozen: bool = False
    """never trained: no learner, no weight sync; its engines keep `model` (docs/frozen_policies.md)"""
    engine: Literal["openai"] | None = None
    """openai: a server answers (frozen policies only), `model` gives the tokenizer, but for openai.api=chat; default:
    rollout.engine"""
    openai: OpenAIOptions | None = Field(None, description="the server of engine: openai")
    tool_parser: str | None = None
    """orchestration=external (docs/external.md): vLLM's name of what reads the model's calls of tools (Qwen2.5, Qwen3: hermes);
    default: programs cannot give tools"""
    reasoning_parser: str | None = None
    """orchestration=external (docs/external.md): vLLM's name of what parts thoughts from the rest (Qwen3: qwen3); default: they
    are part of the text"""

    @property
    def directory(self) -> str | None:
        """The directory with its tokenizer; None: the warm-started model's."""
        return byte_tokenizer_directory() if self.is_chat else self.model

    @property
    def is_chat(self) -> bool:
        """True if a server renders its chats and counts their tokens."""
        return self.openai is not None and self.openai.api == "chat"

    @property
    def decided_dtype(self) -> Literal["float32", "bfloat16"]:
        """The dtype, which preflight has decided if it was auto."""
        assert self.dtype != "auto", "decided by preflight"
        return self.dtype


OF_BASE = ("model", "shape", "dtype", "layout", "recompute", "layers", "deterministic")  # of the one frozen copy


def on_base(policies: Mapping[str, PolicyConfig], name: str) -> PolicyConfig:
    """The policy with what its base, if it has one, says of its model.

    Raises ValueError: the base is missing or is none, or the policy contradicts it.
    """
    policy = policies[name]
    if policy.base is None:
        return policy
    base = policies.get(policy.base)
    key = f"policies.{name}.base is {policy.base}"
    if base is None or base is policy:
        others = ", ".join(other for other in policies if other != name) or "no other"
        raise ValueError(f"{key}, which is not another policy (there is {others})")
    if base.base is not None:
        raise ValueError(f"{key}, which is built on {base.base} itself: name that one")
    if base.openai is not None or base.engine == "openai":
        raise ValueError(f"{key}, which a server answers for (engine: openai): an adapter needs its weights here")
    if policy.adapter is None:
        raise ValueError(
            f"{key}, and policies.{name}.adapter is not set: an adapter is what is trained of it, set {{}}"
        )
    if policy.frozen:
        raise ValueError(f"{key}, and policies.{name}.frozen is true: a policy is built on another one to be trained")
    for setting in OF_BASE:
        own, given = getattr(policy, setting), getattr(base, setting)
        if setting in policy.model_fields_set and own != given:
            own, given = (value.model_dump() if isinstance(value, LayoutConfig) else value for value in (own, given))
            raise ValueError(f"policies.{name}.{setting} is {own}, and it has its base's ({given}): leave it out")
    return policy.model_copy(update={setting: getattr(base, setting) for setting in OF_BASE})


def why_not_adapter(adapter: AdapterConfig, shape: ModelShape, layout: LayoutConfig) -> str | None:
    """None where the model has what the adapter is for and the layout can hold it, else the reason."""
    if set(adapter.targets) == {"mlp"} and shape.num_experts:
        return f"adapter.targets names mlp alone, and {shape.architecture} has experts in its place: name attention, or experts"
    if "experts" not in adapter.targets:
        return None
    if not shape.num_experts:
        return f"adapter.targets names experts, and {shape.architecture} has none: name mlp"
    expert_tensor = layout.expert_tensor or (layout.tensor if layout.expert == 1 else 1)
    if expert_tensor > 1:
        return (
            f"adapter.targets names experts, which layout.expert_tensor={expert_tensor} cuts: set layout.expert above 1 with "
            "expert_tensor 1, or leave experts out"
        )
    return None
