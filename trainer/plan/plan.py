"""The plan of a run: its policies on so many GPUs, from its settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from marsrl.rollout.config import MOST_RANKS, RolloutConfig
from marsrl.rollout.engines.refusals import TrainerHost, num_engine_gpus, why_not_cut, wider_than_a_host
from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.learner.megatron.layout import nearest, resolve, why_not
from marsrl.trainer.placement import with_backend
from marsrl.trainer.plan import hardware as hw
from marsrl.trainer.plan.batch_plan import longest_sequence, samples_of_a_step
from marsrl.trainer.plan.engines import (
    EngineMemory,
    EngineSetup,
    Load,
    RolloutTime,
    SyncTime,
    engine_memory,
    rollout_time,
    slowest,
    split_engines,
    sync_time,
)
from marsrl.trainer.plan.models import find_shape, warm_start_shape
from marsrl.trainer.plan.parameters import active_elements, elements
from marsrl.trainer.plan.ranking import Job, Option, option, options
from marsrl.trainer.plan.speed import Work
from marsrl.trainer.preflight import refusals_of, within_positions
from marsrl.trainer.read_config import ConfigError
from marsrl.trainer.schools.registry import school_of


@dataclass(frozen=True)
class PolicyPlan:
    """One policy. configured: the layout of the config, None where it is not valid (then `why_not_configured`).

    options: valid layouts in all recompute modes, the best first; what does not fit comes last.
    """

    name: str
    model: str
    parameters: int
    active_parameters: int
    longest_sequence: int
    micro_batch_tokens: int
    work: Work
    configured: Option | None
    why_not_configured: str | None
    options: tuple[Option, ...]
    engine: EngineMemory
    rollout: RolloutTime
    sync: SyncTime

    @property
    def chosen(self) -> Option | None:
        """The config's layout where it fits, else the best that does; None: nothing fits."""
        if self.configured is not None and self.configured.fits:
            return self.configured
        return self.options[0] if self.options and self.options[0].fits else None


@dataclass(frozen=True)
class Plan:
    """Of a whole run. refused: what stops it as it starts; notes: what does not fit, in sentences."""

    gpu: str
    num_gpus: int
    num_trainers: int
    num_engine_gpus: int
    policies: tuple[PolicyPlan, ...]
    refused: tuple[str, ...]
    notes: tuple[str, ...]
    constants: tuple[hw.Constant, ...]

    @property
    def fits(self) -> bool:
        """The settings as they are would run."""
        return not self.refused and all(
            p.configured is not None and p.configured.fits and p.engine.kv_tokens for p in self.policies
        )

    @property
    def step_s(self) -> float | None:
        """Rollout, updates and publishing of one step, one after the other; None where nothing fits."""
        if any(p.chosen is None for p in self.policies):
            return None
        updates = sum(p.chosen.time.total for p in self.policies if p.chosen)
        return max(p.rollout.seconds for p in self.policies) + updates + sum(p.sync.total for p in self.policies)


def make_plan(config: RunConfig, num_gpus: int, gpu_name: str, mean_response: float | None = None) -> Plan:
    """Plan a run on num_gpus GPUs, engines included.

    Args:
        mean_response: completion tokens on average; default: a share of rollout.max_response_tokens (hardware.py).

    Raises:
        ValueError: no GPU of this name, a model of unknown shape, fewer GPUs than the engines alone need, or a number that
            nobody has.
    """
    gpu = hw.find_gpu(gpu_name)
    if not 1 <= num_gpus <= MOST_RANKS:
        raise ConfigError(f"--gpus is {num_gpus:,}, expected 1 to {MOST_RANKS:,}")
    longest = config.rollout.max_response_tokens
    if mean_response is not None and not 0 < mean_response <= longest:
        raise ConfigError(
            f"--mean-response is {mean_response:g}, expected more than 0 and at most rollout.max_response_tokens, {longest}"
        )
    config = with_backend(config, on_gpus=True)
    served = config.served_rollouts
    engine_gpus = num_engine_gpus(served)
    if engine_gpus >= num_gpus:
        raise ConfigError(
            f"rollout: {' + '.join(f'{each.engines} engines x {each.vllm.tensor_parallel} GPUs' for each in served)} = "
            f"{engine_gpus} GPUs, and --gpus is {num_gpus}: none is left to train on; lower rollout.engines or "
            "policies.<name>.engines, or give more"
        )
    trainers = num_gpus - engine_gpus
    of_node = int(hw.GPUS_PER_NODE.value)
    host = TrainerHost(min(of_node, num_gpus), min(of_node, trainers), has_others=num_gpus > of_node)
    policies, notes = [], _notes_on_engines(config, num_gpus)
    loads: dict[str, Load] = {}
    for name, policy in config.trained_policies.items():
        planned, loads[name], more = _policy(config, name, policy, trainers, num_gpus, gpu, mean_response)
        policies.append(planned)
        notes += more
    notes += _notes_on_the_split(loads, gpu, config)
    if frozen := [name for name, policy in config.policies.items() if policy.frozen]:
        notes.append(
            f"frozen policies have no learner and are not planned, their engines' GPUs aside: {', '.join(frozen)}"
        )
    if config.judge is not None:
        judged = {"evaluate": "of evaluations", "always": "of training and of evaluations"}[config.judge.when]
        notes.append(
            f"policy {config.judge.policy} judges the answers {judged}: the time of that is not planned, nor whether its "
            "weights fit"
        )
    if len(policies) > 1:
        notes.append(
            "all policies live on the same trainer ranks: add up their static bytes; each is planned alone here"
        )
    refused = tuple(dict.fromkeys([*refusals_of(config, host), *_refused_engines(config, loads)]))
    constants = tuple(hw.constants(gpu))
    return Plan(gpu_name, num_gpus, trainers, engine_gpus, tuple(policies), refused, tuple(notes), constants)


