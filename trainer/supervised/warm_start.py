"""Warm start: policies with random weights imitate a tutor, by the same training as `marsrl sft`, and become a mediocre team.

    phase 1   one role, until its averaged loss is low       (rollout/tasks/*/tutor.py explains the order)
    phase 2   all roles, until the judged role's loss is low too
    phase 3   all roles, while the learning rate falls

The result is cached by the hash of the recipe, torch's version and the processor. RL always starts from the cached file, so that
runs with a new and with a cached warm start are the same. The folder ready/ holds the result for one recipe, that of the default
run (docs/cpu_default.md), so that the default run starts from the same float32 weights on every processor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.tutor import Trace, Tutor
from marsrl.trainer.config import OptimizerConfig, PolicyConfig, RunConfig
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.machine import device_name
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.runs.collective import barrier, broadcast_bytes, rank
from marsrl.trainer.supervised.imitation import DemonstrationTokens, Goal, Lesson, supervised_learner, teach
from marsrl.trainer.supervised.tutors import tutor_of

RECIPE = 3  # number of the recipe; raise it when results change, so that older warm starts, cached or ready-made, are not used
READY = Path(__file__).parent / "ready"
WRITERS = (*Role, None)  # the learner's agents, by index: each role, and None for drills
DRILLS = WRITERS.index(None)
SHAPE = "cpu_default"  # default of policies.<name>.shape


def cache_directory() -> Path:
    """Return the folder of cached warm starts, in $MARSRL_CACHE or ~/.cache/marsrl."""
    return Path(os.environ.get("MARSRL_CACHE") or Path.home() / ".cache" / "marsrl") / "warm_start"


def warm_starts(config: RunConfig, console: RunConsole) -> dict[str, str]:
    """Return the folder of a warm start for every policy without a model; policies of one shape share one. Collective."""
    shapes = {name: policy.shape or SHAPE for name, policy in config.policies.items() if policy.directory is None}
    made = {shape: _warm_start(config, console, shape) for shape in dict.fromkeys(shapes.values())}
    return {name: str(made[shape]) for name, shape in shapes.items()}


def _warm_start(config: RunConfig, console: RunConsole, shape: str) -> Path:
    """Return the folder of the warm-started policy of this recipe, shape and seed: ready-made, cached, or trained now."""
    recipe = recipe_of(config, shape)
    shape_note = f" ({shape})" if shape != SHAPE else ""
    if config.warm_start.ready and json.loads((READY / "recipe.json").read_bytes()) == recipe:
        console.message(f"warm start: ready-made, {READY}; warm_start.ready=false trains it on this machine")
        return READY
    name = broadcast_bytes(name_of(recipe).encode() if rank() == 0 else None)  # names depend on the host's processor
    final = cache_directory() / name.decode()
    is_cached = final.is_dir()
    barrier()  # all ranks check the cache before any rank writes to it
    if is_cached:
        console.message(f"warm start: cached, {final}{shape_note}")
        return final
    console.message(f"warm start: training now{shape_note}, some minutes; the next run finds it in {final}")
    _make(config, shape, recipe, final, console)
    return final


def recipe_of(config: RunConfig, shape: str = SHAPE) -> dict[str, Any]:
    """Return everything that determines the warm-started weights up to rounding. The team must have a tutor."""
    tutor = tutor_of(config)
    assert tutor is not None, "preflight refuses teams without a tutor and a model"
    return {
        "recipe": RECIPE,
        "shape": shape,
        "seed": config.run.seed,
        "tokenizer": tutor.tokenizer,
        "settings": config.warm_start.model_dump(mode="json", exclude={"ready"}),
        "task": tutor.task_options.model_validate(config.task_options).model_dump(mode="json"),
    }


def name_of(recipe: dict[str, Any]) -> str:
    """Return the name of the recipe's folder in the cache, which depends on hardware and torch's version, as rounding does."""
    made_on = {"torch": torch.__version__, "device": device_name()}
    return hashlib.sha256(json.dumps(recipe | made_on, sort_keys=True).encode()).hexdigest()[:16]


def _make(config: RunConfig, shape: str, recipe: dict[str, Any], final: Path, console: RunConsole) -> None:
    """Teach a random model, and rename its folder to `final` once it is complete."""
    settings, kind = config.warm_start, tutor_of(config)
    assert kind is not None, "recipe_of has found it"
    options = kind.task_options.model_validate(config.task_options)
    tutor = kind(random.Random(f"warm start/{config.run.seed}"), settings, options)
    part = final.with_name(f"{final.name}.{secrets.token_hex(4)}.part")  # process ids repeat in containers
    with tempfile.TemporaryDirectory(prefix="marsrl-init-") as folder:
        initial = Path(folder) / "model"
        init_model(shape, tutor.tokenizer, initial, seed=config.run.seed, dtype="float32")
        (initial / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")
        learner = supervised_learner(
            PolicyConfig(
                dtype="float32",
                layout=next(iter(config.trained_policies.values())).layout,
                optimizer=OptimizerConfig(lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01),
                router_aux_loss=0.01,  # without it random routers collapse onto a few experts
            ),
            initial,
            num_writers=len(WRITERS),
            total_steps=settings.max_solver_steps + settings.max_team_steps + settings.decay_steps,
            seed=config.run.seed,
        )
        _teach(config, learner, tutor, ChatRenderer(initial), console)
        learner.held().save_hf(part, initial)
    if rank() == 0:
        try:
            part.rename(final)
        except OSError:  # another run has just finished the same recipe
            if not final.is_dir():
                raise
            shutil.rmtree(part)
    barrier()


def _teach(config: RunConfig, learner: Learner, tutor: Tutor[Any], renderer: ChatRenderer, console: RunConsole) -> None:
    """Run the three phases; a phase that misses its goal ends with a warning."""
    settings, tokens, (alone, judged) = config.warm_start, DemonstrationTokens(renderer), tutor.judged

    def sequence(trace: Trace) -> TrainSequence:
        writer = WRITERS.index(trace.role)
        return tokens.sequence(trace.prompt, trace.completion, writer, ends=trace.ends, weights=trace.weights)

    def phase(
        name: str,
        role: Role,
        num_steps: int,
        traces: Callable[[int], Iterable[Trace]],
        lr: Callable[[int], float],
        goal: Goal | None = None,
        least: int = 0,
    ) -> None:
        """Teach at least `least` steps, until the role's loss, averaged over about twenty steps, reaches the goal."""
        lessons = (Lesson({"": [*map(sequence, traces(step))]}, lr(step)) for step in range(num_steps))
        taught = teach({"": learner}, lessons, config.trainer.max_tokens_per_micro_batch, uncounted=(DRILLS,))
        mean, whose = math.nan, f"{role.capitalize()}'s loss"
        with console.progress(f"warm start {name}", num_steps, "steps") as bar:
            for step, (losses, _) in enumerate(taught):
                loss = losses[WRITERS.index(role)].loss
                mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
                bar.advance(note=f"{whose} {mean:.3f}" + (f", next phase below {goal.loss}" if goal else ""))
                if goal and step >= least and goal.is_reached(mean):
                    return
        if goal:
            console.warning(
                f"warm start: the {whose} is still {mean:.3f} after {num_steps} steps, expected below {goal.loss}; going on"
            )

    def rising(step: int) -> float:
        return settings.lr * min(1.0, (step + 1) / max(1, settings.warmup_steps))

    def falling(step: int) -> float:
        return settings.lr * (1.0 - 0.9 * (step + 1) / settings.decay_steps)  # decays to a tenth of lr

    def team(step: int) -> Iterable[Trace]:
        return tutor.team_lesson()

    first, last = Goal(settings.solver_loss), Goal(settings.verifier_loss)
    phase("1/3: one role", alone, settings.max_solver_steps, tutor.foundation, rising, first, settings.short_steps)
    phase("2/3: all roles", judged, settings.max_team_steps, team, lambda step: settings.lr, last)
    phase("3/3: falling learning rate", judged, settings.decay_steps, team, falling)
