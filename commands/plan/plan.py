"""The plan of a run: memory and time of its policies on a number of GPUs, from the settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from marsrl.commands.plan import hardware as hw
from marsrl.commands.plan.engines import RolloutTime, SyncTime, rollout_time, sync_time
from marsrl.commands.plan.needs import GIB, Needs, needs_of, shortages
from marsrl.commands.plan.parameters import active_elements, elements
from marsrl.commands.plan.ranking import Option, Split, options, splits, step_seconds
from marsrl.rollout.engines.refusals import (
    TrainerHost,
    names_other_hosts,
    num_engine_gpus,
    why_not_cut,
    wider_than_a_host,
)
from marsrl.trainer.checks.batch_plan import shorten_prompts, why_not_one_micro_batch
from marsrl.trainer.checks.models import find_shape, taught_shape
from marsrl.trainer.checks.placement import rebalance_outlook, with_backend
from marsrl.trainer.checks.refusals import refusals_of, stale_samples, why_not_backend
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import ConfigError, read_config

_FOR_ONE_GPU = (  # presets, in the order in which notes name them
    "single_gpu",
    "single_gpu_colocated",
    "qwen3_0.6b_1gpu",
    "qwen3_4b_1gpu",
    "qwen3_8b_adapters_1gpu",
)


@dataclass(frozen=True, kw_only=True)
class PolicyPlan(Needs):
    """Needs of one policy, and its alternatives.

    options: valid layouts in all recompute modes, the best first; those that do not fit come last.
    splits: other ways to decode and to split the GPUs, the shortest step first; only for a single policy whose engines have
        their own GPUs.
    """

    options: tuple[Option, ...]
    rollout: RolloutTime
    sync: SyncTime
    splits: tuple[Split, ...] = ()

    @property
    def model(self) -> str:
        return self.policy.model or "warm start"

    @property
    def parameters(self) -> int:
        return elements(self.engines.shape).total

    @property
    def active_parameters(self) -> int:
        return active_elements(self.engines.shape)

    @property
    def micro_batch_tokens(self) -> int:
        return self.job.training.tokens

    @property
    def chosen(self) -> Option | None:
        """The config's layout if it fits, else the best layout that fits; None if nothing fits."""
        if self.configured is not None and self.configured.fits:
            return self.configured
        return self.options[0] if self.options and self.options[0].fits else None


@dataclass(frozen=True)
class Plan:
    """The plan of a whole run. refused: reasons why the run would not start. notes: sentences about what does not fit."""

    gpu: str
    num_gpus: int
    num_trainers: int
    num_engine_gpus: int
    overlap: int
    policies: tuple[PolicyPlan, ...]
    refused: tuple[str, ...]
    notes: tuple[str, ...]
    constants: tuple[hw.Constant, ...]

    @property
    def fits(self) -> bool:
        """True if the settings would run unchanged."""
        return not self.refused and all(policy.fits for policy in self.policies)

    @property
    def seconds(self) -> dict[str, float] | None:
        """Seconds of each part of a step and of the whole step; None if nothing fits."""
        chosen = [p.chosen for p in self.policies]
        updates = [each.time.total for each in chosen if each is not None]
        if len(updates) < len(chosen):
            return None
        rollouts, syncs = [p.rollout.seconds for p in self.policies], [p.sync.total for p in self.policies]
        total = step_seconds(rollouts, updates, syncs, self.overlap)
        return {"rollout": max(rollouts), "step": sum(updates), "publish": sum(syncs), "total": total}

    @property
    def step_s(self) -> float | None:
        """Seconds of one step with rollout, updates and publishing; None if nothing fits."""
        return None if self.seconds is None else self.seconds["total"]