def _refused_engines(config: RunConfig, loads: Mapping[str, Load]) -> list[str]:
    """Engines that no host can hold, or over whose GPUs the model cannot be cut."""
    found = []
    for name, load in loads.items():
        vllm = config.rollout_of(name).vllm
        found += [
            wider_than_a_host(vllm.tensor_parallel, int(hw.GPUS_PER_NODE.value)),
            why_not_cut(load.setup.shape, vllm),
        ]
    return [sentence for sentence in found if sentence is not None]


def _made_shape(config: RunConfig, name: str, policy: PolicyConfig) -> ModelShape:
    """Of a policy that a school makes."""
    school = school_of(config)
    if school is None:
        raise ConfigError(f"policies.{name}.model is not set; give a directory, or the name of a published model")
    return warm_start_shape(policy.shape, school.tokenizer)


def _policy(
    config: RunConfig,
    name: str,
    policy: PolicyConfig,
    trainers: int,
    num_gpus: int,
    gpu: hw.Gpu,
    mean_response: float | None,
) -> tuple[PolicyPlan, Load, list[str]]:
    shape = find_shape(policy.model) if policy.model else _made_shape(config, name, policy)
    config = within_positions(config, name, shape.max_positions)
    longest = longest_sequence(config, name)
    tokens = max(config.trainer.max_tokens_per_micro_batch, longest)
    response = mean_response or hw.MEAN_RESPONSE.value * config.rollout.max_response_tokens
    work = _work(config, name, response)
    setup = _engine_setup(config.rollout_of(name), policy, shape, longest)
    engine = engine_memory(setup, gpu)
    kept_bytes = 0.0 if config.rollout.placement == "disaggregated" else gpu.memory_bytes * setup.memory_share
    job = _job(config, policy, shape, trainers, tokens, work, kept_bytes)
    layout = resolve(policy.layout)
    problem = why_not(layout, shape, trainers)
    planned = PolicyPlan(
        name=name,
        model=policy.model or "warm start",
        parameters=elements(shape).total,
        active_parameters=active_elements(shape),
        longest_sequence=longest,
        micro_batch_tokens=tokens,
        work=work,
        configured=None if problem else option(job, layout, policy.recompute, gpu),
        why_not_configured=problem,
        options=tuple(options(job, gpu)),
        engine=engine,
        rollout=rollout_time(setup, engine, gpu, work.sequences, response, config.rollout.segments),
        sync=sync_time(shape, policy.dtype, gpu, num_gpus),
    )
    near = nearest(layout, shape, trainers).words if problem else ""
    notes = _notes_on_lengths(config, planned) + _notes_on_its_engines(planned, setup, gpu)
    load = Load(setup, engine, work.sequences, response)
    return planned, load, notes + _notes_on_layouts(planned, policy, trainers, gpu, near)


def _work(config: RunConfig, name: str, response: float) -> Work:
    """One step's training of a policy, by completions of so many tokens on average."""
    of_policy = [each for each in config.agents if config.agents[each].policy == name]
    of_agent, _ = samples_of_a_step(config)
    samples = sum(of_agent[each] for each in of_policy)
    prompt = min(hw.MEAN_PROMPT.value, max(config.agents[each].max_input_tokens for each in of_policy))
    return Work(samples, samples * (prompt + response), samples * response)


def _engine_setup(rollout: RolloutConfig, policy: PolicyConfig, shape: ModelShape, longest: int) -> EngineSetup:
    vllm = rollout.vllm
    dtype = vllm.dtype or policy.dtype
    return EngineSetup(
        shape,
        rollout.engines,
        vllm.tensor_parallel,
        "bfloat16" if dtype == "float16" else dtype,
        vllm.gpu_memory_utilization,
        vllm.max_num_seqs,
        longest,
    )


def _job(
    config: RunConfig,
    policy: PolicyConfig,
    shape: ModelShape,
    trainers: int,
    tokens: int,
    work: Work,
    kept_bytes: float,
) -> Job:
    """What the layouts are ranked for. kept_bytes: of each GPU, what engines keep from the trainer."""
    reference = _reference(config, policy, shape)
    return Job(
        shape=shape,
        dtype=policy.dtype,
        world_size=trainers,
        tokens=tokens,
        work=work,
        offloads_optimizer=policy.optimizer.offload,
        sweeps_entropy=config.mpt.scope != "off",
        shared_bytes=kept_bytes,
        distributes_optimizer=policy.optimizer.distributed,
        reference=reference,
        scored=(*((shape,) if _scores_first(config) else ()), *((reference,) if reference else ())),
        cuts_sequences=config.loss.ratio != "sequence" and config.loss.correction != "sequence_mask",
    )


