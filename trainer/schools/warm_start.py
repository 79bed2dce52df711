"""Supervised traces turn random weights into a mediocre team, because a fresh machine has no pretrained weights.

The school decides what is taught and whose losses end its two phases (schools.py); then the learning rate falls. Verdict tokens
weigh more. Tutors write the demonstrations; `marsrl sft`'s trainer learns them (trainer/supervised).
The result is cached by the hash of its recipe, torch's version and the processor, and RL always starts from the cached file,
so that runs from a fresh and from a cached warm start are the same. A folder ready/ may hold the start of one recipe, the default
run's (docs/cpu_default.md): its float32 weights are the same on every processor.
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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.word_tokenizer import Trace
from marsrl.trainer.config import OptimizerConfig, PolicyConfig, RunConfig
from marsrl.trainer.data.scatter import BatchShard
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.machine import device_name
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.runs.collective import barrier, broadcast_bytes, rank
from marsrl.trainer.schools.schools import SCHOOLS, School, school_of, who_is_taught
from marsrl.trainer.supervised.imitation import DemonstrationTokens, imitate, supervised_learner

RECIPE = 3  # bump it when results change: warm starts of another recipe, cached or ready-made, are not used
READY = Path(__file__).parent / "ready"
WRITERS = (*Role, None)  # the learner's "agents": roles and drills
SHAPE = "cpu_default"  # default of policies.<name>.shape


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A warm-started policy. is_cached: it was not trained now. seconds: time spent training it."""

    model_dir: Path
    is_cached: bool
    seconds: float


def cache_directory() -> Path:
    """Folder of cached warm starts: in $MARSRL_CACHE or ~/.cache/marsrl."""
    return Path(os.environ.get("MARSRL_CACHE") or Path.home() / ".cache" / "marsrl") / "warm_start"


def warm_starts(config: RunConfig, console: RunConsole) -> dict[str, WarmStart]:
    """A warm start for every policy without a model, by name; policies of one shape share one. Collective."""
    shapes = {name: policy.shape or SHAPE for name, policy in config.policies.items() if policy.directory is None}
    made = {shape: warm_start(config, console, shape) for shape in dict.fromkeys(shapes.values())}
    return {name: made[shape] for name, shape in shapes.items()}


