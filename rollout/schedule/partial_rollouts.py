"""What a stage leaves behind: asks whose samples are still being decoded, carried over with their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from marsrl.rollout.episode import Episode
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.types import Ask, FloatArray, IntArray, Sample, Segment


@dataclass(slots=True)
class Partial:
    """A completion so far. Token ids, never text, go on in the next stage; each segment keeps its policy version.

    routed_experts: of prompt and completion, but for the last token; each as the version chose that decoded with it.
    """

    token_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))  # [N]
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))  # [N] nats
    segments: tuple[Segment, ...] = ()
    routed_experts: ExpertArray | None = None

    def extend(
        self, token_ids: IntArray, logprobs: FloatArray, version: int, routed_experts: ExpertArray | None = None
    ) -> None:
        """Append one segment, and the experts that are known with it. A segment without tokens (an engine gave up at
        once) leaves no trace."""
        if len(token_ids):
            start = len(self.token_ids)
            self.segments = (*self.segments, Segment(start, start + len(token_ids), version))
            self.token_ids = np.concatenate([self.token_ids, token_ids]).astype(np.int32, copy=False)
            self.logprobs = np.concatenate([self.logprobs, logprobs]).astype(np.float32, copy=False)
            if routed_experts is not None:
                known = [] if self.routed_experts is None else [self.routed_experts]
                self.routed_experts = np.concatenate([*known, routed_experts])


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
