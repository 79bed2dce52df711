"""Supervised traces turn random weights into a mediocre team, because a fresh machine has no pretrained ones.

    phase 1   the Solver alone with few slips, short problems and single operations first, until its loss is low: the
              arithmetic table must be there before anything else can be learned
    phase 2   all roles from tutors that slip, until the Verifier's loss is low as well: it first copies the claim's
              lines, and stays at chance until it works them out; then the learning rate falls. Verdict tokens weigh more

The learner is the one that does RL: imitation is the policy gradient with a token's weight in the advantage's place.
The result is cached by the hash of its recipe, and RL always starts from the cached file, so that a run from a fresh
and one from a cached warm start are the same run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from marsrl.kernels import PolicyObjective
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.arithmetic import ArithmeticTask, draw_chain
from marsrl.rollout.tasks.arithmetic_tutor import (
    Trace,
    TutorRates,
    equality_drill,
    solver_trace,
    table_drill,
    team_traces,
)
from marsrl.rollout.tasks.config import ArithmeticOptions
from marsrl.rollout.tasks.protocol import Task
from marsrl.trainer.config import MptConfig, OptimizerConfig, PolicyConfig, RunConfig, WarmStartConfig
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import BatchShard, micro_batches
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.runs.collective import barrier, rank

RECIPE = 3  # raise it when this file changes what comes out: cached warm starts of another recipe are not used
WRITERS = (Role.SOLVER, Role.VERIFIER, Role.CORRECTOR, None)  # the learner's "agents": roles, and the drills
SHAPE = "cpu_default"  # where policies.<name>.shape names none


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A warm-started policy. seconds: what making it took (0 for a cached one)."""

    model_dir: Path
    is_cached: bool
    seconds: float


def cache_directory() -> Path:
    """Where warm starts are kept: $MARSRL_CACHE or ~/.cache/marsrl."""
    return Path(os.environ.get("MARSRL_CACHE") or Path.home() / ".cache" / "marsrl") / "warm_start"


def warm_starts(config: RunConfig, task: Task, console: RunConsole) -> dict[str, WarmStart]:
    """Of every policy without a model, by its name; policies of one shape start from the same weights. Collective."""
    shapes = {name: policy.shape or SHAPE for name, policy in config.policies.items() if policy.model is None}
    made = {shape: warm_start(config, task, console, shape) for shape in dict.fromkeys(shapes.values())}
    return {name: made[shape] for name, shape in shapes.items()}


def warm_start(config: RunConfig, task: Task, console: RunConsole, shape: str = SHAPE) -> WarmStart:
    """The warm-started policy of this recipe, shape and seed, from the cache or made now. Collective over all ranks.

    Raises:
        ValueError: the task has no tutors (only the built-in arithmetic task has).
    """
    if not isinstance(task, ArithmeticTask):
        raise ValueError(
            f"task {task.name}: only the built-in arithmetic task has a warm start; set policies.main.model"
        )
    recipe = recipe_of(config, task, shape)
    final = cache_directory() / name_of(recipe)
    is_cached = (final / "recipe.json").is_file()
    barrier()  # every rank has looked before one of them writes
    if is_cached:
        console.message(f"warm start: cached, {final}" + (f" ({shape})" if shape != SHAPE else ""))
        return WarmStart(final, True, 0.0)
    start = time.monotonic()
    part = final.with_name(f"{final.name}.{os.getpid()}.part")
    _make(config, task.options, part, console, shape)
    if rank() == 0:
        (part / "recipe.json").write_text(json.dumps(recipe, indent=1))
        _move_into_place(part, final)
    barrier()
    return WarmStart(final, False, time.monotonic() - start)


def recipe_of(config: RunConfig, task: ArithmeticTask, shape: str = SHAPE) -> dict[str, Any]:
    """All that the warm-started policy depends on."""
    return {
        "recipe": RECIPE,
        "shape": shape,
        "seed": config.run.seed,
        "settings": config.warm_start.model_dump(mode="json"),
        "task": task.options.model_dump(mode="json"),
    }


