"""Settings of `marsrl curate`. A stage whose section is null is left out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from marsrl.rollout.config import Count, CountOr0, Settings, Share, Temperature, Tokens

Fate = Literal["drop", "keep"]


class LevelConfig(Settings):
    """Academic level, by a field of the row."""

    field: str = Field(description="of the row; dots go down into nested objects (`metadata.level`)")
    keep: list[str | int | float | bool] = Field(min_length=1)
    """values that are kept; texts in any case; of a list in the field any of them"""
    missing: Fate = Field("drop", description="rows without the field")


class NearDuplicatesConfig(Settings):
    """MinHash: a question that is much like one that is kept already is dropped."""

    threshold: float = Field(0.8, gt=0, le=1)
    """Jaccard similarity of two questions' shingles from which the later one is dropped"""
    shingle: int = Field(5, gt=0, le=100, description="characters of a shingle, of the question as it is compared")


class CriterionConfig(Settings):
    """A yes or no about a question and its reference answer, by a model."""

    policy: str = Field("main", description="name under `policies` that answers: a model directory or a server")
    instructions: str | None = Field(None, max_length=20_000)
    """what is asked, in place of the built-in words; how to answer is added"""
    missing: Fate = Field("drop", description="questions without a readable verdict")
    max_missing_share: Share = 0.1
    """of questions without a readable verdict; with more the command stops"""
    temperature: Temperature = Field(0.6, description="sampling temperature, above 0")
    top_p: float = Field(0.95, gt=0, le=1)
    """likeliest tokens of this probability together are drawn from; 1: all"""
    max_input_tokens: Tokens = Field(8192, description="of a prompt; a longer one is not asked")
    max_response_tokens: Tokens = Field(2048, description="of an answer; one that is cut off has no verdict")
    template_options: dict[str, bool | str] = Field(default_factory=dict)
    """of the chat template (Qwen3: enable_thinking)"""


class BestOfNConfig(Settings):
    """Answers of the config's team: what it always gets right, or never, teaches nothing."""

    n: Count = Field(16, description="answers of the whole team to each question")
    keep: tuple[CountOr0, CountOr0] = (1, 11)
    """fewest and most right answers of a question that is kept"""
    missing: Fate = Field("drop", description="questions that too many unknown answers leave undecided")
    max_missing_share: Share = Field(0.1, description="of such questions; with more the command stops")
    batch: Count = Field(32, description="questions that are played at once, and lost when it is killed")

    @model_validator(mode="after")
    def _some_can_be_kept(self) -> BestOfNConfig:
        if not self.keep[0] <= self.keep[1] <= self.n:
            raise ValueError(
                f"curate.best_of_n.keep is {list(self.keep)}; expected two counts, the smaller first, from 0 to n={self.n}"
            )
        return self


class CurateConfig(Settings):
    """The stages of `marsrl curate`, in their order. null leaves one out."""

    max_question_chars: Tokens = Field(32_768, description="a longer question is dropped when read")
    level: LevelConfig | None = Field(None, description="academic level, by a field of the row")
    academic: CriterionConfig | None = Field(None, description="academic level, judged by a model")
    near_duplicates: NearDuplicatesConfig | None = NearDuplicatesConfig()
    clarity: CriterionConfig | None = Field(None, description="is the question clear, judged by a model")
    graduate: CriterionConfig | None = Field(None, description="is it of graduate level, judged by a model")
    best_of_n: BestOfNConfig | None = Field(None, description="how often the team is right")

    @property
    def judges(self) -> dict[str, CriterionConfig]:
        """The judges of the stages that have one, by the stage's name."""
        stages = {"academic": self.academic, "clarity": self.clarity, "graduate": self.graduate}
        return {name: judge for name, judge in stages.items() if judge is not None}
