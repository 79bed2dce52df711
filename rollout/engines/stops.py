"""Finds stop strings (Sampling.stop) in a completion's tokens.

Shared by the engines of our process, so that a stop string ends a completion in the same place in each, even if
it is split over two segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.types import IntArray


class StopTexts:
    """decode: token ids to text; the tokenizer of model_dir is loaded on first use."""

    def __init__(self, decode: Callable[[IntArray], str]) -> None:
        self._decode = decode

    @classmethod
    def of_model(cls, model_dir: str | Path) -> StopTexts:
        renderers: list[ChatRenderer] = []

        def decode(ids: IntArray) -> str:
            if not renderers:
                renderers.append(ChatRenderer(model_dir))
            return renderers[0].decode(ids)

        return cls(decode)

    def is_ended(self, known: IntArray, drawn: Sequence[int], stop: Sequence[str]) -> bool:
        """True if the last token completes one of the stop strings.

        known: the request's initial tokens. A token is at least a byte, so the strings' length bounds the search.
        """
        if not stop or not drawn:
            return False
        most = max(len(text.encode()) for text in stop)
        tail = list(drawn[-most:])
        if len(tail) < most:
            tail = [*known[len(known) - (most - len(tail)) :].tolist(), *tail]
        whole, before = (self._decode(np.asarray(ids, np.int32)) for ids in (tail, tail[:-1]))
        return any(whole.count(text) > before.count(text) for text in stop)

    def first_end(self, known: IntArray, drawn: Sequence[int], stop: Sequence[str], start: int) -> int | None:
        """Number of the tokens drawn with the first one from `start` on that completes one of the texts; None: none does."""
        most = max((len(text.encode()) for text in stop), default=0)
        tails = ((end, drawn[max(0, end - most) : end]) for end in range(start + 1, len(drawn) + 1))
        return next((end for end, tail in tails if self.is_ended(known, tail, stop)), None)
