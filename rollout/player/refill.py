"""Counts of groups whose rewards differ and of groups that train nothing.

For each group that trains nothing, a step can add a problem (rollout.refill), and the group's problem can rest: it is not drawn
for a while (data.rest).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.types import Group


class Spread(StrEnum):
    """How the rewards of groups that are trained together differ."""

    TASK = "task"  # rewards differ even without penalties of form
    FORM = "form"  # rewards differ only by penalties of form
    NONE = "none"
    UNKNOWN = "unknown"  # known rewards do not differ, and others are missing


@dataclass(frozen=True, slots=True)
class Counting:
    """Rule by which groups are counted.

    spread_of: compares the rewards of groups that are trained together. agent: agent whose groups are counted, each when it
    closes; None: count rollout instances, each with all its groups when the instance ends. rest: data.rest.
    """

    spread_of: Callable[[Sequence[Group]], Spread]
    agent: str | None = None
    rest: int = 0


class Rest(NamedTuple):
    """Rest of a problem whose groups were dead (RefillCounts): length of the rest and the part that is left, in epochs."""

    length: int
    left: int


@dataclass(slots=True)
class RefillCounts:
    """Counts since the last batch, for rollout.refill. In a live group rewards differ even without penalties of form
    (Spread.TASK); other groups are dead.

    problems: number of added problems. form_only: dead groups whose rewards differ by penalties of form. tokens: tokens
    decoded in counted groups of added problems.
    """

    problems: int = 0
    live: int = 0
    dead: int = 0
    form_only: int = 0
    tokens: int = 0

    def count(self, spread: Spread, groups: Sequence[Group], *, is_added: bool) -> None:
        """Count one group, or the groups of one rollout instance. is_added: True if its problem was added."""
        self.live += spread is Spread.TASK
        self.dead += spread is not Spread.TASK
        self.form_only += spread is Spread.FORM
        if is_added:
            self.tokens += sum(int(np.count_nonzero(s.is_sampled)) for group in groups for s in group.samples)

    def num_due(self, config: RolloutConfig, num_open: int) -> int:
        """Return the number of problems to add now: one for each dead group, as long as live ones are missing.

        num_open: added problems that are not counted yet.
        """
        if config.refill is None:
            return 0
        num_missing = config.refill.groups - self.live - num_open
        num_left = config.most_problems - config.prompts_per_step - self.problems
        return max(0, min(self.dead - self.problems, num_missing, num_left))

    def metrics(self, config: RolloutConfig) -> Mapping[str, float]:
        """Return the counts as metrics, and `short`, the number of missing live groups."""
        if config.refill is None:
            return {}
        short = max(0, config.refill.groups - self.live)
        counts = {name: getattr(self, name) for name in ("problems", "live", "dead", "tokens", "form_only")}
        return {f"refill/{name}": value for name, value in (counts | {"short": short}).items()}
