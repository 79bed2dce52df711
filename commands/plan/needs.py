"""GPU and host memory that a policy's settings need, for `marsrl plan` and, on a host with GPUs, `marsrl doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from marsrl.commands.plan import hardware as hw
from marsrl.commands.plan.engines import (
    Demand,
    EngineMemory,
    EngineSetup,
    engine_memory,
    publish_bytes,
    rollout_time,
    transfer_bytes,
)
from marsrl.commands.plan.memory import SIZE, Training
from marsrl.commands.plan.parameters import elements
from marsrl.commands.plan.ranking import Job, Option, option
from marsrl.commands.plan.speed import Work
from marsrl.rollout.engines.draft import read_draft
from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.routed_experts import expert_dtype
from marsrl.trainer.checks.batch_plan import longest_sequence, samples_of_a_step
from marsrl.trainer.checks.models import find_shape, taught_shape
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.learner.megatron.layout import Layout, nearest, resolve, why_not, why_not_context

GIB = 2.0**30
_TWO_CONTEXTS = Layout(1, 1, 1, 1, context=2)


@dataclass(frozen=True)
class Needs:
    """GPU and host memory that one policy takes.

    configured: memory and time of the config's layout; None if the layout is invalid (see why_not_configured).
    weight_files: bytes of two versions of weight files for the engines, in the memory of rank 0's host.
    rank_transfer_bytes: NCCL's buffers for publishes on a rank's GPU.
    routed_experts: bytes of a step's recorded experts on rank 0's host (trainer.router_replay=rollout).
    """

    name: str
    policy: PolicyConfig
    gpu: hw.Gpu
    longest_sequence: int
    job: Job
    configured: Option | None
    why_not_configured: str | None
    engines: EngineSetup
    engine: EngineMemory
    demand: Demand
    weight_files: float
    routed_experts: float
    rank_transfer_bytes: float

    @property
    def work(self) -> Work:
        return self.job.work

    def rollout_s(self, num_engines: int) -> float:
        """Return the seconds in which num_engines engines decode a step's completions."""
        return rollout_time(replace(self.engines, num_engines=num_engines), self.engine, self.gpu, self.demand).seconds

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory on the fullest node: its ranks' offloaded state, weight files, and recorded experts."""
        ranks = min(self.job.training.world_size, int(hw.GPUS_PER_NODE.value))
        offloaded = self.configured.memory.host * ranks if self.configured else 0
        return offloaded + self.weight_files + self.routed_experts

    @property
    def fits(self) -> bool:
        """True if the config's layout, engines and host memory fit."""
        is_trained = self.configured is not None and self.configured.fits
        return is_trained and self.engine.fits and self.host_bytes <= self.gpu.host_memory


def needs_of(
    config: RunConfig, name: str, shape: ModelShape, trainers: int, gpu: hw.Gpu, mean_response: float | None = None
) -> Needs:
    """Compute the needs of a trained policy, or of a base with all its adapters, which train together.

    config: the settings after shorten_prompts.
    """
    policy, rollout = config.policies[name], config.rollout
    longest = longest_sequence(config, name)
    response = mean_response or hw.MEAN_RESPONSE.value * rollout.max_response_tokens
    agents = [agent for agent, settings in config.agents.items() if settings.policy in config.policies_in(name)]
    prompt = min(hw.MEAN_PROMPT.value, max(config.agents[agent].max_input_tokens for agent in agents))
    num_samples, _ = samples_of_a_step(config)
    samples = sum(num_samples[agent] for agent in agents)
    work = Work(
        sequences=samples,
        tokens=samples * (prompt + response),
        trained=samples * response,
        longest=prompt + rollout.max_response_tokens,
        updates=config.trainer.updates_per_step,
    )
    setup = _engine_setup(config, name, shape, longest)
    backend, num_gpus = setup.carried_by(config.sync.backend), trainers + setup.num_gpus
    setup = replace(setup, transfer_bytes=transfer_bytes(backend, trainers, num_gpus, receives=True))
    rank_transfer = transfer_bytes(backend, setup.num_gpus, num_gpus, receives=False)
    memory = engine_memory(setup, gpu)
    by_placement = {"disaggregated": rank_transfer, "colocated": hw.ENGINE_WORKSPACE.value}
    reserved_bytes = by_placement.get(rollout.placement, memory.taken)
    job = _job(config, name, shape, trainers, work, reserved_bytes)
    if rollout.placement == "colocated":
        job = replace(job, between_bytes=memory.taken)
    layout = job.training.layout
    problem = why_not(layout, shape, trainers)
    if problem is not None:
        problem += f"; a valid layout for {trainers} trainer rank(s): {nearest(layout, shape, trainers).words}"
    else:
        problem = why_not_context(layout, config.loss.ratio, config.loss.correction)
    in_memory = config.sync.backend == "shm" and config.sync.directory is None
    replays = config.trainer.router_replay == "rollout" and shape.num_experts > 0
    published = sum(publish_bytes(setup, adapter) for adapter in setup.adapters)
    if not setup.adapters:
        published = elements(shape).total * SIZE[policy.decided_dtype]
    token_bytes = (
        shape.num_layers * shape.experts_per_token * expert_dtype(shape.num_experts).itemsize if replays else 0
    )
    overlaps = rollout.overlap > 0
    demand = Demand(
        work.sequences, prompt, response, rollout.group_size, rollout.segments, rollout.tokens_per_stage, overlaps
    )
    return Needs(
        name=name,
        policy=policy,
        gpu=gpu,
        longest_sequence=longest,
        job=job,
        configured=None if problem else option(job, layout, policy.recompute, gpu),
        why_not_configured=problem,
        engines=setup,
        engine=memory,
        demand=demand,
        weight_files=2.0 * published if in_memory or setup.adapters else 0.0,
        routed_experts=work.tokens * token_bytes,
        rank_transfer_bytes=rank_transfer,
    )


