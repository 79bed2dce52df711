"""What a stage leaves behind: asks whose samples are still being decoded, carried over with their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from marsrl.rollout.engines.protocol import Progress
from marsrl.rollout.episode import Episode
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.types import Ask, BoolArray, FloatArray, IntArray, Sample, Segment


@dataclass(slots=True)
class Partial:
    """A completion so far. Token ids, never text, go on in the next stage; each segment keeps its policy version.

    turn: how often the sample has waited and gone on, with tokens behind it that it did not choose (is_sampled off).
    routed_experts: of prompt and completion, but for the last token; each as the version chose that decoded with it.
    kept_tokens: of the completion's N places; None as long as no segment recorded them.
    """

    token_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))  # [N]
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))  # [N] nats
    is_sampled: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))  # [N]
    segments: tuple[Segment, ...] = ()
    turn: int = 0
    routed_experts: ExpertArray | None = None
    kept_tokens: KeptTokens | None = None

    def extend(
        self,
        token_ids: IntArray,
        logprobs: FloatArray,
        version: int,
        routed_experts: ExpertArray | None = None,
        kept_tokens: KeptTokens | None = None,
    ) -> None:
        """Append one segment, and what was recorded with it. A segment without tokens (an engine gave up at once)
        leaves no trace."""
        if len(token_ids):
            self._keep(kept_tokens, len(token_ids))
            start = len(self.token_ids)
            self.segments = (*self.segments, Segment(start, start + len(token_ids), version))
            self.token_ids = np.concatenate([self.token_ids, token_ids]).astype(np.int32, copy=False)
            self.logprobs = np.concatenate([self.logprobs, logprobs]).astype(np.float32, copy=False)
            self.is_sampled = np.concatenate([self.is_sampled, np.ones(len(token_ids), np.bool_)])
            if routed_experts is not None:
                known = [] if self.routed_experts is None else [self.routed_experts]
                self.routed_experts = np.concatenate([*known, routed_experts])

    def go_on_with(self, token_ids: IntArray) -> None:
        """Append what somebody else wrote: no log-probs, and part of the segment that it follows."""
        num_tokens = len(token_ids)
        self._keep(None, num_tokens)
        if self.segments:
            self.segments = (*self.segments[:-1], replace(self.segments[-1], end=self.segments[-1].end + num_tokens))
        self.token_ids = np.concatenate([self.token_ids, token_ids]).astype(np.int32, copy=False)
        self.logprobs = np.concatenate([self.logprobs, np.zeros(num_tokens, np.float32)])
        self.is_sampled = np.concatenate([self.is_sampled, np.zeros(num_tokens, np.bool_)])
        self.turn += 1

    def _keep(self, kept_tokens: KeptTokens | None, num_tokens: int) -> None:
        """What was kept at the next places, which are not in token_ids yet; None: nothing was left out there."""
        if self.kept_tokens is None and kept_tokens is None:
            return
        before = self.kept_tokens or KeptTokens.nothing_left_out(len(self.token_ids))
        self.kept_tokens = before.followed_by(kept_tokens or KeptTokens.nothing_left_out(num_tokens))


@dataclass(slots=True)
class OpenAsk:
    """An ask being decoded: its input, its finished samples and its partial ones, by index.

    opened_version: the policy version at which it was first submitted; its age is counted from there.
    """

    ask: Ask
    prompt_ids: IntArray
    prompt_text: str
    opened_version: int
    finished: dict[int, Sample] = field(default_factory=dict)
    partial: dict[int, Partial] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return not self.partial


@dataclass(slots=True)
class Instance:
    """One draw of a problem, as long as anything of it goes on.

    episodes: by id, those that have not ended. held: samples that wait for its end, to be trained with all of it.
    """

    episodes: dict[str, Episode] = field(default_factory=dict)
    held: list[Sample] = field(default_factory=list)


def tokens_behind(done: int, progress: Progress | None) -> Progress | None:
    """Progress of a call that comes after others which decoded `done` tokens."""
    return None if progress is None else lambda tokens: progress(done + tokens)
