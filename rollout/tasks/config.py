"""Options of the tasks (`task_options` of a run). Import-light: pydantic only."""

from __future__ import annotations

from pydantic import Field, model_validator

from marsrl.rollout.config import LONGEST_S, MOST, MOST_RANKS, MOST_TOKENS, Settings


class ArithmeticOptions(Settings):
    """The last-digit chain: which problems are made and how often the tutors slip, relative to each other."""

    min_operations: int = Field(4, ge=1, le=7, description="operations of the shortest problem")
    max_operations: int = Field(7, ge=1, le=7, description="operations of the longest problem (a letter names each)")
    held_out_modulus: int = Field(
        10, ge=2, le=MOST, description="crc32(problem) % this == 0 is held out, never trained on"
    )
    slip_add: float = Field(1.0, ge=0, description="weight of a tutor's slips at +")
    slip_subtract: float = Field(1.5, ge=0, description="weight of a tutor's slips at -")
    slip_multiply: float = Field(2.5, ge=0, description="weight of a tutor's slips at *")

    @model_validator(mode="after")
    def _lengths_agree(self) -> ArithmeticOptions:
        if self.min_operations > self.max_operations:
            raise ValueError(
                f"task_options.min_operations is {self.min_operations}, above task_options.max_operations = "
                f"{self.max_operations}"
            )
        return self


class JudgeOptions(Settings):
    """How answers are judged in processes of their own."""

    workers: int = Field(2, gt=0, le=MOST_RANKS, description="judge processes")
    timeout_s: float = Field(
        10.0, gt=0, le=LONGEST_S, description="a judgement that takes longer is ended: a missing reward"
    )
    max_answer_chars: int = Field(2000, gt=0, le=MOST_TOKENS, description="a longer answer is wrong")


class MathOptions(JudgeOptions):
    """How math answers are judged."""
