"""Builds a run's parts from its settings, the most failure-prone first, and closes them at the end.

all ranks:  process groups, the warm start if a policy has no model, one learner and one weight sync per trained policy
rank 0:     run directory, engines (Ray or in process), rollout, evaluator, logs
"""

from __future__ import annotations

import dataclasses
import functools
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from marsrl.kernels import PolicyObjective
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import EngineSpec, Records
from marsrl.rollout.engines.refusals import RankHost, TrainerHost
from marsrl.rollout.gateway.vllm_reader import agents_of
from marsrl.rollout.gateway.workers import workers_key
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.player.refill import Counting
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.player.stages import Stages
from marsrl.rollout.pool.build import make_openai_pool, make_pool
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.rebalance import Rebalancer
from marsrl.rollout.rewards.model_judge import ModelJudge
from marsrl.rollout.tasks.data import right_answers
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.tools.build import build_tools
from marsrl.trainer.checks.batch_plan import longest_sequence
from marsrl.trainer.checks.preflight import Checked
from marsrl.trainer.config import RunConfig
from marsrl.trainer.data.credit import spread
from marsrl.trainer.driver import Driver
from marsrl.trainer.evaluate.evaluator import Evaluator
from marsrl.trainer.evaluate.identity import evaluation_identity
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.megatron.layout import resolve
from marsrl.trainer.learner.other_roundings import Precision
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.prometheus import MetricsPort, served
from marsrl.trainer.report.step_log import StepLog
from marsrl.trainer.run import Run
from marsrl.trainer.runs.collective import barrier, broadcast_bytes, gather_bytes, rank, world_size
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.existing_run import as_it_began
from marsrl.trainer.runs.failure import where_to_go_on
from marsrl.trainer.runs.heartbeat import Heartbeat, heartbeat
from marsrl.trainer.runs.stop import handlers_restored
from marsrl.trainer.supervised.warm_start import warm_starts
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.league import League
from marsrl.trainer.weights.sync import AdapterSync, DirectSync, FileSync, WeightSync

if TYPE_CHECKING:  # adapter.py imports megatron.
    from marsrl.trainer.learner.megatron.adapter import FrozenBase

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def with_first_rank_dtypes(config: RunConfig) -> RunConfig:
    """Return the config with rank 0's dtypes, because `auto` depends on a host's processor. Collective."""
    dtypes = {name: policy.dtype for name, policy in config.policies.items()}
    return config.with_dtypes(json.loads(broadcast_bytes(json.dumps(dtypes).encode() if rank() == 0 else None)))


def join_ranks(
    stack: ExitStack, config: RunConfig, directory: RunDirectory | None
) -> tuple[RunDirectory, RunConsole, Heartbeat | None]:
    """Open process groups, run directory, console and heartbeat of this rank until the stack closes. Collective."""
    stack.enter_context(handlers_restored())
    parallel.start(resolve(next(iter(config.trained_policies.values())).layout), config.run.seed)
    stack.callback(parallel.stop)
    path = broadcast_bytes(str(directory.path).encode() if directory else None).decode()
    directory = directory or RunDirectory(Path(path))
    console, beat = RunConsole(rank()), None
    console.keep_warnings(directory.warnings)
    if world_size() > 1:  # From now on, ranks wait for each other as long as heartbeats arrive.
        beat = stack.enter_context(heartbeat(config.run.silence_s, functools.partial(where_to_go_on, directory)))
    return directory, console, beat


@contextmanager
def open_run(checked: Checked, directory: RunDirectory | None) -> Iterator[Run]:
    """Open the run, ready for the loop; on exit, close engines, workers, files and process groups.

    directory: the run directory on rank 0 (created before anything starts); None elsewhere.
    """
    config = checked.config
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    with ExitStack() as stack:
        directory, console, beat = join_ranks(stack, config, directory)
        config = with_first_rank_dtypes(config)
        host = dataclasses.replace(checked.host, rank_hosts=_hosts_of_ranks(checked.host))
        checked = dataclasses.replace(checked, config=config, host=host)
        models = {name: policy.directory or "" for name, policy in config.policies.items()}
        seconds: dict[str, float] = {}
        if not all(models.values()):
            began = time.monotonic()
            models |= warm_starts(as_it_began(directory, config), console)
            seconds["warm_start"] = time.monotonic() - began
        trained = config.trained_policies
        learners: dict[str, Learner] = {}
        for name, policy in trained.items():
            pool = policy.base or name
            shared = (learner.base for other, learner in learners.items() if pool in (other, trained[other].base))
            with console.part(f"loading {models[name]} to train {name}"):
                learners[name] = _learner(config, name, models[name], next(shared, None))
                if learners[name].base is None:
                    learners[name].sleep()
        for learner in learners.values():  # A shared base has all of its adapters now.
            learner.allocate()
            learner.sleep()
        if config.trainer.sleep:
            barrier()  # Engines start once the memory of all ranks is free.
        team = None
        if rank() == 0:
            with console.part("starting engines"):
                team = stack.enter_context(open_team(checked, models))
        syncs: dict[str, WeightSync] = {}
        for name in trained:
            syncs[name] = _sync(config, name, models[name], team.pool_of(name) if team is not None else None)
            stack.callback(syncs[name].close)
        driver = stack.enter_context(_driver(checked, directory, console, team)) if team is not None else None
        if driver is not None and config.league is not None:
            sync = syncs[config.league.policy]
            assert isinstance(sync, AdapterSync), "agreement.py refuses a league of whole weights"
            league = League(config.league, directory, sync, config.sync.directory)
            driver.league = stack.enter_context(closing(league))
        if driver is not None and config.run.prometheus_port:
            driver.log.port = MetricsPort(
                directory.path.name,
                num_steps=config.run.steps,
                engines=lambda: {name: pool.num_engines for name, pool in driver.team.pools.items()},
                silences_s=lambda: {} if beat is None else beat.silences_s,
            )
            stack.enter_context(served(config.run.prometheus_port, driver.log.port))
        if beat is not None:
            stack.push(beat)  # The heartbeat ends first, because closing the rest may take long.
        yield Run(config, directory, console, learners, syncs, driver, seconds)


