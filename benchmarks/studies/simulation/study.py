"""Study of simulated runs: the fit and its predictions, the pipelines by segments, and one parameter varied at a time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context

from simulation.calibrate import Fit, fit
from simulation.cost_model import Constants
from simulation.lengths import Lengths
from simulation.play import Outcome, Pipeline, Setting, play

PIPELINES: tuple[Pipeline, ...] = ("trajectory", "agentic")


@dataclass(frozen=True)
class Grid:
    """Grid of simulated runs around a centre. `reference` is the trajectory pipeline with 1 segment, `ours` agentic with 4.

    overlap_at: (engines, problems) where rollout.overlap is compared; None: nowhere.
    engine_axis: numbers of engines to simulate with `problems` problems. problem_axis: numbers of problems to simulate with
    `engines` engines.
    """

    engines: int = 64
    problems: int = 512
    group_size: int = 4  # half of the papers' 8, so that the grid takes minutes: 36 samples per problem instead of 72
    segments: tuple[int, ...] = (1, 4)
    overlap_at: tuple[int, int] | None = None
    engine_axis: tuple[int, ...] = ()
    problem_axis: tuple[int, ...] = ()


SENSITIVITIES = Grid(
    segments=(1, 2, 4, 8),
    overlap_at=(8, 64),  # work per engine is the same as at the grid's centre
    engine_axis=(8, 64, 512),
    problem_axis=(128, 512),
)
"""More segments, rollout.overlap, and one axis at a time, for four times the work."""

FULL = replace(SENSITIVITIES, problem_axis=(128, 512, 4096))
"""SENSITIVITIES, and also 4,096 problems, which doubles the time."""


def scaled_grid(grid: Grid, divisor: int) -> Grid:
    """Return the grid scaled down by `divisor`, with the same work for each engine: less time, more noise."""

    def less(value: int) -> int:
        return max(1, value // divisor)

    overlap_at = None
    if grid.overlap_at is not None:
        overlap_at = (min(less(grid.engines), grid.overlap_at[0]), min(less(grid.problems), grid.overlap_at[1]))
    return replace(
        grid,
        engines=less(grid.engines),
        problems=less(grid.problems),
        engine_axis=tuple(map(less, grid.engine_axis)),
        problem_axis=tuple(map(less, grid.problem_axis)),
        overlap_at=overlap_at,
    )


@dataclass
class Study:
    """Results of a study. rows: outcome by setting; cpu_s: CPU seconds by row name."""

    constants: Constants
    fitted: Fit
    rows: dict[Setting, Outcome] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def ratio(self, engines: int, problems: int) -> float:
        """Return the time per trained sample of trajectory with 1 segment, divided by that of agentic with 4."""
        slow, fast = (self.rows[setting_of(engines, problems)] for setting_of in (reference, ours))
        return slow.s_per_sample / fast.s_per_sample


def reference(engines: int, problems: int) -> Setting:
    return Setting(engines, problems, "trajectory", 1, group_size=Grid.group_size)


def ours(engines: int, problems: int) -> Setting:
    return Setting(engines, problems, "agentic", 4, group_size=Grid.group_size)


def central(grid: Grid, pipeline: Pipeline, segments: int) -> Setting:
    return Setting(grid.engines, grid.problems, pipeline, segments, group_size=Grid.group_size)


def settings(grid: Grid) -> list[Setting]:
    """Return every run once, the centre first."""
    sizes = [(grid.engines, grid.problems)]
    sizes += [(engines, grid.problems) for engines in grid.engine_axis]
    sizes += [(grid.engines, problems) for problems in grid.problem_axis]
    runs = [central(grid, pipeline, segments) for pipeline in PIPELINES for segments in grid.segments]
    runs += [setting for size in sizes for setting in (reference(*size), ours(*size))]
    if grid.overlap_at is not None:
        runs += [overlapped(grid.overlap_at, overlap) for overlap in (0, 1)]
    return list(dict.fromkeys(runs))


def overlapped(place: tuple[int, int], overlap: int) -> Setting:
    """Return `ours` with this overlap, twice the warm-up and more steps, because batches of overlapping stages vary more."""
    setting = ours(*place)
    return replace(setting, overlap=overlap, warmup=2 * setting.warmup_steps, steps=8)


def begin_study() -> Study:
    """Return a study with sigma fitted."""
    constants, begin = Constants(), time.process_time()
    return Study(constants, fit(constants), cpu_s={"fit": time.process_time() - begin})


def add_rows(study: Study, grid: Grid, say: Callable[[str], None], workers: int) -> None:
    """Play every setting of the grid, the largest first, and call `say` with a line after each."""
    work = sorted(settings(grid), key=_size, reverse=True)
    timed = partial(_timed, study.constants, Lengths(study.fitted.sigma))
    # A forked child keeps this checkout's modules, even if another marsrl is installed.
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        for setting, (outcome, cpu_s) in zip(work, pool.map(timed, work), strict=True):
            study.rows[setting] = outcome
            study.cpu_s[name(setting)] = cpu_s
            say(f"{name(setting)}: {outcome.s_per_sample:.3f} s a sample ({cpu_s:.1f} s of CPU)")
    study.rows = {setting: study.rows[setting] for setting in settings(grid)}


def _size(setting: Setting) -> int:
    """Return the approximate work of simulating a setting."""
    return setting.problems * (setting.warmup_steps + setting.steps) * (5 if setting.pipeline == "trajectory" else 1)


def _timed(constants: Constants, lengths: Lengths, setting: Setting) -> tuple[Outcome, float]:
    """Play a setting with the garbage collector off.

    Samples have no reference cycles, and searching millions of samples for cycles would take a third of the time.
    """
    begin = time.process_time()
    gc.disable()
    try:
        return play(setting, constants, lengths), time.process_time() - begin
    finally:
        gc.enable()
        gc.collect()


def name(setting: Setting) -> str:
    overlap = f", overlap {setting.overlap}" if setting.overlap else ""
    return f"{setting.pipeline} x{setting.segments}{overlap}, {setting.engines} engines, {setting.problems} problems"
