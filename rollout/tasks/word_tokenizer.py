"""Whole-word tokenizers for policies that start from random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CONTROL = ("<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
END = "<|end|>"

# Only assistants' turns end with the end token, since the policy must learn only to end its own turns.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} "
    "{% if message['role'] == 'assistant' %}<|end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class WordTokenizer:
    r"""Tokenizer of a task's vocabulary, with a chat template for policies that start from random weights.

        WordTokenizer(("=", "claim"), gaps=" +", apart="\n").write(directory)

    words: vocabulary in addition to the control words. gaps: regular expression of separators. apart: regular expression of
    strings that are always separate words.
    """

    words: tuple[str, ...]
    gaps: str
    apart: str

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All words in order of id, padded with reserved words to a multiple of 64; the last word stands for unknown words."""
        known = tuple(dict.fromkeys((*CONTROL, *self.words)))
        return (*known, *(f"<r{index}>" for index in range(-len(known) % 64 or 64)))

    def write(self, directory: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template into an existing directory."""
        from tokenizers import AddedToken, Regex, Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Sequence as InTurn
        from tokenizers.pre_tokenizers import Split
        from transformers import PreTrainedTokenizerFast

        vocabulary = self.vocabulary
        unknown = vocabulary[-1]
        tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=unknown))
        tokenizer.pre_tokenizer = InTurn([Split(Regex(self.gaps), "removed"), Split(Regex(self.apart), "isolated")])
        tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (*CONTROL, unknown)])
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=CONTROL[0],
            eos_token=END,
            unk_token=unknown,
            clean_up_tokenization_spaces=False,
            model_max_length=1024,
        )
        wrapped.chat_template = CHAT_TEMPLATE
        wrapped.save_pretrained(str(directory))
