"""Which team is taught by whom."""

from __future__ import annotations

from marsrl.trainer.config import RunConfig
from marsrl.trainer.schools.arithmetic_school import ArithmeticSchool
from marsrl.trainer.schools.facts_schools import DualSchool, SearchSchool
from marsrl.trainer.schools.school import School

SCHOOLS: tuple[type[School], ...] = (ArithmeticSchool, SearchSchool, DualSchool)


def school_of(config: RunConfig) -> type[School] | None:
    """Who teaches the team of these settings; None: nobody, and its policies need models."""
    return next((school for school in SCHOOLS if school.teaches(config)), None)


def accuracy_before_rl(config: RunConfig) -> dict[str, tuple[float, float]]:
    """By row of the evaluation: the bounds between which a taught team is mediocre; nothing where no school teaches it."""
    school = school_of(config)
    return school.bounds(config.warm_start) if school is not None else {}


def who_is_taught() -> str:
    """For people: the settings with which a policy needs no model."""
    return ", or ".join(school.wants for school in SCHOOLS)
