"""Cheap checks of a whole run, before process groups, Ray or engines start."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from marsrl.rollout.adapter import check_start, peft_settings
from marsrl.rollout.agents import returned
from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import Settings, read_key
from marsrl.rollout.engines.refusals import TrainerHost, this_host, why_not_cut
from marsrl.rollout.engines.vllm.arguments import who_draws
from marsrl.rollout.episode import Episode
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.vllm_reader import agents_of
from marsrl.rollout.gateway.workers import check_program, workers_key
from marsrl.rollout.imports import check_installed
from marsrl.rollout.model_shape import ModelShape, read_shape
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.tasks.data import fingerprint
from marsrl.rollout.tasks.find_task import lists_problems
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.tasks.registry import TOKENIZERS, build_task
from marsrl.rollout.tools.build import check_tools
from marsrl.rollout.types import Ask, Problem, ToolFunction
from marsrl.trainer.checks.batch_plan import (
    batch_plan,
    longest_sequence,
    shorten_prompts,
    why_not_one_micro_batch,
)
from marsrl.trainer.checks.device import why_not_device
from marsrl.trainer.checks.dtypes import decide_dtypes
from marsrl.trainer.checks.models import taught_shape
from marsrl.trainer.checks.placement import placement_lines, with_backend
from marsrl.trainer.checks.problems import RunProblems, problems_of, sources
from marsrl.trainer.checks.refusals import (
    check_machine,
    engines_device,
    slow_records,
    stale_samples,
    vllm_of,
    why_not_backend,
)
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.config.agreement import check_agreement
from marsrl.trainer.config.policy import why_not_adapter
from marsrl.trainer.config.read import ConfigError
from marsrl.trainer.learner.megatron.layer_choice import choose_layers
from marsrl.trainer.learner.megatron.layout import check, resolve, why_not_context
from marsrl.trainer.schools.schools import school_of, who_is_taught
from marsrl.trainer.torchrun import is_rank_0

_NUM_CHECKED = 64  # Prompts of a team's first agent to check, if all of them fit.


@dataclass(frozen=True, slots=True)
class Checked:
    """Settings that agree with each other and with the files on disk. `task` has read its problems.

    plan: batch sizes of a step, as text. placement: the rank or engine of each GPU, as text. ends: by policy, the tokens that
    end its completions, as text. warnings: likely mistakes. curators: policies used only by `marsrl curate`,
    not by runs. dtypes: how auto was resolved, and why, as text.
    """

    config: RunConfig
    plan: tuple[str, ...]
    task: Task
    problems: RunProblems
    host: TrainerHost
    placement: tuple[str, ...]
    ends: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    curators: Mapping[str, PolicyConfig] = field(default_factory=dict)
    dtypes: Sequence[str] = ()

    def fingerprints(self) -> dict[str, dict[str, int | str]]:
        found = zip(sources(self.config.task), (self.problems.train, self.problems.held_out), strict=True)
        return {key: fingerprint(problems) for key, problems in found if problems}

    def settings(self) -> str:
        """All resolved settings, as YAML."""
        whole = self.config.model_copy(update={"policies": {**self.config.policies, **self.curators}})
        return yaml.safe_dump(whole.model_dump(mode="json"), sort_keys=False)

    def text(self) -> str:
        """Summary of the run: batch sizes, placement, data, warnings."""
        lines = ["batch arithmetic:", *(f"  {line}" for line in self.plan)]
        lines += ["placement:", *(f"  {line}" for line in self.placement)]
        if self.problems.num_skipped:
            lines.append(f"{self.problems.num_skipped} lines of the data could not be read and were skipped")
        of_train, of_eval = sources(self.config.task)
        num, most = len(self.problems.held_out), self.config.evaluate.num_problems
        if self.problems.num_taken:
            none = "held_out is empty" if lists_problems(self.config.task) else "no data.eval is given"
            whole = num + len(self.problems.train)
            lines.append(f"held out of {of_train} for evaluation: {num} of {whole:,} problems ({none})")
        elif num:
            least = (
                f", fewer than evaluate.num_problems = {most:,}"
                if most and num < most and not self.problems.sets
                else ""
            )
            lines.append(
                f"problems to evaluate on: {num if self.problems.sets or not most else min(num, most):,} of {of_eval}{least}"
            )
        lines += [f"policies.{name}: used only by marsrl curate" for name in self.curators]
        lines += self.dtypes
        device = engines_device(self.host)
        lines += [f"policies.{name}: {who_draws(vllm, device)}" for name, vllm in vllm_of(self.config).items()]
        lines += [f"a turn of policies.{name} ends with {ends}" for name, ends in self.ends.items()]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def preflight(
    config: RunConfig,
    world_size: int,
    *,
    trains: bool = True,
    given: Sequence[Problem] | None = None,
    began: RunConfig | None = None,
) -> Checked:
    """Resolve and check the settings. Reads the data files, inspects the model directories, and briefly starts the user's
    tools; starts nothing else.

    trains: False if the team is only evaluated: no trainer uses the GPUs, and problems of data.eval suffice.
    given: problems to evaluate on, instead of those in the data files.
    began: settings of the run or evaluation to resume, whose dtypes are kept.

    Raises:
        ValueError: settings, data or a model directory are invalid; the message has what was found and expected.
        OSError: a file cannot be read.
    """
    import torch

    if (reason := why_not_device(config.run.device)) is not None:
        raise ConfigError(f"run.device is {config.run.device}: {reason}")
    has_cuda = torch.cuda.is_available()
    config, dtypes = decide_dtypes(config, began)
    if dtypes:
        check_agreement(config, trains=trains)
    curators, config = config.curators, with_backend(config.without_curators(), on_gpus=has_cuda)
    host = this_host(config.rollout.ray_address, trains=trains)
    if not trains:
        config = config.without_teachers()
    else:
        _check_something_trains(config)
        check_layouts(config)
        if config.run.wandb is not None:
            check_installed(f"run.wandb={config.run.wandb}", "wandb", otherwise="unset run.wandb")
        _check_prometheus(config.run.prometheus_port)
    check_machine(config, host)
    problems = problems_of(config, trains=trains, given=given)
    task = build_task(config.task, config.task_options, problems.train, problems.held_out)
    orchestration = build_orchestration(  # Raises if a prompt is invalid.
        config.orchestration,
        config.agents,
        task.prompts,
        config.orchestration_options,
        config.rollout,
        tools=config.tools.given,
    )
    functions = check_tools(config.tools, orchestration.tools, task.documents, task.papers)
    if config.external is not None:
        check_external(config.external)
    warnings = list(problems.warnings)
    for name in config.policies:
        config, found = _checked_policy(config, name, world_size, trains=trains)
        warnings += found
    _check_teachers(config)
    if any(map(any, config.parsers.values())):
        _check_parsers(config)
    warnings += _check_judge(config, problems, trains=trains)
    gated = why_not_one_micro_batch(config, world_size) if trains else None
    if (reason := why_not_backend(config, has_cuda=has_cuda) or gated) is not None:
        raise ConfigError(reason)
    warnings += slow_records(config, host)
    warnings += stale_samples(config) if trains else []
    warnings += _of_the_other_engine(config)
    plan = batch_plan(config, world_size)
    _check_templates(config)
    warnings += _check_first_prompts(config, task, orchestration, functions, len(problems.train) if trains else 0)
    placement = tuple(placement_lines(config, host, world_size))
    ends = {name: _renderer(config, name).ends for name in config.policies if name not in config.teachers}
    return Checked(config, plan, task, problems, host, placement, ends, tuple(warnings), curators, dtypes)


def _of_the_other_engine(config: RunConfig) -> list[str]:
    """Return a warning about non-default settings of the engine that this run does not use."""
    rollout = config.rollout
    sections: dict[str, Settings] = {"rollout.local": rollout.local}
    if rollout.engine == "local":
        sections = {f"policies.{name}.vllm": each.vllm for name, each in config.policies.items() if each.vllm}
        sections["rollout.vllm"] = rollout.vllm
    ignored = [
        f"{section}.{key}"
        for section, given in sections.items()
        for key in sorted(given.model_dump(exclude_defaults=True))
    ]
    return [f"rollout.engine is {rollout.engine}, which ignores {', '.join(ignored)}"] if ignored else []


def _checked_policy(config: RunConfig, name: str, world_size: int, *, trains: bool) -> tuple[RunConfig, list[str]]:
    """Check a policy's model directory; return the config with prompts limited to the model's positions, and warnings."""
    policy, asked, warnings = config.policies[name], config, list[str]()
    longest_sequence(config, name)  # Otherwise no agent uses the policy.
    if policy.openai is not None:  # the directory is for the tokenizer only; the maximum length is the server's
        if policy.openai.api == "completions" and policy.openai.prompt == "text":
            key, reasons = f"policies.{name}.openai.prompt", ChatRenderer(str(policy.model)).why_not_text()
            warnings += [f"{key} is text, and {why}; set it to tokens if the server takes token ids" for why in reasons]
        if is_rank_0():  # it alone asks the server
            check_installed(f"policies.{name}.openai", "httpx", extra="openai")
            if policy.openai.api_key_env is not None:
                read_key(policy.openai.api_key_env, f"policies.{name}.openai.api_key_env")
        return config, warnings
    is_trained = trains and name in config.trained_policies
    shape = taught_shape(config, policy) if policy.model is None else read_shape(policy.model)
    if shape is None:
        raise ConfigError(
            f"policies.{name}.model is not set, and this team has no built-in warm start; give a Hugging Face model "
            f"directory (`marsrl init` makes a random one to try things with), or {who_is_taught()}"
        )
    if policy.model is not None:
        check_files(policy.model, shape, is_trained=is_trained or (trains and name in config.bases))
    if found := why_not_cut(shape, config.rollout_of(name).vllm):
        raise ConfigError(f"policies.{name}.model: {found}")
    check_adapter(name, policy, shape)
    warnings += _of_another_base(name, policy)
    if is_trained:
        check_trainable(config, name, shape, world_size)
    config = shorten_prompts(config, name, shape.max_positions, trains=trains)
    if policy.reference != "none" and config.loss.kl == "none":
        warnings.append(f"policies.{name}.reference is {policy.reference}, but loss.kl is none: it is not loaded")
    return config, warnings + _shorter_than_asked(asked, config)


def _shorter_than_asked(asked: RunConfig, config: RunConfig) -> list[str]:
    """Return warnings about explicitly set prompt lengths that were lowered; defaults are lowered silently."""
    return [
        f"agents.{name}.max_input_tokens is {agent.max_input_tokens}, lowered to {config.agents[name].max_input_tokens}: "
        "the model's positions and a micro-batch leave no more room next to the agent's completion"
        for name, agent in asked.agents.items()
        if "max_input_tokens" in agent.model_fields_set
        and config.agents[name].max_input_tokens < agent.max_input_tokens
    ]


def check_trainable(config: RunConfig, name: str, shape: ModelShape, world_size: int) -> None:
    """Check that the layout can split the model and its reference, and that the loss can be computed on them."""
    from marsrl.trainer.learner.megatron.hf_files import HfReader

    layout = resolve(config.policies[name].layout)
    check(layout, shape, world_size)
    choose_layers(config.policies[name].layers)
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
    if config.loss.kl != "none" and reference not in ("none", "start"):
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
    """Check that the model has the adapter's targets, and that the adapter uses all of the PEFT directory it starts from."""
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


