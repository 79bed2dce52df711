"""Settings of judges: processes (a run's `task_options`) or a model (`judge`). Imports only pydantic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from marsrl.rollout.config import CountOr0, Ranks, Seconds, Settings, Share, Tokens


class JudgeOptions(Settings):
    """Judging of answers in separate processes."""

    workers: Ranks = Field(2, description="judge processes")
    timeout_s: Seconds = Field(
        10.0, description="maximum duration of a judgement; a longer one is aborted, and its reward is missing"
    )
    max_answer_chars: Tokens = Field(2000, description="maximum answer length; longer answers are wrong")


class JudgeConfig(Settings):
    """Language model that judges answers in place of the task, with the protocol of Humanity's Last Exam."""

    policy: str = Field(description="name under `policies` of a frozen policy, whose engines or server judge")
    when: Literal["evaluate", "always"] = "evaluate"
    """evaluate: the model judges the answers of evaluations, and the task those of training; always: the model judges all"""
    temperature: float = Field(0.0, ge=0, description="temperature of the first draw; 0: greedy")
    retries: int = Field(2, ge=0, le=100)
    """further draws, at temperature 0.7 or more, if a judgement is unreadable"""
    max_response_tokens: Tokens = Field(1024, description="maximum judgement length; longer ones are unreadable")
    max_input_tokens: Tokens = 8192
    """maximum length of the judge's prompt; an answer that does not fit is wrong"""
    max_answer_chars: Tokens = Field(
        2000, description="maximum answer length; longer answers are wrong, without a judgement"
    )
    timeout_s: Seconds = 600.0
    """time limit of a judgement, retries included; beyond it the judgement and the reward are missing"""
    max_missing_share: Share = 0.2
    """maximum share of answers without a judgement; beyond it the run stops"""
    cache_entries: CountOr0 = 100_000
    """maximum number of judgements in the LRU cache, which answers repeated requests; 0: no cache"""
    template_options: dict[str, bool | str] = Field(default_factory=dict)
    """chat template options of the judge (Qwen3: enable_thinking)"""