def make_plan(config: RunConfig, num_gpus: int, gpu_name: str, mean_response: float | None = None) -> Plan:
    """Plan a run on num_gpus GPUs, engines included.

    mean_response: mean completion tokens; default: a share of rollout.max_response_tokens (hardware.py).

    Raises ValueError if a model's shape is unknown, or there are fewer GPUs than the engines alone need.
    """
    gpu = hw.GPUS[gpu_name]
    longest = config.rollout.max_response_tokens
    if mean_response is not None and not 0 < mean_response <= longest:
        raise ConfigError(
            f"--mean-response is {mean_response:g}, expected more than 0 and at most rollout.max_response_tokens, {longest}"
        )
    config = with_backend(config, on_gpus=True).with_dtypes(dict.fromkeys(config.undecided, "bfloat16"))
    served = tuple(config.served_rollouts.values())
    engine_gpus = num_engine_gpus(served)
    if engine_gpus >= num_gpus:
        raise ConfigError(
            f"rollout: {' + '.join(f'{pool.engines} engines x {pool.vllm.tensor_parallel} GPUs' for pool in served)} = "
            f"{engine_gpus} GPUs, but --gpus is {num_gpus}, so none is left for training; lower rollout.engines or "
            "policies.<name>.engines, or raise --gpus"
            + (f"; presets for one GPU: {', '.join(_FOR_ONE_GPU)}" if num_gpus == 1 else "")
        )
    trainers = num_gpus - engine_gpus
    node_gpus = int(hw.GPUS_PER_NODE.value)
    has_others = names_other_hosts(config.rollout.ray_address)
    host = TrainerHost(min(node_gpus, num_gpus), min(node_gpus, trainers), has_others)
    policies, notes = list[PolicyPlan](), _notes_on_engines(config, num_gpus) + _notes_on_staleness(config)
    refused: list[str | None] = [*refusals_of(config, host)]
    pools = config.pools_of_adapters
    # Adapters on one base are planned together.
    for name in dict.fromkeys(pools.get(policy, policy) for policy in config.trained_policies):
        planned, vllm = _policy(config, name, trainers, num_gpus, gpu, mean_response), config.rollout_of(name).vllm
        policies.append(planned)
        notes += [*shortages(planned), *_notes_on_layouts(planned)]
        refused += [wider_than_a_host(vllm.tensor_parallel, node_gpus), why_not_cut(planned.engines.shape, vllm)]
    refused += [why_not_backend(config, has_cuda=True), why_not_one_micro_batch(config, trainers)]
    if config.rollout.placement != "local":
        notes += _notes_on_the_split({planned.name: planned for planned in policies})
    if num_gpus == 1 and len(policies) == 1 and not policies[0].fits and policies[0].policy.model:
        notes += _notes_on_presets(policies[0].policy.model, gpu, gpu_name)
    if frozen := [name for name, policy in config.policies.items() if policy.frozen]:
        notes.append(f"frozen policies have no learner, so only their engines' GPUs are planned: {', '.join(frozen)}")
    if config.judge is not None:
        phases = {"evaluate": "evaluations", "always": "training and evaluations"}[config.judge.when]
        notes.append(
            f"policy {config.judge.policy} judges the answers in {phases}; neither its time nor its memory is planned"
        )
    if len(policies) > 1:
        notes.append(
            "all policies share the trainer ranks, but each is planned alone here; add up their weights, gradients and optimizer "
            "state"
        )
    return Plan(
        gpu_name,
        num_gpus,
        trainers,
        engine_gpus,
        config.rollout.overlap,
        tuple(policies),
        tuple(dict.fromkeys(sentence for sentence in refused if sentence is not None)),
        tuple(notes),
        tuple(hw.constants(gpu)),
    )


def _policy(
    config: RunConfig, name: str, trainers: int, num_gpus: int, gpu: hw.Gpu, mean_response: float | None
) -> PolicyPlan:
    rollout, backend = config.rollout, config.sync.backend
    needs = _needs(config, name, trainers, gpu, mean_response)
    is_alone = rollout.placement == "disaggregated" and len(config.served_rollouts) == 1
    return PolicyPlan(
        **vars(needs),
        options=tuple(options(needs.job, gpu)),
        rollout=rollout_time(needs.engines, needs.engine, gpu, needs.demand),
        sync=sync_time(backend, needs.engines, trainers, needs.job.training.layout.expert, num_gpus, gpu),
        splits=tuple(splits(needs.job, needs.engines, needs.demand, backend, rollout.overlap, num_gpus, gpu))
        if is_alone
        else (),
    )


def _needs(config: RunConfig, name: str, trainers: int, gpu: hw.Gpu, mean_response: float | None = None) -> Needs:
    policy, shortened = config.policies[name], config
    shape = find_shape(policy.model) if policy.model else taught_shape(config, policy)
    if shape is None:
        raise ConfigError(f"policies.{name}.model is not set; set a directory or the name of a published model")
    for member in config.policies_in(name):
        shortened = shorten_prompts(shortened, member, shape.max_positions)
    return needs_of(shortened, name, shape, trainers, gpu, mean_response)