def _check_something_trains(config: RunConfig) -> None:
    """Check that some sample can have a gradient, through an advantage or through a KL or entropy term."""
    credit, loss = config.credit, config.loss
    if config.teachers:
        return
    trained = [name for name in config.agents if credit.trains(name)]
    if all(config.agents[name].loss_weight == 0 for name in trained):
        keys = ", ".join(f"agents.{name}.loss_weight" for name in trained)
        raise ConfigError(f"{keys}: 0 for every trained agent, so nothing would train; raise one")
    if loss.keeps_zero:
        return
    compared_with = {"group": "a sample is compared with those of its group", "trajectory": "episodes are compared"}
    if config.rollout.group_size == 1 and credit.normalise in compared_with and credit.singleton == "zero":
        raise ConfigError(
            f"rollout.group_size is 1, and with credit.normalise={credit.normalise} {compared_with[credit.normalise]}: every "
            "advantage would be 0; raise rollout.group_size, or set credit.singleton=raw or another credit.normalise"
        )


def check_external(external: ExternalConfig) -> str | None:
    """Return the workers' key (None: a random one), after checking that the program can start and the port is free."""
    from marsrl.rollout.http_server import listen

    if not is_rank_0():
        return None
    key = workers_key(external)
    try:
        listen(external.host, external.port).close()
    except OSError as error:
        raise ConfigError(f"external.host={external.host}, external.port={external.port}: {error}") from error
    check_program(external)
    return key


