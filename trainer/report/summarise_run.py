"""A run in one page of numbers: what summary.json says."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from marsrl.trainer.config import RunConfig
from marsrl.trainer.doctor import LIBRARIES
from marsrl.trainer.machine import commit, device_name, library_versions
from marsrl.trainer.report.summary import EngineRecord, Evaluation, Summary, WarmStartRecord
from marsrl.trainer.schools.registry import school_of

if TYPE_CHECKING:
    from marsrl.trainer.driver import Driver
    from marsrl.trainer.run import Run

Gates = Mapping[str, tuple[float, float]]  # bounds of the mean by row of the evaluation


def summarise_run(run: Run, driver: Driver) -> Summary:
    """The summary of a run that has just ended."""
    config = run.config
    info = driver.team.pools[next(iter(run.learners))].infos()[0]  # of frozen policies the summary says nothing
    tokens = [count for pool in driver.team.all_pools for count in pool.num_decoded()]
    started = None
    if run.started:
        made = {each.model_dir: each for each in run.started.values()}.values()  # policies of one shape share it
        gates, rows = gates_of(config), driver.before.rows if driver.before is not None else {}
        started = WarmStartRecord(
            cached=all(each.is_cached for each in made),
            seconds=sum(each.seconds for each in made),
            gate_met=driver.before is not None and meets_gate(driver.before, gates),
            measured={name: rows[name].mean for name in gates if name in rows},
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
            sampler=info.sampler,
        ),
        tokens_per_engine=tuple(tokens),
        verified_syncs=driver.num_syncs,
        warm_start=started,
        timings={**run.total_seconds, "run": time.monotonic() - run.began},
        versions={"python": platform.python_version(), **library_versions(LIBRARIES)},
        commit=commit(),
    )


def gates_of(config: RunConfig) -> Gates:
    """Of the team that the warm start teaches; none where nobody does."""
    school = school_of(config)
    return school.gates(config.warm_start) if school is not None else {}


def meets_gate(before: Evaluation, gates: Gates) -> bool:
    """Is the warm-started team mediocre: good enough to learn from its own samples, with room to become better?"""
    return not missed_gates(before, gates)


def missed_gates(before: Evaluation, gates: Gates) -> list[str]:
    """For each row that is worse or better than it should be: what was found and what was wanted, for people."""
    missed = []
    for name, (low, high) in gates.items():
        if name in before.rows:
            mean = before.rows[name].mean
            if mean is None or not low <= mean <= high:
                missed.append(f"{name} {mean}, wanted {(low, high)}")
    return missed
