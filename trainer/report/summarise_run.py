"""A run in one page of numbers: what summary.json says."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING

from marsrl.trainer.config import WarmStartConfig
from marsrl.trainer.doctor import library_versions
from marsrl.trainer.machine import commit, device_name
from marsrl.trainer.report.summary import EngineRecord, Evaluation, Summary, WarmStartRecord

_GATED = ("solver", "verifier1")  # whom the warm start teaches to be mediocre

if TYPE_CHECKING:
    from marsrl.trainer.run import Driver, Run


def summarise_run(run: Run, driver: Driver) -> Summary:
    """The summary of a run that has just ended."""
    config = run.config
    info = driver.team.pools[next(iter(run.learners))].infos()[0]  # of frozen policies the summary says nothing
    tokens = [count for pool in driver.team.all_pools for count in pool.num_decoded()]
    started = None
    if run.started:
        made = {each.model_dir: each for each in run.started.values()}.values()  # policies of one shape share it
        agents = driver.before.agents if driver.before else {}
        solver, verifier = (agents[name].mean if name in agents else None for name in _GATED)
        met = driver.before is not None and meets_gate(driver.before, config.warm_start)
        started = WarmStartRecord(
            cached=all(each.is_cached for each in made),
            seconds=sum(each.seconds for each in made),
            gate_met=met,
            solver=solver,
            verifier=verifier,
        )
    return Summary(
        name=run.directory.path.name,
        task=config.task,
        model=", ".join(policy.model or "warm start" for policy in config.policies.values()),
        device=device_name(),
        steps=run.step,
        seeds={"run": config.run.seed},
        before=driver.before,
        after=driver.after,
        engine=EngineRecord(
            engine_class=info.engine_class,
            library=info.library,
            version=info.library_version,
            kind=info.kind,
            device=info.device,
            dtype=info.dtype,
        ),
        tokens_per_engine=tuple(tokens),
        verified_syncs=driver.num_syncs,
        warm_start=started,
        timings={**run.total_seconds, "run": time.monotonic() - run.began},
        versions={"python": platform.python_version(), **library_versions()},
        commit=commit(),
    )


def meets_gate(before: Evaluation, settings: WarmStartConfig) -> bool:
    """Is the warm-started team mediocre: good enough to learn from its own samples, with room to become better?"""
    return not missed_gates(before, settings)


def missed_gates(before: Evaluation, settings: WarmStartConfig) -> list[str]:
    """For each agent that is worse or better than it should be: what was found and what was wanted, for people."""
    missed = []
    for name, (low, high) in zip(_GATED, (settings.gate_solver, settings.gate_verifier), strict=True):
        if name in before.agents:
            mean = before.agents[name].mean
            if mean is None or not low <= mean <= high:
                missed.append(f"{name} {mean}, wanted {(low, high)}")
    return missed
