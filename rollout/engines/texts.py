"""Texts of completions, and stop strings (Sampling.stop) in them, for every kind of engine.

Engines decode the texts, because rank 0 would spend half of its time on that. A stop string ends a completion at the same
position in each engine, even if it is split over two segments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.types import Finish, IntArray


class Texts:
    """Decoder of token ids to text. decode: function from ids to text."""

    def __init__(self, decode: Callable[[IntArray], str]) -> None:
        self._decode = decode

    @classmethod
    def of_model(cls, model_dir: str | Path) -> Texts:
        """Create a decoder that loads the model's tokenizer at the first use."""
        renderer = functools.cache(lambda: ChatRenderer(model_dir))
        return cls(lambda ids: renderer().decode(ids))

    def told(self, request: DecodeRequest, result: DecodeResult) -> DecodeResult:
        """Add the text that the request asks for (DecodeRequest.text_from) to the result.

        Decodes all tokens, including those of earlier segments, since the bytes of a character may be split between segments.
        """
        if request.text_from is None or result.finish in (Finish.UNFINISHED, Finish.ERROR):
            return result
        completion = np.concatenate([request.token_ids[request.text_from :], result.token_ids])
        return replace(result, text=self._decode(completion))

    def is_ended(self, known: IntArray, drawn: Sequence[int], stop: Sequence[str]) -> bool:
        """Return True if the last token completes one of the stop strings.

        known: the tokens of the turn in the request, before the drawn ones. Only the last n tokens are searched, where n is the
        length of the longest stop string in bytes, because a token has at least one byte.
        """
        if not stop or not drawn:
            return False
        most = max(len(text.encode()) for text in stop)
        tail = list(drawn[-most:])
        if len(tail) < most:
            tail = [*known[max(0, len(known) - most + len(tail)) :].tolist(), *tail]
        whole, before = (self._decode(np.asarray(ids, np.int32)) for ids in (tail, tail[:-1]))
        return any(whole.count(text) > before.count(text) for text in stop)

    def first_end(self, known: IntArray, drawn: Sequence[int], stop: Sequence[str], start: int) -> int | None:
        """Return the number of drawn tokens up to and including the first that completes a stop string; None if none does.

        start: index of the first drawn token to search.
        """
        most = max((len(text.encode()) for text in stop), default=0)
        tails = ((end, drawn[max(0, end - most) : end]) for end in range(start + 1, len(drawn) + 1))
        return next((end for end, tail in tails if self.is_ended(known, tail, stop)), None)
