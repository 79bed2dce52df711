"""Settings of judges: processes (`task_options` of a run) or a model (`judge`). Import-light: pydantic only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from marsrl.rollout.config import CountOr0, Ranks, Seconds, Settings, Share, Tokens


class JudgeOptions(Settings):
    """Judgement of answers in processes of their own."""

    workers: Ranks = Field(2, description="judge processes")
    timeout_s: Seconds = Field(10.0, description="a judgement that takes longer is ended: a missing reward")
    max_answer_chars: Tokens = Field(2000, description="a longer answer is wrong")


class JudgeConfig(Settings):
    """A language model that judges answers in place of the task, by the protocol of Humanity's Last Exam."""

    policy: str = Field(description="name under `policies` of a frozen one, whose engines or server judge")
    when: Literal["evaluate", "always"] = "evaluate"
    """answers of evaluations alone, or of training too; the task judges the others"""
    temperature: float = Field(0.0, ge=0, description="of the first draw; 0 takes the most likely token")
    retries: int = Field(2, ge=0, le=100)
    """further draws, at temperature 0.7 or more, where a judgement cannot be read"""
    max_response_tokens: Tokens = Field(1024, description="of a judgement; a longer one is unreadable")
    max_input_tokens: Tokens = 8192
    """of what the judge reads; an answer that does not fit in it is wrong"""
    max_answer_chars: Tokens = Field(2000, description="a longer answer is wrong, and not asked about")
    timeout_s: Seconds = 600.0
    """an answer that is not judged by then, retries included, has no reward"""
    max_missing_share: Share = 0.2
    """share of answers without a judgement; with more of them the run stops"""
    cache_entries: CountOr0 = 100_000
    """judgements kept, those used last: the same answer is judged once; 0: none"""
    template_options: dict[str, bool | str] = Field(default_factory=dict)
    """of the judge's chat template (Qwen3: enable_thinking)"""