def _notes_on_lengths(config: RunConfig, planned: PolicyPlan) -> list[str]:
    longest, limit = planned.longest_sequence, config.trainer.max_tokens_per_micro_batch
    if longest <= limit:
        return []
    return [
        f"trainer.max_tokens_per_micro_batch is {limit:,}, but a sequence of policy "
        f"{planned.name} can have {longest:,} tokens (prompt and completion): such a batch would be refused; planned with "
        f"{longest:,}"
    ]


def _notes_on_its_engines(planned: PolicyPlan, setup: EngineSetup, gpu: hw.Gpu) -> list[str]:
    if planned.engine.kv_tokens:
        return []
    return [
        f"an engine of policy {planned.name} does not fit: its weights take {planned.engine.weights / 2**30:.1f} GiB a GPU of "
        f"{gpu.memory_bytes * setup.memory_share / 2**30:.1f} GiB that it may use; raise rollout.vllm.tensor_parallel or "
        "rollout.vllm.gpu_memory_utilization, or take larger GPUs"
    ]


def _notes_on_the_split(loads: Mapping[str, Load], gpu: hw.Gpu, config: RunConfig) -> list[str]:
    """How the policies' engines share their GPUs, and what would be faster."""
    if (
        len(loads) < 2
        or config.rollout.placement == "local"
        or not all(load.memory.kv_tokens for load in loads.values())
    ):
        return []
    segments = config.rollout.segments
    now = {name: load.setup.num_engines for name, load in loads.items()}
    num_gpus = sum(load.setup.num_engines * load.setup.tensor_parallel for load in loads.values())
    best = split_engines(loads, num_gpus, gpu, segments)
    seconds, least = (slowest(loads, counts, gpu, segments) for counts in (now, best))
    said = f"engines of the policies share {num_gpus} GPUs, {_listed(now)}: a step's completions in {seconds:.0f} s"
    if least > 0.9 * seconds:
        return [f"{said}; no other split is faster by a tenth"]
    return [f"{said}; {_listed(best)} would take {least:.0f} s (policies.<name>.engines)"]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _notes_on_layouts(planned: PolicyPlan, policy: PolicyConfig, trainers: int, gpu: hw.Gpu, near: str) -> list[str]:
    """near: the words of the valid layout nearest to the config's, where that is not valid."""
    notes = []
    configured, best = planned.configured, planned.options[0]
    if configured is not None and not configured.fits:
        notes.append(
            f"policy {planned.name}: layout {configured.layout.words} with recompute {policy.recompute} needs "
            f"{configured.needed / 2**30:.1f} GiB of {gpu.memory_bytes / 2**30:.1f}: {configured.why_not}"
        )
    if planned.why_not_configured:
        notes.append(
            f"policy {planned.name}: {planned.why_not_configured}; on {trainers} trainer rank(s) this would be valid: {near}"
        )
    if configured is not None and configured.memory.host:
        host = configured.memory.host / 2**30
        notes.append(
            f"policy {planned.name}: the optimizer's state is in CPU memory: {host:.0f} GiB a rank, "
            f"{host * min(trainers, hw.GPUS_PER_NODE.value):.0f} GiB a node"
        )
    if not best.fits:
        notes.append(
            f"policy {planned.name}: no layout fits on {trainers} trainer GPUs; the closest is {best.layout.words} with "
            f"recompute {best.recompute}, {best.needed / 2**30:.1f} GiB: {best.why_not}"
        )
    return notes


def _reference(config: RunConfig, policy: PolicyConfig, shape: ModelShape) -> ModelShape | None:
    """Of the frozen model that a KL term is measured against, where there is one."""
    if config.loss.kl == "none":
        return None
    return shape if policy.reference == "start" else find_shape(policy.reference)


def _scores_first(config: RunConfig) -> bool:
    """Does the policy run forward once before its updates: old log-probs, or the experts to replay (R2)?"""
    keeps_old = config.loss.old_policy == "pois" and config.trainer.updates_per_step > 1
    return keeps_old or config.loss.old_policy == "recompute" or config.trainer.router_replay == "recompute"


def _notes_on_engines(config: RunConfig, num_gpus: int) -> list[str]:
    notes = []
    if config.sync.backend != "shm":
        notes.append(f"sync.backend={config.sync.backend} has not run on GPUs yet; planned as if it wrote files")
    if config.rollout.placement == "colocated":
        notes.append(
            "rollout.placement=colocated: engines give their memory back while the trainer trains; planned as if they kept "
            "rollout.vllm.gpu_memory_utilization of it, as they do while the trainer waits for them"
        )
    if config.rollout.placement == "local" and num_gpus > 1:
        notes.append("rollout.placement=local decodes on trainer rank 0's GPU alone; the others wait meanwhile")
    return notes
