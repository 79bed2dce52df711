"""The pipelines played for real on this machine, for `python benchmarks/pipeline.py`."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.team import Team
from marsrl.trainer.build import open_team
from marsrl.trainer.checks.preflight import Checked, preflight
from marsrl.trainer.config.read import read_config
from marsrl.trainer.machine import commit, device_name
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.schools.warm_start import warm_start

ROWS = tuple((pipeline, segments) for pipeline in ("trajectory", "agentic") for segments in (1, 2, 4))


@dataclass(frozen=True)
class Played:
    """One row. latency_s: of a problem, from the stage that drew it to its last group; mean. staleness: in stages."""

    pipeline: str
    segments: int
    seconds: float
    samples: int
    tokens: int
    stages: int
    latency_s: float
    staleness: float

    @property
    def s_per_sample(self) -> float:
        return self.seconds / self.samples


def play_problems(team: Team, checked: Checked, pipeline: str, segments: int, num_problems: int) -> Played:
    """Play num_problems to their end; prompts_per_step new ones a stage (agentic) or a step (trajectory)."""
    update = {"pipeline": pipeline, "segments": segments, "segment_length": None, "overlap": 0}
    config = checked.config.rollout.model_copy(update=update)
    rollout = Rollout(config, team, checked.task.problems(0), seed=0)
    state = rollout.stages.state
    drawn_s: dict[str, float] = {}
    trained_s: dict[str, float] = {}
    counts: Counter[str] = Counter()
    staleness, samples, calls = 0, 0, 0
    begin = time.perf_counter()
    while True:
        left = num_problems - state.num_instances
        if not left and not state.open and not state.pending:
            break
        # Past the validator: with 0 new problems the last stages only finish what is there.
        rollout.stages.config = config.model_copy(update={"prompts_per_step": min(left, config.prompts_per_step)})
        first, now = state.num_instances, time.perf_counter()
        batch = rollout.next_batch({"main": 0})
        drawn_s.update((f"{n + 1:06d}", now) for n in range(first, state.num_instances))
        now = time.perf_counter()
        for group in batch.groups:
            trained_s[group.rollout_id] = now
            samples += len(group.samples)
            staleness += sum(len(sample.segments) - 1 for sample in group.samples)
        counts.update(batch.metrics)
        calls += 1
    seconds = time.perf_counter() - begin
    latency_s = statistics.fmean(trained_s[rollout_id] - since for rollout_id, since in drawn_s.items())
    return Played(
        pipeline, segments, seconds, samples, int(counts["rollout/tokens"]), int(counts["rollout/stages"]), latency_s,
        staleness / samples if pipeline == "agentic" else 0.0,
    )  # fmt: skip


def played(num_problems: int, model_dir: str | None, settings: Sequence[str], json_path: str | None) -> float:
    """Every row in turn, the first twice (a warm-up); returns the ratio."""
    checked = preflight(read_config(None, list(settings))[0], world_size=1)
    with ExitStack() as stack:
        if model_dir is None:
            from marsrl.trainer.learner.megatron import parallel
            from marsrl.trainer.learner.megatron.layout import resolve

            layout = next(iter(checked.config.policies.values())).layout
            parallel.start(resolve(layout), checked.config.run.seed)
            stack.callback(parallel.stop)
            model_dir = str(warm_start(checked.config, RunConsole(0)).model_dir)
        team = stack.enter_context(open_team(checked, dict.fromkeys(checked.config.policies, model_dir)))
        play_problems(team, checked, *ROWS[0], min(num_problems, checked.config.rollout.prompts_per_step))
        rows = {}
        for pipeline, segments in ROWS:
            row = rows[pipeline, segments] = play_problems(team, checked, pipeline, segments, num_problems)
            print(
                f"{pipeline:10} x{segments}: {row.samples} samples of {num_problems} problems in {row.seconds:.1f} s and "
                f"{row.stages} stages, {1e3 * row.s_per_sample:.1f} ms a sample, {row.tokens / row.seconds:,.0f} tokens/s; a "
                f"problem takes {row.latency_s:.1f} s; staleness {row.staleness:.2f}",
                flush=True,
            )
    if json_path:
        numbers = [{**asdict(row), "s_per_sample": row.s_per_sample} for row in rows.values()]
        record = {"device": device_name(), "commit": commit(), "settings": list(settings), "rows": numbers}
        Path(json_path).write_text(json.dumps(record, indent=1) + "\n")
    return rows["trajectory", 1].s_per_sample / rows["agentic", 4].s_per_sample