def name_of(recipe: dict[str, Any]) -> str:
    """Of its folder in the cache."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _move_into_place(part: Path, final: Path) -> None:
    """Rename; where another run has just finished the same recipe, its files stay."""
    try:
        os.rename(part, final)
    except OSError:
        if not (final / "recipe.json").is_file():
            raise
        shutil.rmtree(part)


def _make(config: RunConfig, options: ArithmeticOptions, out: Path, console: RunConsole, shape: str) -> None:
    settings = config.warm_start
    with tempfile.TemporaryDirectory(prefix="marsrl-init-") as folder:
        initial = Path(folder) / "model"
        init_model(shape, "arithmetic", initial, seed=config.run.seed, dtype="float32")
        learner = Learner(
            PolicyConfig(
                dtype="float32",
                layout=next(iter(config.trained_policies.values())).layout,
                optimizer=OptimizerConfig(lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay),
                router_aux_loss=settings.router_aux_loss,
            ),
            str(initial),
            objective=PolicyObjective(mpt_probability=None),
            mpt=MptConfig(scope="off"),
            num_agents=len(WRITERS),
            total_steps=settings.max_solver_steps + settings.max_team_steps + settings.decay_steps,
            seed=config.run.seed,
        )
        school = School(settings, options, ChatRenderer(initial), random.Random(f"warm start/{config.run.seed}"))
        place = BatchShard(
            learner.data_rank, learner.data_size, config.trainer.max_tokens_per_micro_batch, learner.align
        )
        teach(learner, school, settings, place, console)
        learner.save_hf(out)


def teach(learner: Learner, school: School, settings: WarmStartConfig, place: BatchShard, console: RunConsole) -> None:
    """Both phases; one that does not end by itself ends with a warning."""
    solver = RunningMean()
    with console.progress("warm start 1/2: Solver", settings.max_solver_steps, "steps") as bar:
        for step in range(settings.max_solver_steps):
            lr = settings.lr * min(1.0, (step + 1) / max(1, settings.warmup_steps))
            loss = solver.add(_step(learner, school.solver_lesson(step), place, lr)[Role.SOLVER])
            bar.advance(note=f"loss {loss:.3f}, next phase below {settings.solver_loss}")
            if loss < settings.solver_loss and step >= settings.short_steps:
                break
        else:
            console.warning(
                f"warm start: the Solver's loss is {solver.value:.3f} after {settings.max_solver_steps} steps, going on"
            )
    verifier = RunningMean()
    with console.progress("warm start 2/2: team", settings.max_team_steps + settings.decay_steps, "steps") as bar:
        for _ in range(settings.max_team_steps):
            loss = verifier.add(_step(learner, school.team_lesson(), place, settings.lr)[Role.VERIFIER])
            bar.advance(note=f"Verifier's loss {loss:.3f}, the learning rate falls below {settings.verifier_loss}")
            if loss < settings.verifier_loss:
                break
        else:
            console.warning(
                f"warm start: the Verifier's loss is {verifier.value:.3f} after {settings.max_team_steps} steps, going on"
            )
        for step in range(settings.decay_steps):
            lr = settings.lr * (1.0 - 0.9 * (step + 1) / settings.decay_steps)  # to a tenth
            loss = verifier.add(_step(learner, school.team_lesson(), place, lr)[Role.VERIFIER])
            bar.advance(note=f"Verifier's loss {loss:.3f}, learning rate {lr:.1e}")


class RunningMean:
    """An exponentially weighted mean of the last twenty or so values, NaN before the first."""

    def __init__(self) -> None:
        self.value = math.nan

    def add(self, value: float) -> float:
        self.value = value if math.isnan(self.value) else 0.95 * self.value + 0.05 * value
        return self.value


def _step(learner: Learner, lesson: list[TrainSequence], place: BatchShard, lr: float) -> dict[Role, float]:
    """One optimizer step; returns the mean weighted loss of a trace's token, by role (drills are left out)."""
    num_tokens = [0] * len(WRITERS)
    for sequence in lesson:
        num_tokens[sequence.agent] += sequence.num_sampled
    normaliser = float(sum(num_tokens) - num_tokens[WRITERS.index(None)])
    stats = learner.step(micro_batches(lesson, place), normaliser=normaliser, lr=lr)
    sums = stats.agent_sums["weighted_nll"]
    return {
        role: loss / count
        for role, loss, count in zip(WRITERS, sums, num_tokens, strict=True)
        if role is not None and count > 0
    }


class School:
    """Makes the lessons: traces and drills as sequences, the same on every rank."""

    def __init__(
        self, settings: WarmStartConfig, options: ArithmeticOptions, renderer: ChatRenderer, rng: random.Random
    ) -> None:
        self.settings = settings
        self.options = options
        self.renderer = renderer
        self.rng = rng
        self.rates = TutorRates(
            settings.slip_solver,
            settings.slip_verifier,
            settings.slip_corrector,
            settings.anchor,
            settings.restate,
            settings.hard_claims,
            settings.slip_hard,
        )
        self._words = lru_cache(maxsize=8192)(renderer.encode_trusted)  # drills repeat

    def solver_lesson(self, step: int) -> list[TrainSequence]:
        """Phase 1: the Solver's traces, and single operations. The first steps have problems of 1-3, then 1-7 operations."""
        options = self.options
        if step < self.settings.short_steps:
            longest = 3 if step < self.settings.short_steps // 2 else options.max_operations
            options = options.model_copy(update={"min_operations": 1, "max_operations": longest})
        chains = [draw_chain(self.rng, options, held_out=False) for _ in range(self.settings.solver_batch)]
        traces = [solver_trace(self.rng, chain, self.settings.slip_solver_phase1, options) for chain in chains]
        drills = [equality_drill(self.rng) for _ in range(self.settings.equality_drills)]
        drills += [table_drill(self.rng) for _ in range(self.settings.table_drills)]
        return [self._sequence(trace) for trace in traces + drills]

    def team_lesson(self) -> list[TrainSequence]:
        """Phase 2: all three roles on the same problems."""
        chains = [draw_chain(self.rng, self.options, held_out=False) for _ in range(self.settings.team_batch)]
        traces = [trace for chain in chains for trace in team_traces(self.rng, chain, self.rates, self.options)]
        drills = [equality_drill(self.rng) for _ in range(self.settings.equality_drills)]
        return [self._sequence(trace) for trace in traces + drills]

    def _sequence(self, trace: Trace) -> TrainSequence:
        if isinstance(trace.prompt, str):
            prompt = self._words(trace.prompt)
        else:
            prompt = self.renderer.render(trace.prompt)[0]
        end = [self.renderer.eos_id] if trace.ends else []
        completion = np.concatenate([self._words(trace.completion), np.array(end, np.int32)]).astype(np.int32)
        return TrainSequence(
            uid="trace",
            prompt_ids=prompt,
            token_ids=completion,
            is_sampled=np.ones(len(completion), bool),
            rollout_logprobs=None,
            advantage=0.0,
            agent=WRITERS.index(trace.role),
            temperature=1.0,
            token_weights=np.array(trace.weights(self.settings.verdict_weight), np.float32),
        )