def _check_parsers(config: RunConfig) -> None:
    """Check that vLLM's parsers can read what the models' chat templates write."""
    for name, policy in config.policies.items():
        if (policy.tool_parser or policy.reasoning_parser) and (policy.model is None or config.external is None):
            raise ConfigError(
                f"policies.{name}.tool_parser and reasoning_parser need orchestration=external and a policy with a local "
                "model; remove them"
            )
    renderers = {name: ChatRenderer(policy.model) for name, policy in config.policies.items() if policy.model}
    agents = {name: agent for name, agent in config.agents.items() if agent.policy in renderers}
    agents_of(agents, renderers, config.rollout.max_response_tokens, config.parsers)


def check_layouts(config: RunConfig) -> None:
    """Check that all trained policies have one layout, because ranks share process groups, and that none offloads on a CPU."""
    import torch

    first = next(iter(config.trained_policies))
    for name, policy in config.trained_policies.items():
        if resolve(policy.layout) != resolve(config.policies[first].layout):
            raise ConfigError(
                f"policies.{name}.layout differs from policies.{first}.layout, but all trained policies share one "
                "set of process groups; set the same layout for all"
            )
        offloads = policy.optimizer.offload or policy.recompute == "full_offload"
        if offloads and not torch.cuda.is_available():
            raise ConfigError(
                f"policies.{name} has optimizer.offload=true or recompute=full_offload, but PyTorch sees no CUDA device; "
                "set optimizer.offload=false and recompute=full"
            )


