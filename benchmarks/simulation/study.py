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
from .play import Outcome, Setting, play


@dataclass(frozen=True)
class Grid:
    """The centre and the axes through it. The reference is trajectory with 1 segment, ours agentic with 4."""

    engines: int = 64
    problems: int = 512
    segments: tuple[int, ...] = (1, 2, 4, 8)
    overlap_at: tuple[int, int] = (8, 64)  # (engines, problems): as much work for an engine as in the centre
    engine_axis: tuple[int, ...] = (8, 64, 512)
    problem_axis: tuple[int, ...] = (128, 512, 4096)
    has_sensitivity: bool = True


SMALL = Grid(engines=4, problems=16, segments=(1, 4), overlap_at=(2, 8), engine_axis=(4, 8), problem_axis=(16, 32), has_sensitivity=False)
"""Says that it runs, not how fast anything is."""


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
    for pipeline in ("trajectory", "agentic"):
        for segments in grid.segments:
            setting = Setting(grid.engines, grid.problems, pipeline, segments)  # type: ignore[arg-type]
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


def run_study(grid: Grid, say: Callable[[str], None]) -> Study:
    """All of it; `say` gets a line after each part."""
    constants = Constants()
    with _no_collector():
        begin = time.process_time()
        fitted = fit(constants)
        if fitted.sigma is None:
            raise RuntimeError("no sigma gives UloRL's time with one segment: a constant must be wrong by far")
        study = Study(constants, fitted, cpu_s={"fit": time.process_time() - begin})
        say(f"sigma = {fitted.sigma:.3f}")
        if grid.has_sensitivity:
            begin = time.process_time()
            study.sensitivity = sensitivity(constants)
            study.cpu_s["sensitivity"] = time.process_time() - begin
            say("sensitivity: done")
        for setting in settings(grid):
            begin = time.process_time()
            study.rows[setting] = play(setting, constants, Lengths(fitted.sigma))
            gc.collect()
            cpu_s = time.process_time() - begin
            study.cpu_s[name(setting)] = cpu_s
            say(f"{name(setting)}: {study.rows[setting].s_per_sample:.3f} s a sample ({cpu_s:.1f} s of CPU)")
    return study


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
