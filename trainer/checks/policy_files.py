"""Checks of a policy's files before a run: its model, reference and adapter, and whether the policy's layout can train them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from marsrl.rollout.adapter import check_start, peft_settings
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import read_key
from marsrl.rollout.engines.draft import read_draft
from marsrl.rollout.engines.refusals import why_not_cut
from marsrl.rollout.imports import check_installed
from marsrl.rollout.model_shape import ModelShape, read_shape
from marsrl.trainer.checks.batch_plan import longest_sequence, shorten_prompts
from marsrl.trainer.checks.models import taught_shape
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.config.policy import why_not_adapter
from marsrl.trainer.config.read import ConfigError
from marsrl.trainer.learner.megatron.layer_choice import choose_layers, why_not_dispatcher
from marsrl.trainer.learner.megatron.layout import check, resolve, why_not_context
from marsrl.trainer.supervised.tutors import WHO_IS_TAUGHT
from marsrl.trainer.torchrun import is_rank_0


def checked_policy(config: RunConfig, name: str, world_size: int, *, trains: bool) -> tuple[RunConfig, list[str]]:
    """Check a policy's model directory; return (config, warnings).

    Prompts in the returned config are limited to the model's positions.
    """
    policy, original, warnings = config.policies[name], config, list[str]()
    longest_sequence(config, name)  # Raises if no agent or judge uses the policy.
    if policy.openai is not None:  # the directory only provides the tokenizer; the server limits the length
        if policy.openai.api == "completions" and policy.openai.prompt == "text":
            key, reasons = f"policies.{name}.openai.prompt", ChatRenderer(str(policy.model)).why_not_text()
            warnings += [f"{key} is text, and {why}; set it to tokens if the server takes token ids" for why in reasons]
        if is_rank_0():  # one query of the server is enough
            check_installed(f"policies.{name}.openai", "httpx", extra="openai")
            if policy.openai.api_key_env is not None:
                read_key(policy.openai.api_key_env, f"policies.{name}.openai.api_key_env")
        return config, warnings
    is_trained = trains and name in config.trained_policies
    shape = taught_shape(config, policy) if policy.model is None else read_shape(policy.model)
    if shape is None:
        raise ConfigError(
            f"policies.{name}.model is not set, and this team has no built-in warm start; give a Hugging Face model "
            f"directory (`marsrl init` makes a random one to try things with), or {WHO_IS_TAUGHT}"
        )
    if policy.model is not None:
        check_files(policy.model, shape, is_trained=is_trained or (trains and name in config.bases))
    if reason := why_not_cut(shape, config.rollout_of(name).vllm):
        raise ConfigError(f"policies.{name}.model: {reason}")
    vllm = config.rollout_of(name).vllm
    if vllm.draft_model is not None and config.rollout.engine == "vllm":
        try:
            read_draft(vllm.draft_model, shape)
        except ValueError as error:
            raise ConfigError(f"policies.{name}: {error}") from error
    if vllm.kv_cache_dtype != "auto" and shape.has_qkv_bias and config.rollout.engine == "vllm":
        warnings.append(
            f"rollout.vllm.kv_cache_dtype is {vllm.kv_cache_dtype}, but policies.{name}.model is a {shape.architecture}, whose "
            "biases can make keys too large for FP8 without scales: such engines have returned nonsense; set it to auto"
        )
    check_adapter(name, policy, shape)
    warnings += _of_another_base(name, policy)
    if is_trained:
        check_trainable(config, name, shape, world_size)
    config = shorten_prompts(config, name, shape.max_positions, trains=trains)
    return config, warnings + _shorter_than_asked(original, config)


def _shorter_than_asked(original: RunConfig, config: RunConfig) -> list[str]:
    """Return warnings about explicitly set prompt lengths that were lowered; defaults are lowered silently."""
    return [
        f"agents.{name}.max_input_tokens is {agent.max_input_tokens}, lowered to {config.agents[name].max_input_tokens}: "
        "the model's positions and a micro-batch leave no more room next to the agent's completion"
        for name, agent in original.agents.items()
        if "max_input_tokens" in agent.model_fields_set
        and config.agents[name].max_input_tokens < agent.max_input_tokens
    ]


def check_trainable(config: RunConfig, name: str, shape: ModelShape, world_size: int) -> None:
    """Check that the layout can split the model and its reference, and that it supports the configured loss."""
    from marsrl.trainer.learner.megatron.hf_files import HfReader

    layout, dispatcher = resolve(config.policies[name].layout), config.policies[name].dispatcher
    check(layout, shape, world_size)
    choose_layers(config.policies[name].layers)
    why = why_not_dispatcher(dispatcher, layout.expert * layout.expert_tensor)
    if dispatcher != "alltoall" and not shape.num_experts:
        why = f"policies.{name}.model is a {shape.architecture} without experts"
    if why is not None:
        raise ConfigError(f"policies.{name}.dispatcher is {dispatcher}, but {why}; set alltoall")
    if config.policies[name].overlap_dispatch and layout.expert == shape.num_experts:
        raise ConfigError(  # megatron-core 0.16.1 would free the rows that this expert's backward pass reads.
            f"policies.{name}.overlap_dispatch is true, but layout.expert={layout.expert} leaves one expert on each rank; "
            "lower layout.expert, or set overlap_dispatch=false"
        )
    if reason := why_not_context(layout, config.loss.ratio, config.loss.correction):
        raise ConfigError(f"policies.{name}.{reason}")
    if config.trainer.router_replay != "none" and not shape.num_experts:
        raise ConfigError(
            f"trainer.router_replay={config.trainer.router_replay}, but policies.{name}.model is a "
            f"{shape.architecture} without experts; set it to none"
        )
    if config.policies[name].router_aux_loss and not shape.num_experts:
        raise ConfigError(
            f"policies.{name}.router_aux_loss is {config.policies[name].router_aux_loss:g}, but policies.{name}.model is a "
            f"{shape.architecture} without experts; set it to 0"
        )
    reference = config.policies[name].reference
    if config.loss.kl != "none" and reference not in ("none", "start", "past"):
        try:
            other = read_shape(reference)
            HfReader(reference).check(other, is_trained=True)
        except ValueError as error:
            raise ConfigError(f"policies.{name}.reference: {str(error).removeprefix('model: ')}") from error
        check(layout, other, world_size)
        if other.vocab_size != shape.vocab_size:
            raise ConfigError(
                f"policies.{name}.reference has a vocabulary of {other.vocab_size}, but policies.{name}.model has "
                f"{shape.vocab_size}; the reference scores the policy's tokens: name one with the same tokenizer"
            )


def check_adapter(name: str, policy: PolicyConfig, shape: ModelShape) -> None:
    """Check that the model has the adapter's targets, and that the adapter uses every tensor of its `start` directory."""
    adapter = policy.adapter
    if adapter is None:
        return
    if (reason := why_not_adapter(adapter, shape, policy.layout)) is not None:
        raise ConfigError(f"policies.{name}.{reason}")
    if adapter.start is not None:
        try:
            check_start(Path(adapter.start), shape, adapter)
        except ValueError as error:
            raise ConfigError(f"policies.{name}.{error}") from error


