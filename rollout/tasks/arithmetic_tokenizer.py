"""The arithmetic task's tokenizer: 64 words, one id each, with the chat template of the task."""

from __future__ import annotations

from pathlib import Path

from marsrl.rollout.tasks.word_tokenizer import CONTROL, padded, write_word_tokenizer

_WORDS = (
    *("\n", "=", "claim", "got", "said", "agree", "rebut"),
    *("Answer:", "Verdict:", "correct", "wrong", "grade", "fix"),
)
_OPERATIONS = (
    *(f"+{digit}" for digit in range(1, 10)),
    *(f"-{digit}" for digit in range(1, 10)),
    *("*3", "*7", "*9"),
)
VOCABULARY = padded((*CONTROL, *_WORDS, *"0123456789", *"abcdefgh", *_OPERATIONS))


def write_arithmetic_tokenizer(directory: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into an existing directory."""
    write_word_tokenizer(directory, VOCABULARY, gaps=" +", apart="\n")
