"""All that can be wrong with a run and is cheap to see, before process groups, Ray or engines start."""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import yaml

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.refusals import TrainerHost, refusals, this_host, vllm_refusals, why_not_cut
from marsrl.rollout.engines.vllm.arguments import checked_extra, who_draws
from marsrl.rollout.engines.vllm.engine import NO_SLEEP_ON_CPU
from marsrl.rollout.episode import Episode
from marsrl.rollout.model_shape import ModelShape, read_shape
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.own_classes import is_own
from marsrl.rollout.rewards.config import JudgeConfig
from marsrl.rollout.tasks.data import find_repeats, read_problems
from marsrl.rollout.tasks.eval_files import HeldOut, read_eval
from marsrl.rollout.tasks.own_task import own_problems
from marsrl.rollout.tasks.protocol import EVALUATION_SET, Task, documents_of, papers_of
from marsrl.rollout.tasks.registry import TOKENIZERS, build_task
from marsrl.rollout.tasks.train_files import Mixture, read_train
from marsrl.rollout.tools.build import check_tools
from marsrl.rollout.types import Ask, Problem
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.config.agreement import NO_INPUTS_TO_OFFLOAD_ON_CPU, NO_OFFLOAD_ON_CPU
from marsrl.trainer.config.read import ConfigError
from marsrl.trainer.learner.megatron.layout import check, resolve, why_not_context
from marsrl.trainer.placement import placement_lines, with_backend
from marsrl.trainer.plan.batch_plan import BatchPlan, batch_plan, longest_sequence
from marsrl.trainer.plan.needs import shortages_here
from marsrl.trainer.schools.registry import school_of, who_is_taught

_LOOKED_AT = 64  # prompts, where all fit


@dataclass(frozen=True, slots=True)
class Checked:
    """Settings that fit together and with what is on disk. `task` holds its problems already read.

    curators: policies that nobody but `marsrl curate` asks, and no run has.
    """

    config: RunConfig
    plan: BatchPlan
    task: Task
    num_skipped_lines: int  # of the data files, with data.on_bad_line=skip
    num_held_out: int  # taken from data.train for evaluation, because nothing is given for it
    host: TrainerHost
    placement: tuple[str, ...]  # which GPU of which host has which rank or engine, in words
    warnings: tuple[str, ...] = ()  # what is no error and most likely a mistake
    eval_sets: tuple[HeldOut, ...] = ()  # of data.eval, where that is a list
    curators: Mapping[str, PolicyConfig] = field(default_factory=dict)

    def text(self, *, with_config: bool) -> str:
        """The batch arithmetic, after the resolved config if wanted."""
        plan = "\n".join(f"  {line}" for line in self.plan.lines())
        whole = self.config.model_copy(update={"policies": {**self.config.policies, **self.curators}})
        config = yaml.safe_dump(whole.model_dump(mode="json"), sort_keys=False) if with_config else ""
        notes = ""
        if self.num_skipped_lines:
            notes += f"\n{self.num_skipped_lines} lines of the data could not be read and were skipped"
        if self.num_held_out:
            own = is_own(self.config.task)
            of, none = ("problems", "held_out is empty") if own else ("data.train", "no data.eval is given")
            notes += f"\n{self.num_held_out} problems of {of} are held out for evaluation ({none})"
        notes += "".join(f"\npolicies.{name}: asked by marsrl curate alone" for name in self.curators)
        notes += "".join(f"\npolicies.{name}: {line}" for name, line in self._engines().items())
        notes += "".join(f"\nwarning: {warning}" for warning in self.warnings)
        where = "\n".join(f"  {line}" for line in self.placement)
        return f"{config}batch arithmetic:\n{plan}\nplacement:\n{where}{notes}"

    def _engines(self) -> dict[str, str]:
        """Who draws the tokens of each policy that vLLM serves."""
        return {name: who_draws(vllm, _device(self.host)) for name, vllm in vllm_of(self.config).items()}