def shortages(needs: Needs) -> Iterator[str]:
    """Yield a sentence for each need that, by formula, exceeds the memory of this GPU or of its host."""
    name, engine, configured, gpu = needs.name, needs.engine, needs.configured, needs.gpu
    allowed = gpu.memory_bytes * needs.engines.memory_share
    has_own_cache = needs.engines.cache_bytes is not None
    room = "rollout.vllm.kv_cache_mib" if has_own_cache else "rollout.vllm.gpu_memory_utilization"
    if not engine.has_room:
        nccl = needs.engines.transfer_bytes
        yield (
            f"an engine of policy {name} does not fit: per GPU, its weights, workspace and cache take "
            f"{(engine.taken - nccl) / GIB:.1f} GiB and NCCL's communicators {nccl / GIB:.1f} GiB, of "
            f"{gpu.memory_bytes / GIB:.1f} GiB; lower {room}, raise rollout.vllm.tensor_parallel, or use larger GPUs"
        )
    elif not engine.kv_tokens and not has_own_cache:
        yield (
            f"an engine of policy {name} does not fit: per GPU, its weights take {engine.weights / GIB:.1f} GiB, and "
            f"rollout.vllm.gpu_memory_utilization allows {allowed / GIB:.1f} GiB; raise it or rollout.vllm.tensor_parallel, or "
            "use larger GPUs"
        )
    elif not engine.fits:
        yield (
            f"an engine of policy {name} has {engine.kv_cache / GIB:.1f} GiB per GPU for keys and values, which hold "
            f"{engine.kv_tokens:,} tokens, but vLLM needs room for one sequence of {needs.longest_sequence:,}; raise {room} or "
            "rollout.vllm.tensor_parallel, or lower rollout.max_response_tokens"
        )
    if configured is not None and not configured.fits:
        yield (
            f"policy {name}: layout {configured.layout.words} with recompute {needs.policy.recompute} needs "
            f"{configured.needed / GIB:.1f} GiB, but a GPU has {gpu.memory_bytes / GIB:.1f}: {configured.why_not}"
        )
        if configured.needed - needs.rank_transfer_bytes <= gpu.memory_bytes:
            yield (
                f"policy {name}: NCCL takes {needs.rank_transfer_bytes / GIB:.1f} GiB of that to publish weights; "
                "sync.backend=shm would fit, but is slower"
            )
        beside = configured.memory.static + needs.job.between_bytes + hw.PROCESS_BYTES.value
        if needs.job.between_bytes and not needs.job.training.sleeps and beside > gpu.memory_bytes:
            yield (
                f"policy {name}: while its engines decode, the trainer keeps {configured.memory.static / GIB:.1f} GiB beside the "
                f"engine's {needs.job.between_bytes / GIB:.1f}; set trainer.sleep=true, or lower {room}"
            )
    if needs.host_bytes > gpu.host_memory:
        yield (
            f"policy {name}: a node of trainer ranks needs {needs.host_bytes / GIB:.0f} GiB of host memory for offloaded "
            "tensors, weight files and recorded experts, but has "
            f"{gpu.host_memory / GIB:.0f} GiB; set policies.{name}.optimizer.offload=false, policies.{name}.recompute to a mode "
            "other than full_offload, trainer.sleep=false, sync.directory to a folder on a disk, or trainer.router_replay to a "
            "mode other than rollout"
        )


