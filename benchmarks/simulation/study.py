"""What is simulated, in which order: the fit and its predictions, the pipelines by segments, one axis at a time around them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from .calibrate import Fit, fit, sensitivity
from .cost_model import Constants
from .lengths import Lengths
from .play import Outcome, Pipeline, Setting, play

PIPELINES: tuple[Pipeline, ...] = ("trajectory", "agentic")


@dataclass(frozen=True)
class Grid:
    """The centre and the axes through it. The reference is trajectory with 1 segment, ours agentic with 4."""

    engines: int = 64
    problems: int = 512
    segments: tuple[int, ...] = (1, 2, 4, 8)
    overlap_at: tuple[int, int] = (8, 64)  # (engines, problems): as much work for an engine as in the centre
    engine_axis: tuple[int, ...] = (8, 64, 512)
    problem_axis: tuple[int, ...] = (128, 512, 4096)


def scaled_grid(grid: Grid, divisor: int) -> Grid:
    """Everything by `divisor` smaller, with as much work for each engine: less time, and more noise."""

    def less(value: int) -> int:
        return max(1, value // divisor)

    return replace(
        grid,
        engines=less(grid.engines),
        problems=less(grid.problems),
        engine_axis=tuple(map(less, grid.engine_axis)),
        problem_axis=tuple(map(less, grid.problem_axis)),
        overlap_at=(min(less(grid.engines), grid.overlap_at[0]), min(less(grid.problems), grid.overlap_at[1])),
    )


@dataclass
class Study:
    """Everything that was found. rows: outcome by setting; cpu_s: CPU seconds by row name."""

    constants: Constants
    fitted: Fit
    sensitivity: dict[str, dict[float, Fit]] = field(default_factory=dict)
    rows: dict[Setting, Outcome] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def ratio(self, engines: int, problems: int) -> float:
        """Time per trained sample, trajectory with 1 segment over agentic with 4."""
        return self.rows[reference(engines, problems)].s_per_sample / self.rows[ours(engines, problems)].s_per_sample


def reference(engines: int, problems: int) -> Setting:
    return Setting(engines, problems, "trajectory", 1)


def ours(engines: int, problems: int) -> Setting:
    return Setting(engines, problems, "agentic", 4)


def settings(grid: Grid) -> Iterator[Setting]:
    """Every run once, the centre first."""
    seen = set()
    places = [(grid.engines, grid.problems)]
    places += [(engines, grid.problems) for engines in grid.engine_axis]
    places += [(grid.engines, problems) for problems in grid.problem_axis]
    for pipeline in PIPELINES:
        for segments in grid.segments:
            setting = Setting(grid.engines, grid.problems, pipeline, segments)
            seen.add(setting)
            yield setting
    for place in places:
        for setting in (reference(*place), ours(*place)):
            if setting not in seen:
                seen.add(setting)
                yield setting
    yield from (overlapped(grid, overlap) for overlap in (0, 1))


def overlapped(grid: Grid, overlap: int) -> Setting:
    """Agentic with 4 segments, twice the warm-up and more steps: batches of overlapping stages vary more."""
    setting = ours(*grid.overlap_at)
    return replace(setting, overlap=overlap, warmup=2 * setting.warmup_steps, steps=8)


def begin_study() -> Study:
    """With sigma fitted."""
    constants = Constants()
    begin = time.process_time()
    fitted = fit(constants)
    if fitted.sigma is None:
        raise RuntimeError("no sigma gives UloRL's time with one segment: a constant must be wrong by far")
    return Study(constants, fitted, cpu_s={"fit": time.process_time() - begin})


def add_sensitivity(study: Study) -> None:
    begin = time.process_time()
    study.sensitivity = sensitivity(study.constants)
    study.cpu_s["sensitivity"] = time.process_time() - begin


def add_rows(study: Study, grid: Grid, say: Callable[[str], None]) -> None:
    """Every setting of the grid; `say` gets a line after each."""
    assert study.fitted.sigma is not None
    for setting in settings(grid):
        begin = time.process_time()
        with _no_collector():
            study.rows[setting] = play(setting, study.constants, Lengths(study.fitted.sigma))
        gc.collect()
        cpu_s = study.cpu_s[name(setting)] = time.process_time() - begin
        say(f"{name(setting)}: {study.rows[setting].s_per_sample:.3f} s a sample ({cpu_s:.1f} s of CPU)")


def name(setting: Setting) -> str:
    overlap = f", overlap {setting.overlap}" if setting.overlap else ""
    return f"{setting.pipeline} x{setting.segments}{overlap}, {setting.engines} engines, {setting.problems} problems"


@contextmanager
def _no_collector() -> Iterator[None]:
    """Samples hold no cycles; looking for some among millions of them takes a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