def preflight(
    config: RunConfig, world_size: int, *, trains: bool = True, given: Sequence[Problem] | None = None
) -> Checked:
    """Resolve and check; reads the data files, looks into the model directories, starts nothing.

    trains: False where the team is evaluated only: no trainer takes room on the GPUs, and problems of data.eval are enough.
    given: problems to evaluate on, in place of those of the data files.

    Raises:
        ValueError: settings, data or a model directory cannot be used; the text says which, found, expected.
        OSError: a file cannot be read.
    """
    import torch

    curators, config = config.curators, with_backend(config.without_curators(), on_gpus=torch.cuda.is_available())
    host = this_host(config.rollout.ray_address, trains=trains)
    if trains:
        _check_something_trains(config)
        _check_layouts(config)
        _check_wandb(config)
        _check_prometheus(config)
    _check_machine(config, host)
    train, held_out, sets, num_skipped = read_data(config) if given is None else ((), given, (), 0)
    of_train, of_eval = ("data.train", "data.eval") if not is_own(config.task) else ("problems", "held_out")
    warnings = [*find_repeats(train).sentences(of_train), *find_repeats(held_out).sentences(of_eval)]
    num_held_out = 0
    if not trains and not train:
        train = held_out  # nobody draws from them; a task that reads files wants some
    if train and not held_out:
        train, held_out = _hold_out(train, config.evaluate.num_problems)
        num_held_out = len(held_out)
    task = build_task(config.task, config.task_options, train, held_out)
    orchestration = build_orchestration(  # or refuses its prompts
        config.orchestration,
        config.agents,
        task.prompts,
        config.orchestration_options,
        config.rollout,
        tools=config.tools.names,
    )
    check_tools(config.tools, orchestration.tools, documents_of(task), papers_of(task))
    for name, policy in config.policies.items():
        longest_sequence(config, name)  # or nobody has the policy
        if policy.engine == "openai":
            continue  # the directory holds a tokenizer, and only the server knows how long its sequences can be
        if policy.model is not None:
            shape = read_shape(policy.model)
            _check_files(policy.model, shape)
            if found := why_not_cut(shape, config.rollout_of(name).vllm):
                raise ConfigError(f"policies.{name}.model: {found}")
            if not policy.frozen and trains:
                check(resolve(policy.layout), shape, world_size)
                if reason := why_not_context(resolve(policy.layout), config.loss.ratio, config.loss.correction):
                    raise ConfigError(f"policies.{name}.{reason}")
                if config.trainer.router_replay != "none" and not shape.num_experts:
                    raise ConfigError(
                        f"trainer.router_replay={config.trainer.router_replay}, but policies.{name}.model is a "
                        f"{shape.architecture} without experts; set it to none"
                    )
                _check_reference(config, name, shape, world_size)
            config = within_positions(config, name, shape.max_positions)
            if trains and not policy.frozen and config.rollout.engine == "vllm":
                warnings += shortages_here(config, name, shape, world_size)
        elif school_of(config) is None:
            raise ConfigError(
                f"policies.{name}.model is not set, and nobody teaches this team from random weights; give a Hugging Face model "
                f"directory (`marsrl init` makes a random one to try things with), or {who_is_taught()}"
            )
        if policy.reference != "none" and config.loss.kl == "none":
            warnings.append(f"policies.{name}.reference is {policy.reference}, but loss.kl is none: it is not loaded")
    if config.judge is not None:
        warnings += _check_judge(config.judge, {of_train: train if trains else (), of_eval: held_out})
    if (reason := why_not_backend(config, has_cuda=torch.cuda.is_available())) is not None:
        raise ConfigError(reason)
    _check_extra(config)
    warnings += _slow_records(config, host)
    plan = batch_plan(config, world_size)
    warnings += _check_prompts(config, task, orchestration, len(train) if trains else 0)
    where = placement_lines(config, host, world_size)
    return Checked(
        config, plan, task, num_skipped, num_held_out, host, tuple(where), tuple(warnings), sets, curators=curators
    )


