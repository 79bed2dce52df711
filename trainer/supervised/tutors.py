"""Choice of the tutor, whose answers policies without a model imitate in the warm start."""

from __future__ import annotations

from typing import Any

from marsrl.rollout.tasks.arithmetic.tutor import ChainTutor
from marsrl.rollout.tasks.config import QaOptions
from marsrl.rollout.tasks.facts.tutor import DualTutor, SearchTutor
from marsrl.rollout.tasks.tutor import Tutor
from marsrl.trainer.config import RunConfig

WHO_IS_TAUGHT = "task=arithmetic, preset=cpu_search_team or preset=cpu_dual_system (with their prompts unchanged)"
"""Teams and tasks for which policies need no model, as text for messages."""


def tutor_of(config: RunConfig) -> type[Tutor[Any]] | None:
    """Return the tutor of the configured team; None: it has none, and its policies need models."""
    if config.task == "arithmetic":
        return ChainTutor
    is_terse = config.task_options.get("wording") == "terse" and all(
        a.prompt == "facts" for a in config.agents.values()
    )
    if config.task != "qa" or config.data.train is not None or not is_terse:
        return None
    if config.orchestration == "search_team" and not QaOptions.model_validate(config.task_options).calculations:
        return SearchTutor
    return DualTutor if config.orchestration == "dual_system" else None