def _hosts_of_ranks(host: TrainerHost) -> tuple[RankHost, ...]:
    """Return the hosts of all ranks, with their numbers of GPUs and ranks. Collective."""
    lines = [tuple(line.decode().split()) for line in gather_bytes(f"{socket.gethostname()} {host.num_gpus}".encode())]
    return tuple(RankHost(name, int(num_gpus), num) for (name, num_gpus), num in Counter(lines).items())


def _sync(config: RunConfig, policy: str, model_dir: str, pool: EnginePool | None) -> WeightSync:
    """Return this rank's part of the weight sync from a policy's learner to the policy's engines.

    pool: the engines, on rank 0; None on other ranks.
    """
    shape, sync = read_shape(model_dir), config.sync
    adapter, engines = config.policies[policy].adapter, None
    if pool is not None:
        name, settings = "" if adapter is None else policy, shape.settings()
        engines = CheckedEngines(pool, vocab_size=shape.vocab_size, settings=settings, adapter=name)
    dtype: torch.dtype = getattr(torch, config.engine_dtype(policy))
    precision = Precision(dtype)
    if config.rollout.engine == "vllm":
        vllm = config.rollout_of(policy).vllm
        precision = Precision(dtype, _FP8.get(vllm.kv_cache_dtype), _FP8.get(vllm.quantization or ""))
    common: dict[str, Any] = {"verify_every": sync.verify_every, "precision": precision}
    if adapter is not None:
        base = config.policies[policy].base or policy
        of_base = [name for name, each in config.trained_policies.items() if (each.base or name) == base]
        common["turn"] = of_base.index(policy)
        return AdapterSync(engines, dtype, base=model_dir, adapter=adapter, directory=sync.directory, **common)
    if sync.backend == "shm":
        return FileSync(engines, dtype, directory=sync.directory, **common)
    assert sync.backend != "auto", "resolved by preflight"
    host, num_bytes = pool.host if pool is not None else "", sync.bucket_mib << 20
    return DirectSync(
        engines,
        dtype,
        sync.backend,
        bucket_bytes=num_bytes,
        timeout_s=sync.timeout_s,
        host=host,
        sends_deltas=sync.delta,
        **common,
    )


def _learner(config: RunConfig, name: str, model_dir: str, base: FrozenBase | None) -> Learner:
    loss, policy = config.loss, config.policies[name]
    start = model_dir if policy.adapter is None else None  # An adapter's initial weights are in memory already.
    reference_dir = {"none": None, "start": start, "past": start}.get(policy.reference, policy.reference)
    field_names = {field.name for field in dataclasses.fields(PolicyObjective)}
    of_loss, of_reward = (loss.kl_coef, 0.0) if loss.kl_in == "loss" else (0.0, loss.kl_coef)
    common = loss.model_dump(include=field_names) | {"correction_high": loss.upper_bound, "kl_coef": of_loss}
    clips = [agent.model_dump(include={"clip_low", "clip_high"}, exclude_none=True) for agent in config.agents.values()]
    return Learner(
        policy,
        model_dir,
        objectives=[PolicyObjective(**common | clip) for clip in clips],
        mpt=config.mpt,
        total_steps=config.run.steps,
        seed=config.run.seed,
        old_policy=loss.old_policy,
        router_replay=config.trainer.router_replay,
        reference_dir=reference_dir,
        reward_kl_coef=of_reward,
        base=base,
        sleeps=config.trainer.sleep,
    )