def _check_something_trains(config: RunConfig) -> None:
    """Some sample can have a gradient: an advantage that is not 0, or a term of the loss that needs none."""
    credit, loss = config.credit, config.loss
    trained = [name for name in config.agents if credit.trains(name)]
    if all(config.agents[name].loss_weight == 0 for name in trained):
        keys = ", ".join(f"agents.{name}.loss_weight" for name in trained)
        raise ConfigError(f"{keys}: 0 for every agent that is trained, and nothing is left to train; raise one")
    if loss.entropy_coef != 0 or (loss.kl != "none" and loss.kl_coef != 0):
        return
    if config.rollout.group_size == 1 and credit.normalise == "group" and credit.singleton == "zero":
        raise ConfigError(
            "rollout.group_size is 1, and with credit.normalise=group a sample is compared with those of its group: every "
            "advantage would be 0 and nothing would train; raise it, or set credit.singleton=raw or another credit.normalise"
        )


def _check_layouts(config: RunConfig) -> None:
    """All trained policies are cut alike: every rank holds them all, on one set of process groups."""
    first, *others = config.trained_policies
    for name in others:
        if resolve(config.policies[name].layout) != resolve(config.policies[first].layout):
            raise ConfigError(
                f"policies.{name}.layout is not policies.{first}.layout: every trainer rank holds every trained policy, on one "
                "set of process groups; give them one layout"
            )


def _check_wandb(config: RunConfig) -> None:
    if config.run.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"run.wandb={config.run.wandb} asks for wandb, which is not installed; `pip install wandb`, or unset run.wandb"
        )


def _check_prometheus(config: RunConfig) -> None:
    """The port can be had, on the rank that will open it."""
    port = config.run.prometheus_port
    if not port or int(os.environ.get("RANK", "0")) != 0:
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            f"run.prometheus_port={port} needs prometheus_client, which is not installed; `pip install prometheus_client`, or "
            "unset it"
        )
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise ConfigError(f"run.prometheus_port={port}: {error.strerror}; give a port that is free, or 0") from error


def _first_asks(orchestration: Orchestration, episode: Episode) -> Sequence[Ask]:
    """Whom the team asks first; ConfigError where its own code fails, or asks nobody."""
    try:
        asks = [each for each in orchestration.follow(episode) if isinstance(each, Ask)]
    except Exception as error:
        raise ConfigError(
            f"orchestration {orchestration.name}: follow of an episode in which nothing was asked raises "
            f"{type(error).__name__}: {error}"
        ) from error
    if not asks:
        raise ConfigError(f"orchestration {orchestration.name}: follow asks nobody about a new problem")
    return asks


def _check_prompts(config: RunConfig, task: Task, orchestration: Orchestration, num_problems: int) -> list[str]:
    """Warnings about first prompts that are longer than the agent's max_input_tokens; an error where none can be asked or cut.

    num_problems: of the data; 0: the task makes them.
    """
    source = task.problems(config.run.seed)
    (ask, *_) = _first_asks(
        orchestration, Episode("preflight", "preflight", task.problems(config.run.seed).next_problem())
    )
    first, settings = ask.agent, config.agents[ask.agent]
    policy, room, is_skipped = settings.policy, settings.max_input_tokens, settings.long_prompts == "skip"
    with ExitStack() as stack:
        model = config.policies[policy].model
        if model is None:
            model = stack.enter_context(tempfile.TemporaryDirectory())
            school = school_of(config)
            assert school is not None
            TOKENIZERS[school.tokenizer](model)
        renderer = ChatRenderer(model)
    lengths: list[int] = []
    most, key = num_problems or _LOOKED_AT, f"agents.{first}.max_input_tokens"
    while len(lengths) < most and (len(lengths) < _LOOKED_AT or (is_skipped and min(lengths) > room)):
        episode = Episode("preflight", "preflight", source.next_problem())
        (ask, *_) = _first_asks(orchestration, episode)
        messages = orchestration.messages(episode, ask)
        lengths.append(len(renderer.render(messages, **settings.template_options)[0]))
        if lengths[-1] == 0:
            raise ConfigError(
                f"policies.{policy}.model: its tokenizer makes not one token of a prompt; see to its files"
            )
        if not is_skipped and renderer.render_cut(messages, room, "left", **settings.template_options) is None:
            raise ConfigError(f"{key} is {room}, and the chat template leaves no room in it for a message: raise it")
    num_long = sum(length > room for length in lengths)
    if num_long == len(lengths) and is_skipped:
        raise ConfigError(
            f"{key} is {room}, and of {num_long} prompts the shortest has {min(lengths)} tokens: none can be asked; raise it, or "
            f"set agents.{first}.long_prompts"
        )
    if num_long:
        fate = "not be asked" if is_skipped else f"be cut (agents.{first}.long_prompts)"
        return [f"{num_long} of {len(lengths)} prompts are longer than {key} ({room} tokens) and will {fate}"]
    return []