def warm_start(config: RunConfig, console: RunConsole, shape: str = SHAPE) -> WarmStart:
    """The warm-started policy of this recipe, shape and seed: ready-made, cached, or trained now. Collective over all ranks.

    Raises ValueError: no school teaches this team.
    """
    recipe, start = recipe_of(config, shape), time.monotonic()
    of_shape = f" ({shape})" if shape != SHAPE else ""
    if config.warm_start.ready and _is_of(READY, recipe):
        console.message(f"warm start: ready-made, {READY}; warm_start.ready=false would teach it on this machine")
        return WarmStart(READY, True, 0.0)
    final = cache_directory() / _name_here(recipe)
    is_cached = (final / "recipe.json").is_file()
    barrier()  # every rank has looked before one writes
    if is_cached:
        console.message(f"warm start: cached, {final}{of_shape}")
        return WarmStart(final, True, 0.0)
    console.message(f"warm start: taught now{of_shape}, in some minutes; the next run finds it in {final}")
    part = final.with_name(f"{final.name}.{secrets.token_hex(4)}.part")  # process ids repeat in containers
    _make(config, part, console, shape)
    if rank() == 0:
        (part / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")
        _move_into_place(part, final)
    barrier()
    return WarmStart(final, False, time.monotonic() - start)


def recipe_of(config: RunConfig, shape: str = SHAPE) -> dict[str, Any]:
    """Return all that the warm-started policy depends on, except roundings; ValueError if no school teaches this team."""
    school = school_of(config)
    if school is None:
        raise ValueError(f"nobody teaches this team; set policies.main.model, or {who_is_taught()}")
    others = {other.section for other in SCHOOLS if other.section is not None} - {school.section}
    return {
        "recipe": RECIPE,
        "shape": shape,
        "seed": config.run.seed,
        "settings": config.warm_start.model_dump(mode="json", exclude=others | {"ready"}),
        "task": school.options.model_validate(config.task_options).model_dump(mode="json"),
    }


def name_of(recipe: dict[str, Any]) -> str:
    """Name of the recipe's folder in the cache, on this hardware and with this torch: others round differently."""
    made_on = {"torch": torch.__version__, "device": device_name()}
    return hashlib.sha256(json.dumps(recipe | made_on, sort_keys=True).encode()).hexdigest()[:16]


def _is_of(folder: Path, recipe: dict[str, Any]) -> bool:
    """True if the folder holds the weights of the recipe."""
    file = folder / "recipe.json"
    return file.is_file() and json.loads(file.read_bytes()) == recipe


def _name_here(recipe: dict[str, Any]) -> str:
    """Rank 0's name on every rank, as hosts may have different processors. Collective."""
    return broadcast_bytes(name_of(recipe).encode() if rank() == 0 else None).decode()


def _move_into_place(part: Path, final: Path) -> None:
    """Rename; if another run has just finished the same recipe, keep its files."""
    try:
        os.rename(part, final)
    except OSError:
        if not (final / "recipe.json").is_file():
            raise
        shutil.rmtree(part)


def _make(config: RunConfig, out: Path, console: RunConsole, shape: str) -> None:
    settings, kind = config.warm_start, school_of(config)
    assert kind is not None, "recipe_of has found it"
    school = kind(config, random.Random(f"warm start/{config.run.seed}"))
    with tempfile.TemporaryDirectory(prefix="marsrl-init-") as folder:
        initial = Path(folder) / "model"
        init_model(shape, school.tokenizer, initial, seed=config.run.seed, dtype="float32")
        learner = supervised_learner(
            PolicyConfig(
                dtype="float32",
                layout=next(iter(config.trained_policies.values())).layout,
                optimizer=OptimizerConfig(lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay),
                router_aux_loss=settings.router_aux_loss,
            ),
            initial,
            num_writers=len(WRITERS),
            total_steps=settings.max_solver_steps + settings.max_team_steps + settings.decay_steps,
            seed=config.run.seed,
        )
        tokens = DemonstrationTokens(ChatRenderer(initial))
        teach(learner, school, tokens, learner.shard(config.trainer.max_tokens_per_micro_batch), console)
        learner.held().save_hf(out, initial)


def teach(
    learner: Learner, school: School, tokens: DemonstrationTokens, place: BatchShard, console: RunConsole
) -> None:
    """Run both phases; one that misses its goal ends with a warning."""
    settings, drills, mean = school.settings, WRITERS.index(None), math.nan

    def step(lesson: list[Trace], lr: float, role: Role) -> float:
        """The role's loss, a mean of about the last twenty."""
        nonlocal mean
        sequences = [
            tokens.sequence(
                each.prompt,
                each.completion,
                WRITERS.index(each.role),
                ends=each.ends,
                weights=each.weights(settings.verdict_weight),
            )
            for each in lesson
        ]
        losses, _ = imitate(learner, sequences, place, uncounted=(drills,), lr=lr)
        loss, _ = losses[WRITERS.index(role)]
        mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
        return mean

    role = school.alone
    with console.progress(f"warm start 1/2: {role.capitalize()}", settings.max_solver_steps, "steps") as bar:
        for number in range(settings.max_solver_steps):
            lr = settings.lr * min(1.0, (number + 1) / max(1, settings.warmup_steps))
            loss = step(school.first_lesson(number), lr, role)
            bar.advance(note=f"loss {loss:.3f}, next phase below {settings.solver_loss}")
            if loss < settings.solver_loss and number >= settings.short_steps:
                break
        else:
            console.warning(_not_learned(role, mean, settings.max_solver_steps))
    mean, role = math.nan, school.judged
    whose = f"{role.capitalize()}'s loss"
    with console.progress("warm start 2/2: team", settings.max_team_steps + settings.decay_steps, "steps") as bar:
        for _ in range(settings.max_team_steps):
            loss = step(school.team_lesson(), settings.lr, role)
            bar.advance(note=f"{whose} {loss:.3f}, the learning rate falls below {settings.verifier_loss}")
            if loss < settings.verifier_loss:
                break
        else:
            console.warning(_not_learned(role, mean, settings.max_team_steps))
        for number in range(settings.decay_steps):
            lr = settings.lr * (1.0 - 0.9 * (number + 1) / settings.decay_steps)  # to a tenth
            loss = step(school.team_lesson(), lr, role)
            bar.advance(note=f"{whose} {loss:.3f}, learning rate {lr:.1e}")


def _not_learned(role: Role, loss: float, num_steps: int) -> str:
    return f"warm start: the {role.capitalize()}'s loss is {loss:.3f} after {num_steps} steps, going on"