def _of_another_base(name: str, policy: PolicyConfig) -> list[str]:
    """Return a warning if the base of adapter.start has another name, or other weights, than the policy's model."""
    from marsrl.trainer.learner.megatron.hf_files import weights_sum

    model = policy.model
    if policy.adapter is None or policy.adapter.start is None or model is None:
        return []
    base = str(peft_settings(Path(policy.adapter.start)).get("base_model_name_or_path") or model)
    # Folders in the Hub's cache have names such as models--Qwen--Qwen3-8B.
    is_same = Path(base).name.lower() == Path(model).name.lower() or base.replace("/", "--") in model
    with suppress(ValueError):  # The folder may have no weights.
        if Path(base).is_dir():
            is_same = weights_sum(base) == weights_sum(model)
    if is_same:
        return []
    key = f"policies.{name}"
    return [
        f"{key}.adapter.start was trained on {base}, but {key}.model is {model}; check that these are the same weights"
    ]


def check_files(model: str, shape: ModelShape, *, is_trained: bool) -> None:
    """Check that the weight files' headers match config.json, and that the tokenizer can render chats."""
    from marsrl.trainer.learner.megatron.hf_files import HfReader

    HfReader(model).check(shape, is_trained=is_trained)
    vocab_size = ChatRenderer(model).vocab_size
    if vocab_size > shape.vocab_size:
        raise ConfigError(
            f"model: {model}: the tokenizer has {vocab_size} tokens, but config.json's vocab_size is {shape.vocab_size}; they "
            "come from different models: restore the model's own files"
        )