def _check_judge(judge: JudgeConfig, problems: Mapping[str, Sequence[Problem]]) -> list[str]:
    """A warning about problems without a reference answer; an error where none of those that are to be judged has one.

    problems: by where they come from, those for training first; none of a task that makes its own, which have references.
    """
    warnings = []
    for where, found in list(problems.items())[0 if judge.when == "always" else 1 :]:
        num_without = sum(problem.answer is None for problem in found)
        if found and num_without == len(found):
            raise ConfigError(
                f"judge.policy={judge.policy} compares answers with a reference, and of the {len(found)} problems of {where} "
                "none has one: give reference answers, or leave the judge out and have the task judge"
            )
        if num_without:
            warnings.append(
                f"{num_without} of {len(found)} problems of {where} have no reference answer: what is answered to them is not "
                "judged and has no reward"
            )
    return warnings


def _check_files(model: str, shape: ModelShape) -> None:
    """The weights are those that config.json describes, by their files' headers; the tokenizer renders chats."""
    from marsrl.trainer.learner.megatron.hf_files import HfReader

    with HfReader(model) as reader:
        reader.check(shape)
    vocab_size = ChatRenderer(model).vocab_size
    if vocab_size > shape.vocab_size:
        raise ConfigError(
            f"model: {model}: the tokenizer has {vocab_size} tokens, config.json's vocab_size is {shape.vocab_size}; they are "
            "not of one model"
        )


def why_not_backend(config: RunConfig, *, has_cuda: bool) -> str | None:
    """What sync.backend needs of a machine and does not find; None: nothing is missing."""
    sync = config.sync
    if sync.backend == "shm":
        return None
    key = f"sync.backend={sync.backend}"
    if has_cuda:
        found = f"sync.cpu_twin is true, but there is a GPU here, on which {key} runs itself; set false"
        return found if sync.cpu_twin else None
    if not sync.cpu_twin:
        return (
            f"{key} needs CUDA, and PyTorch sees no CUDA device here; set sync.backend=auto, or sync.cpu_twin=true to send "
            f"the same buckets over {'gloo' if sync.backend == 'nccl' else 'shared memory'}"
        )
    if config.rollout.engine == "vllm":
        return (
            f"{key} writes into an engine's tensors, and vLLM on a CPU computes with packed copies of them; set "
            "sync.backend=shm and sync.cpu_twin=false, or rollout.engine=local"
        )
    return None


