"""What the schools of teams on the built-in questions share: their problems, and whose team it is."""

from __future__ import annotations

import random
from typing import ClassVar

from marsrl.rollout.tasks.config import QaOptions
from marsrl.trainer.config import RunConfig, WarmStartConfig
from marsrl.trainer.schools.school import School


class FactsSchool(School):
    """Teaches one team on the built-in questions in their terse wording; section: its orchestration too."""

    section: ClassVar[str]

    def __init__(self, config: RunConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._options = self.options(config)

    @classmethod
    def teaches(cls, config: RunConfig) -> bool:
        """The team on these questions, in the words of policies that are made from nothing."""
        return (
            config.task == "qa"
            and config.data.train is None
            and config.task_options.get("wording") == "terse"
            and config.orchestration == cls.section
            and all(agent.prompt == "facts" for agent in config.agents.values())
        )

    @classmethod
    def options(cls, config: RunConfig) -> QaOptions:
        return QaOptions.model_validate(dict(config.task_options))

    @classmethod
    def bounds(cls, settings: WarmStartConfig) -> dict[str, tuple[float, float]]:
        return {"system": getattr(settings, cls.section).accuracy}