def shortages_here(config: RunConfig, trainers: int) -> list[str]:
    """Return the shortages of the trained policies on this machine's GPU, for settings that preflight has checked.

    Returns [] without a GPU or without vLLM engines.
    """
    gpu = hw.gpu_here()
    if gpu is None or config.rollout.engine != "vllm":
        return []
    sentences, pools = list[str](), config.pools_of_adapters
    for name in dict.fromkeys(pools.get(policy_name, policy_name) for policy_name in config.trained_policies):
        policy = config.policies[name]
        shape = find_shape(policy.model) if policy.model else taught_shape(config, policy)
        assert shape is not None, f"policies.{name}.model: preflight refuses a policy without a model"
        sentences += shortages(needs_of(config, name, shape, trainers, gpu))
    return [f"{sentence} (estimated by marsrl plan's formulas)" for sentence in sentences]


def _engine_setup(config: RunConfig, name: str, shape: ModelShape, longest: int) -> EngineSetup:
    rollout, dtype = config.rollout_of(name), config.engine_dtype(name)
    vllm = rollout.vllm
    return EngineSetup(
        shape,
        rollout.engines,
        vllm.tensor_parallel,
        "bfloat16" if dtype == "float16" else dtype,
        vllm.gpu_memory_utilization,
        rollout.slots,
        longest,
        "fp8" if vllm.kv_cache_dtype.startswith("fp8") else "auto",
        None if vllm.kv_cache_mib is None else vllm.kv_cache_mib * 2.0**20,
        vllm.expert_parallel,
        config.adapters_in(name),
        more_slots=len(config.past_adapters(name)),
        weights=vllm.quantization or "auto",
        draft=read_draft(vllm.draft_model, shape) if vllm.draft_model else None,
    )


def _job(config: RunConfig, name: str, shape: ModelShape, trainers: int, work: Work, reserved_bytes: float) -> Job:
    """Return the training job for ranking layouts. reserved_bytes: Job.shared_bytes."""
    loss, replay = config.loss, config.trainer.router_replay
    policy, adapters = config.policies[name], config.adapters_in(name)
    trained_name = next(member for member in config.policies_in(name) if member in config.trained_policies)
    first = config.policies[trained_name]
    reference, scored_reference = None, None
    if loss.kl != "none":
        is_own = first.reference in ("start", "past")
        scored_reference = shape if is_own else find_shape(first.reference)
        # Takes no memory: the frozen base is the reference, without an adapter or with an earlier one.
        reference = None if adapters and is_own else scored_reference
    # Old log-probs, experts to replay and counts of experts each need a forward pass of the policy before its updates.
    is_scored = loss.old_policy == "recompute" or replay == "recompute"
    is_scored |= loss.old_policy == "pois" and config.trainer.updates_per_step > 1
    is_scored |= bool(policy.router_aux_loss and shape.num_experts)
    training = Training(
        shape=shape,
        layout=resolve(policy.layout),
        world_size=trainers,
        dtype=policy.decided_dtype,
        recompute=policy.recompute,
        tokens=config.trainer.max_tokens_per_micro_batch,
        num_micro_batches=1,
        head_rows=int(hw.HEAD_ROWS.value),
        offloads_optimizer=first.optimizer.offload,
        distributes_optimizer=first.optimizer.distributed,
        reference=reference,
        deterministic=policy.deterministic,
        router_replay=replay,
        adapters=adapters,
        sleeps=config.trainer.sleep,
        overlaps_dispatch=policy.overlap_dispatch,
    )
    return Job(
        training,
        work,
        sweeps_entropy=config.mpt.scope != "off",
        shared_bytes=reserved_bytes,
        scored=(*((shape,) if is_scored else ()), *((scored_reference,) if scored_reference else ())),
        cuts_sequences=why_not_context(_TWO_CONTEXTS, loss.ratio, loss.correction) is None,
    )