def _slow_records(config: RunConfig, host: TrainerHost) -> list[str]:
    """Agents whose draws vLLM's own sampler has to list the vocabulary for (docs/credit.md)."""
    return [
        f"agents.{name} leaves no token out, and the engines of policies.{agent.policy} list at each place what was kept "
        "(loss.truncation=renormalise): vLLM's own sampler is slow at it; set top_p or top_k, or rollout.vllm.sampler=marsrl"
        for name, agent in config.agents.items()
        if agent.policy in (vllm := vllm_of(config))
        and config.records_of(agent.policy).kept_tokens
        and vllm[agent.policy].sampler_on(_device(host)) == "engine"
        and agent.top_p == 1
        and agent.top_k < 1
    ]


def _check_extra(config: RunConfig) -> None:
    """Asks vLLM where it is installed; where not, engines stand elsewhere and ask theirs."""
    if importlib.util.find_spec("vllm") is not None:
        for vllm in vllm_of(config).values():
            checked_extra(vllm.extra)


def _check_machine(config: RunConfig, host: TrainerHost) -> None:
    """Engines, optimizer and weight files can be where the config wants them."""
    import torch

    has_cuda, sync = torch.cuda.is_available(), config.sync
    if config.rollout.placement == "colocated" and config.rollout.engine == "vllm" and not has_cuda:
        raise ConfigError(
            f"rollout.placement=colocated: {NO_SLEEP_ON_CPU}, or rollout.engine=local, whose sleep moves nothing on a CPU"
        )
    if int(os.environ.get("RANK", "0")) == 0:  # the others may stand on another host, and see other GPUs and folders
        if sync.directory is not None and not os.access(sync.directory, os.W_OK | os.X_OK):
            raise ConfigError(f"sync.directory is {sync.directory}, which is no folder that can be written to: make it")
        if found := refusals_of(config, host):
            raise ConfigError("; ".join(found))
    for name, policy in config.trained_policies.items():
        if policy.optimizer.offload and not has_cuda and host.num_ranks:
            raise ConfigError(f"policies.{name}.{NO_OFFLOAD_ON_CPU}")
        if policy.recompute == "full_offload" and not has_cuda and host.num_ranks:
            raise ConfigError(f"policies.{name}.{NO_INPUTS_TO_OFFLOAD_ON_CPU}")


def refusals_of(config: RunConfig, host: TrainerHost) -> tuple[str, ...]:
    """What engines and trainer would refuse of these settings on that host."""
    files = (config.sync.directory or "/dev/shm") if config.sync.backend == "shm" else None
    return (
        *refusals(config.served_rollouts, host, weight_files=files),
        *dict.fromkeys(
            sentence for name, vllm in vllm_of(config).items() for sentence in _of_vllm(config, name, vllm, host)
        ),
    )


def vllm_of(config: RunConfig) -> dict[str, VllmOptions]:
    """rollout.vllm as each policy has it that vLLM serves."""
    if config.rollout.engine != "vllm":
        return {}
    return {name: config.rollout_of(name).vllm for name, each in config.policies.items() if each.openai is None}


def _of_vllm(config: RunConfig, policy: str, vllm: VllmOptions, host: TrainerHost) -> Sequence[str]:
    is_trained = policy in config.trained_policies and host.num_ranks > 0
    return vllm_refusals(vllm, _device(host), config.records_of(policy), takes_weights=is_trained)


def _device(host: TrainerHost) -> str:
    """Of engines, which have GPUs where rank 0 sees one."""
    return "cuda" if host.num_gpus else "cpu"


def _check_reference(config: RunConfig, name: str, shape: ModelShape, world_size: int) -> None:
    """A reference with a directory of its own fits the policy's layout and speaks its tokens."""
    policy = config.policies[name]
    if config.loss.kl == "none" or policy.reference in ("none", "start"):
        return
    reference = read_shape(policy.reference)
    check(resolve(policy.layout), reference, world_size)
    if reference.vocab_size != shape.vocab_size:
        raise ConfigError(
            f"policies.{name}.reference has a vocabulary of {reference.vocab_size}, policies.{name}.model one of "
            f"{shape.vocab_size}; the reference scores the policy's tokens, so both need one tokenizer"
        )