def _notes_on_presets(model: str, gpu: hw.Gpu, gpu_name: str) -> list[str]:
    """Return a note on the presets with which the model fits on one GPU, and the GiB of each; [] if none fits."""
    fitting = []
    for preset in _FOR_ONE_GPU:
        config, _ = read_config(preset, [f"policies.main.model={model}"])
        needs = _needs(with_backend(config, on_gpus=True), "main", 1, gpu)
        if needs.fits and needs.configured is not None:
            fitting.append(f"{preset} ({needs.configured.needed / GIB:.1f} GiB)")
    if not fitting:
        return []
    return [f"these presets fit {model} on one {gpu_name}: {', '.join(fitting)}; use --config {fitting[0].split()[0]}"]


def _notes_on_the_split(policies: Mapping[str, Needs]) -> list[str]:
    """Return notes on the policies' shares of the engines' GPUs, and on a faster split.

    The search is greedy: starting from one engine per policy, the next engine goes to the policy that would finish last.
    """
    if len(policies) < 2 or not all(needs.engine.kv_tokens for needs in policies.values()):
        return []
    now, best = {name: needs.engines.num_engines for name, needs in policies.items()}, dict.fromkeys(policies, 1)
    num_gpus = sum(needs.engines.num_gpus for needs in policies.values())
    left = num_gpus - sum(needs.engines.tensor_parallel for needs in policies.values())
    while True:
        last = max(policies, key=lambda name: policies[name].rollout_s(best[name]))
        left -= policies[last].engines.tensor_parallel
        if left < 0:
            break
        best[last] += 1
    seconds, least = (max(needs.rollout_s(counts[name]) for name, needs in policies.items()) for counts in (now, best))
    current = f"the policies' engines share {num_gpus} GPUs ({_listed(now)}): a step's completions take {seconds:.0f} s"
    if least > 0.9 * seconds:
        return [f"{current}; no other split is 10 % faster"]
    return [f"{current}; {_listed(best)} would take {least:.0f} s (policies.<name>.engines)"]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _notes_on_layouts(planned: PolicyPlan) -> list[str]:
    notes = []
    trainers, best = planned.job.training.world_size, planned.options[0]
    if planned.why_not_configured:
        notes.append(f"policy {planned.name}: {planned.why_not_configured}")
    configured = planned.configured
    if configured is not None and configured.memory.host:
        notes.append(
            f"policy {planned.name}: each rank offloads {configured.memory.host / GIB:.0f} GiB to host memory; with weight "
            f"files and recorded experts a node needs {planned.host_bytes / GIB:.0f} of {planned.gpu.host_memory / GIB:.0f} GiB"
        )
    if planned.policy.overlap_dispatch or planned.policy.dispatcher != "alltoall":
        notes.append(
            f"policy {planned.name}: an update is planned as with dispatcher=alltoall and overlap_dispatch=false, because other "
            "values have not been measured"
        )
    if not best.fits:
        notes.append(
            f"policy {planned.name}: no layout fits on {trainers} trainer GPUs; the closest, {best.layout.words} with "
            f"recompute {best.recompute}, needs {best.needed / GIB:.1f} GiB: {best.why_not}"
        )
    return notes


def _notes_on_staleness(config: RunConfig) -> list[str]:
    overlap, correction = config.rollout.overlap, config.loss.correction
    if overlap and correction != "none":
        return [
            f"rollout.overlap={overlap}: a sample is trained at most about {config.versions_old} versions after its first token "
            f"was sampled; loss.correction={correction} corrects for that"
        ]
    return stale_samples(config)


def _notes_on_engines(config: RunConfig, num_gpus: int) -> list[str]:
    notes = []
    if config.sync.backend != "shm":
        notes.append(
            f"sync.backend={config.sync.backend} has not been tested on GPUs; the seconds of a publish come from formulas alone"
        )
    elif config.sync.directory is not None:
        notes.append(f"sync.directory={config.sync.directory}: the plan assumes the speed of host memory")
    if config.rollout.placement == "colocated":
        beside = "the trainer's weights, gradients and optimizer state, unless trainer.sleep=true frees them"
        if config.trainer.sleep:
            beside = "the trainer's CUDA context alone (trainer.sleep)"
        notes.append(
            "rollout.placement=colocated: engines release their memory during updates; during the rollout they must fit beside "
            f"{beside}"
        )
    if config.rollout.placement == "local" and num_gpus > 1:
        notes.append("rollout.placement=local decodes only on trainer rank 0's GPU; the other GPUs wait")
    if any(pool.vllm.draft_tokens for pool in config.served_rollouts.values()):
        notes.append(
            "rollout.vllm.draft_tokens: decoding is planned without drafts, since their gain depends on rollout/accepted_tokens"
        )
    if config.rollout.rebalance:
        notes.append(f"planned for the initial split of the engines: {rebalance_outlook(config, has_gpus=True)}")
    return notes