@contextmanager
def _driver(checked: Checked, directory: RunDirectory, console: RunConsole, team: Team) -> Iterator[Driver]:
    """Open the rollout, the evaluator and the step log on rank 0; on exit, close the rollout."""
    config = checked.config
    with ExitStack() as stack:
        source = checked.task.problems(config.run.seed)
        counting = None
        if config.rollout.refill is not None or config.data.rest:
            spread_of = functools.partial(spread, config=config.credit, trained=config.rewarded_agents)
            counting = Counting(spread_of, config.counted_agent, config.data.rest)
        seed, trains_whole = config.run.seed, config.trains_whole
        stages = Stages(config.rollout, team, source, seed=seed, trains_whole=trains_whole, counting=counting)
        rollout = Rollout(stages)
        stack.callback(rollout.close)
        mover = Rebalancer(team.pools, say=console.message) if config.rollout.rebalance else None
        log = StepLog(config, directory, console, team)
        yield Driver(directory, console, team, rollout, make_evaluator(checked, team), log, mover)


def make_evaluator(checked: Checked, team: Team) -> Evaluator:
    """Return an evaluator of the team on the task's held-out problems."""
    config = checked.config
    return Evaluator(
        team,
        config.evaluate,
        checked.task,
        max_tokens=config.rollout.max_response_tokens,
        seed=config.run.seed,
        sets=checked.problems.sets,
        identity=evaluation_identity(config),
    )


@contextmanager
def open_team(checked: Checked, models: dict[str, str]) -> Iterator[Team]:
    """Open the team for training or `marsrl evaluate`: agents, engines, tools, and the judge if any."""
    config = checked.config.in_bytes()
    with ExitStack() as stack:
        stack.callback(checked.task.close)
        renderers = {name: ChatRenderer(models[name]) for name in config.policies}

        def opened(name: str, deadline_s: float | None) -> EnginePool:
            longest, host = longest_sequence(config, name), checked.host
            pool = open_pool(config, name, models[name], max_model_len=longest, host=host, deadline_s=deadline_s)
            return stack.enter_context(pool)

        of_agents = {agent.policy for agent in config.agents.values()}
        pools: dict[str, EnginePool] = {}
        teachers = {name: opened(name, None) for name in config.policies if name in config.teachers}
        adapters = config.pools_of_adapters
        for name, policy in config.policies.items():
            if name in teachers:
                continue
            decodes = name in of_agents or name in adapters.values()
            if policy.base is None and (config.judge is None or name != config.judge.policy or decodes):
                pools[name] = opened(name, config.rollout.deadline_s)
        orchestration = build_orchestration(
            config.orchestration,
            config.agents,
            checked.task.prompts,
            config.orchestration_options,
            config.rollout,
            config.evaluate,
            config.tools.given,
            {name: renderers[agent.policy] for name, agent in config.agents.items()},
        )
        records = frozenset(name for name in config.policies if config.records_of(name).experts)
        judge = None
        if config.judge is not None:
            name = config.judge.policy
            judge = ModelJudge(
                opened(name, None),
                renderers[name],
                config.judge,
                task_judge=checked.task.judge,
                seed=config.run.seed,
                right_answers=right_answers,
            )
            stack.callback(judge.close)
        tools = gateway = None
        if config.external is not None:
            # Imported here, because most runs need no HTTP server.
            from marsrl.rollout.gateway.server import (
                open_gateway,
            )

            servers = {name: each.openai.api for name, each in config.policies.items() if each.openai is not None}
            agents = agents_of(config.agents, renderers, config.rollout.max_response_tokens, config.parsers, servers)
            key, by_turn = workers_key(config.external), config.credit.turns == "returns"
            gateway = stack.enter_context(open_gateway(config.external, agents, key, sums_turns=by_turn))
        elif orchestration.tools:
            tools = build_tools(config.tools, orchestration.tools, checked.task.documents, checked.task.papers)
            stack.callback(tools.close)
        yield Team(
            config.agents,
            orchestration,
            renderers,
            pools,
            WatchedJudge(checked.task.judge, judge),
            records,
            config.rollout.max_turns,
            tools,
            config.max_kept,
            teachers,
            adapters,
            gateway,
        )


def open_pool(
    config: RunConfig, name: str, model: str, *, max_model_len: int, host: TrainerHost, deadline_s: float | None
) -> EnginePool:
    """Open the engines that serve one policy and the adapters on it, or the client of the policy's server.

    model: the policy's model directory.
    max_model_len: largest number of tokens of a prompt and its completion together.
    deadline_s: seconds after which a replica that still holds a request counts as lost; None: no limit.
    """
    policy, served = config.policies[name], config.policies_in(name)
    if policy.openai is not None:
        return make_openai_pool(name, model, policy.openai, deadline_s=deadline_s, max_model_len=max_model_len)
    records = [config.records_of(name) for name in served]
    spec = EngineSpec(
        config.rollout.engine,
        model,
        config.engine_dtype(name),
        max_model_len,
        records=Records(any(record.kept_tokens for record in records), any(record.experts for record in records)),
        adapters={name: adapter for name in served if (adapter := config.policies[name].adapter) is not None}
        | config.past_adapters(name),
    )
    return make_pool(
        name,
        spec,
        config.rollout_of(name),
        served=tuple(config.served_rollouts.values()),
        host=host,
        silence_s=config.run.silence_s,
        own_host=config.sync.host,
    )