def _check_prometheus(port: int) -> None:
    """Check, on the rank that will open it, that the port is free."""
    if not port or not is_rank_0():
        return
    check_installed(f"run.prometheus_port={port}", "prometheus_client", otherwise="unset it")
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise ConfigError(f"run.prometheus_port={port}: {error.strerror}; set a free port, or 0") from error


def _check_judge(config: RunConfig, problems: RunProblems, *, trains: bool) -> list[str]:
    """Return a warning about problems without a reference answer; raise if no problem has one."""
    judge, warnings = config.judge, list[str]()
    if judge is None:
        return warnings
    of_train, of_eval = sources(config.task)
    judged = [(of_train, problems.train)] if trains and judge.when == "always" else []
    for where, found in [*judged, (of_eval, problems.held_out)]:
        num_without = sum(problem.answer is None for problem in found)
        if found and num_without == len(found):
            raise ConfigError(
                f"judge.policy={judge.policy} needs reference answers, but none of the {len(found)} problems of {where} "
                "has one; add them, or remove the judge so that the task judges"
            )
        if num_without:
            warnings.append(
                f"{num_without} of {len(found)} problems of {where} have no reference answer; answers to them are not "
                "judged and have no reward"
            )
    return warnings


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


def _renderer(config: RunConfig, policy: str) -> ChatRenderer:
    """Return the chat renderer of a policy, also of one that is still to be warm-started."""
    if (folder := config.policies[policy].directory) is not None:
        return ChatRenderer(folder)
    school = school_of(config)
    assert school is not None
    with tempfile.TemporaryDirectory() as folder:
        TOKENIZERS[school.tokenizer].write(folder)
        return ChatRenderer(folder)


def _check_teachers(config: RunConfig) -> None:
    """Check that each teacher has its agent's tokenizer, and room for the longest sample."""
    for name, agent in config.agents.items():
        if agent.teacher is None:
            continue
        key = f"agents.{name}.teacher.policy is {agent.teacher.policy}"
        model = config.policies[agent.teacher.policy].model
        assert model is not None, "a frozen policy has a model"
        shape, own = read_shape(model), config.policies[agent.policy].model
        if why := _renderer(config, agent.policy).why_other_tokens(ChatRenderer(model)):
            raise ConfigError(
                f"{key}, but its tokenizer differs from that of policies.{agent.policy} (the token {why} there); use a "
                "model of the same family"
            )
        if own is not None and (num := read_shape(own).vocab_size) > shape.vocab_size:
            raise ConfigError(
                f"{key}, with a vocab_size of {shape.vocab_size} in config.json, but policies.{agent.policy} has {num}: the "
                "agent can sample tokens that the teacher lacks; use a teacher with a vocabulary as large"
            )
        if (longest := longest_sequence(config, agent.teacher.policy)) > shape.max_positions:
            raise ConfigError(
                f"{key}, whose model has {shape.max_positions} positions, but scoring a sample takes up to {longest}; "
                f"lower agents.{name}.max_input_tokens or rollout.max_response_tokens"
            )


