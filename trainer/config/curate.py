"""Settings of `marsrl curate`. A stage whose section is null is skipped."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from marsrl.rollout.config import Count, CountOr0, Settings, Share, Temperature, Tokens

Fate = Literal["drop", "keep"]


class LevelConfig(Settings):
    """Academic level, read from a field of the row."""

    field: str = Field(description="field of the row; dots reach into nested objects (`metadata.level`)")
    keep: list[str | int | float | bool] = Field(min_length=1)
    """values to keep; case is ignored; if the field is a list, one matching item is enough"""
    missing: Fate = Field("drop", description="drop or keep rows without the field")


class NearDuplicatesConfig(Settings):
    """MinHash filter: drop a question that is similar to one already kept."""

    threshold: float = Field(0.8, gt=0, le=1)
    """Jaccard similarity of two questions' shingles at or above which the later one is dropped"""
    shingle: int = Field(5, gt=0, le=100, description="characters per shingle, counted after normalisation")


class CriterionConfig(Settings):
    """Yes/no judgement of a question and its reference answer, by a model."""

    policy: str = Field(
        "main", description="policy that judges, by its name under `policies`: a model directory or a server"
    )
    instructions: str | None = Field(None, max_length=20_000)
    """replaces the built-in question to the judge; the answer format is appended"""
    missing: Fate = Field("drop", description="drop or keep questions without a readable verdict")
    max_missing_share: Share = 0.1
    """largest share of questions without a readable verdict; above it the command stops"""
    temperature: Temperature = Field(0.6, description="sampling temperature, above 0")
    top_p: float = Field(0.95, gt=0, le=1)
    """nucleus sampling: sample from the likeliest tokens whose probabilities add up to top_p; 1: all tokens"""
    max_input_tokens: Tokens = Field(
        8192, description="longest prompt, in tokens; a question with a longer one has no verdict"
    )
    max_response_tokens: Tokens = Field(
        2048, description="longest answer, in tokens; a truncated answer has no verdict"
    )
    template_options: dict[str, bool | str] = Field(default_factory=dict)
    """variables of the chat template (Qwen3: enable_thinking)"""


class BestOfNConfig(Settings):
    """Difficulty filter by the team's own answers: questions that the team always or never solves give no gradient."""

    n: Count = Field(16, description="answers of the whole team to each question")
    keep: tuple[CountOr0, CountOr0] = (1, 11)
    """smallest and largest number of correct answers for which a question is kept"""
    missing: Fate = Field("drop", description="drop or keep questions that are undecided because rewards are missing")
    max_missing_share: Share = Field(
        0.1, description="largest share of undecided questions; above it the command stops"
    )
    batch: Count = Field(32, description="questions answered at once; their answers are lost if the command is killed")

    @model_validator(mode="after")
    def _some_can_be_kept(self) -> BestOfNConfig:
        if not self.keep[0] <= self.keep[1] <= self.n:
            raise ValueError(
                f"curate.best_of_n.keep is {list(self.keep)}; expected two counts from 0 to n={self.n}, the smaller first"
            )
        return self


class CurateConfig(Settings):
    """Stages of `marsrl curate`, in the order in which they run; null skips one."""

    max_question_chars: Tokens = Field(
        32_768, description="largest number of characters of a question; longer ones are dropped"
    )
    level: LevelConfig | None = Field(None, description="academic level, read from a field of the row")
    academic: CriterionConfig | None = Field(None, description="academic level, judged by a model")
    near_duplicates: NearDuplicatesConfig | None = NearDuplicatesConfig()
    clarity: CriterionConfig | None = Field(None, description="clarity of the question, judged by a model")
    graduate: CriterionConfig | None = Field(None, description="graduate level, judged by a model")
    best_of_n: BestOfNConfig | None = Field(None, description="difficulty: number of correct answers by the team")

    @property
    def judges(self) -> dict[str, CriterionConfig]:
        """Judges by stage name, for the stages that use one."""
        stages = {"academic": self.academic, "clarity": self.clarity, "graduate": self.graduate}
        return {name: judge for name, judge in stages.items() if judge is not None}