def _hold_out(problems: Sequence[Problem], wanted: int) -> tuple[Sequence[Problem], list[Problem]]:
    """(train, held out): a tenth of the questions, those of the lowest hash, at most as many as an evaluation uses.

    The same questions whatever the order of the file, and equal questions on the same side. At least one question is
    left on either side; of a single one nothing is held out.
    """
    questions = sorted({p.question for p in problems}, key=lambda question: (zlib.crc32(question.encode()), question))
    chosen = set(questions[: min(wanted, max(1, len(questions) // 10))]) if len(questions) > 1 else set()
    held_out = [problem for problem in problems if problem.question in chosen]
    if isinstance(problems, Mixture):
        return problems.without(chosen), held_out
    return [problem for problem in problems if problem.question not in chosen], held_out


def read_data(config: RunConfig) -> tuple[Sequence[Problem], Sequence[Problem], tuple[HeldOut, ...], int]:
    """Problems to train on, problems to evaluate on, the sets that those are of (() unless data.eval is a list), and the number
    of lines of data.train and data.eval left out.

    Those of the files, nothing where there is no file; or what a user's own task makes of them.
    """
    data = config.data
    how = (data.question_key, data.answer_key, data.on_bad_line)
    train: Sequence[Problem] = ()
    held_out: tuple[Problem, ...] = ()
    sets: tuple[HeldOut, ...] = ()
    num_skipped = 0
    if data.train:
        found = read_train(data.train, config.task, config.run.seed, *how)
        train, num_skipped = found.problems, found.num_bad
    if isinstance(data.eval, str):
        read = read_problems(data.eval, config.task, *how)
        held_out, num_skipped = read.problems, num_skipped + read.num_bad
    elif data.eval:
        if config.task == "arithmetic":
            raise ConfigError("data.eval is a list, and task=arithmetic makes its own problems; leave it out")
        sizes = config.evaluate
        sets, num_bad = read_eval(data.eval, config.task, EVALUATION_SET, sizes.num_problems, sizes.repeat, *how)
        held_out, num_skipped = tuple(problem for each in sets for problem in each.problems), num_skipped + num_bad
    if is_own(config.task):
        if isinstance(train, Mixture):
            raise ConfigError(
                f"data.train has weights, and task={config.task} lists its problems itself, each drawn once an epoch; give "
                "counts (data.train: [{path, count}, ...])"
            )
        own_train, own_held_out = own_problems(config.task, config.task_options, train, held_out)
        if sets and tuple(own_held_out) != held_out:
            raise ConfigError(
                f"data.eval is a list, and task={config.task} has other problems to evaluate on (held_out): give one path, or "
                "have held_out return self.eval_data"
            )
        return own_train, own_held_out, sets, num_skipped
    return train, held_out, sets, num_skipped


def within_positions(config: RunConfig, policy: str, max_positions: int) -> RunConfig:
    """max_input_tokens of the policy's agents and of its judge, lowered to what leaves room for a whole completion.

    Raises:
        ConfigError: a completion alone is as long as the model can be.
    """

    def room(key: str, max_response_tokens: int) -> int:
        left = max_positions - max_response_tokens
        if left < 1:
            raise ConfigError(
                f"{key} is {max_response_tokens}, but policies.{policy}.model knows {max_positions} positions "
                "(max_position_embeddings); lower it"
            )
        return left

    agents, judge = dict(config.agents), config.judge
    for name in [name for name, agent in agents.items() if agent.policy == policy]:
        left = room("rollout.max_response_tokens", config.rollout.max_response_tokens)
        update = {"max_input_tokens": min(agents[name].max_input_tokens, left)}
        agents[name] = agents[name].model_copy(update=update)
    if judge is not None and judge.policy == policy:
        left = room("judge.max_response_tokens", judge.max_response_tokens)
        judge = judge.model_copy(update={"max_input_tokens": min(judge.max_input_tokens, left)})
    return config.model_copy(update={"agents": agents, "judge": judge})
