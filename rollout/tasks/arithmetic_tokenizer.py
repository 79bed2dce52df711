"""The arithmetic task's tokenizer: 64 words, one id each, with the chat template of the task."""

from __future__ import annotations

from pathlib import Path

CONTROL = ("<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
END = "<|end|>"
_WORDS = (
    *("\n", "=", "claim", "got", "said", "agree", "rebut"),
    *("Answer:", "Verdict:", "correct", "wrong", "grade", "fix"),
)
_OPERATIONS = (
    *(f"+{digit}" for digit in range(1, 10)),
    *(f"-{digit}" for digit in range(1, 10)),
    *("*3", "*7", "*9"),
)
_NAMED = (*CONTROL, *_WORDS, *"0123456789", *"abcdefgh", *_OPERATIONS)
VOCABULARY = (*_NAMED, *(f"<r{index}>" for index in range(64 - len(_NAMED))))
UNKNOWN = VOCABULARY[-1]  # a reserved word that no problem uses

# Only an assistant's turn ends with the end token: it is the one that the model has to write.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} "
    "{% if message['role'] == 'assistant' %}<|end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_arithmetic_tokenizer(directory: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into an existing directory."""
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Sequence, Split
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Sequence([Split(Regex(" +"), "removed"), Split("\n", "isolated")])
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (*CONTROL, UNKNOWN)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=CONTROL[0],
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(str(directory))