def _check_templates(config: RunConfig) -> None:
    """Check that chat templates render tools for agents that use them, and that warm-started policies get known prompts."""
    for name, agent in config.agents.items():
        given = [key for key in ("system", "suffix") if getattr(agent, key) is not None]
        if given and config.policies[agent.policy].model is None:
            raise ConfigError(
                f"agents.{name}.{given[0]} is set, but policies.{agent.policy}.model is not; a warm-started policy knows "
                f"only the task's prompts: set a model, or remove {given[0]}"
            )
        if not agent.tools:
            continue
        key, model = f"agents.{name}.tools is {', '.join(agent.tools)}", config.policies[agent.policy].directory
        if model is None:
            raise ConfigError(
                f"{key}, but policies.{agent.policy}.model is not set; a warm-started policy calls no tools: set a model"
            )
        try:
            ChatRenderer(model).check_shows_tools()
        except ValueError as error:
            raise ConfigError(f"{key}, and of policies.{agent.policy}.model = {model} {error}") from error


def _check_first_prompts(
    config: RunConfig,
    task: Task,
    orchestration: Orchestration,
    functions: Mapping[str, Sequence[ToolFunction]],
    num_problems: int,
) -> list[str]:
    """Return warnings about first prompts longer than max_input_tokens, and about prompts that do not ask for the form
    of answers; raise if all are too long and none is cut.

    num_problems: in the data; 0 if the task generates them.
    """
    if orchestration.plays_sessions:  # A program's prompts are unknown.
        return []
    source = task.problems(config.run.seed)
    (ask, *_) = _first_asks(orchestration, Episode("preflight", "preflight", source(0)))
    first, settings = ask.agent, config.in_bytes().agents[ask.agent]
    policy, room, is_skipped = settings.policy, settings.max_input_tokens, settings.long_prompts == "skip"
    renderer = _renderer(config, policy)
    tools, options = [function for name in settings.tools for function in functions[name]], settings.template_options
    lengths, chats, problems = list[int](), list[str](), list[Problem]()
    most, key = num_problems or _NUM_CHECKED, f"agents.{first}.max_input_tokens"
    while len(lengths) < most and (len(lengths) < _NUM_CHECKED or (is_skipped and min(lengths) > room)):
        episode = Episode("preflight", "preflight", source(len(lengths)))
        (ask, *_) = _first_asks(orchestration, episode)
        messages = returned.messages(orchestration.messages(episode, ask))
        orchestration.check_words(first, messages)
        if len(lengths) < _NUM_CHECKED:
            problems.append(episode.problem)
            chats.append("\n".join(message.content for message in messages))
        lengths.append(len(renderer.render(messages, tools, **options)[0]))
        if lengths[-1] == 0:
            raise ConfigError(f"policies.{policy}.model: its tokenizer encodes a prompt to no tokens; check its files")
        if not is_skipped and renderer.render_cut(messages, room, "left", tools, **options) is None:
            raise ConfigError(f"{key} is {room}, but the chat template alone fills it; raise it")
    num_long = sum(length > room for length in lengths)
    if num_long == len(lengths) and is_skipped:
        raise ConfigError(
            f"{key} is {room}, but the shortest of {num_long} prompts has {min(lengths)} tokens: none can be asked; raise it, or "
            f"set agents.{first}.long_prompts"
        )
    warnings = orchestration.unasked(problems, {first: chats})
    if num_long:
        fate = "not be asked" if is_skipped else f"be cut (agents.{first}.long_prompts)"
        warnings.append(f"{num_long} of {len(lengths)} prompts are longer than {key} ({room} tokens) and will {fate}")
    return warnings


def _first_asks(orchestration: Orchestration, episode: Episode) -> Sequence[Ask]:
    """Return the team's first asks; ConfigError if its code fails or asks no agent."""
    try:
        asks = [each for each in orchestration.follow(episode) if isinstance(each, Ask)]
    except Exception as error:
        raise ConfigError(
            f"orchestration {orchestration.name}: follow() raised on a new episode: {type(error).__name__}: {error}"
        ) from error
    if not asks:
        raise ConfigError(
            f"orchestration {orchestration.name}: follow() asks no agent on a new problem; return at least one Ask"
        )
    return asks
