"""Tokenizer for models without a vocabulary: one token per byte.

Its chat template is ChatML, like Qwen's, and supports tool calls.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

_SIZE = 320  # 256 bytes and room for control tokens; a multiple of 64, so that tensor parallelism can split it
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")  # ordinary added tokens, as in Qwen: they are part of the text

CHAT_TEMPLATE = """\
{% if tools %}<|im_start|>system
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Call one so: <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{% for message in messages %}{% if message['role'] == 'tool' %}<|im_start|>user
<tool_response>
{{ message['content'] }}
</tool_response>{% else %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}{% for call in message['tool_calls'] %}{{ '\\n' }}<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_byte_tokenizer(directory: str | Path, pieces: Iterable[str] = ()) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template. Byte b has id b.

    pieces: additional vocabulary from id 256 on, which is decoded but never encoded.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary |= {piece: 256 + place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    reserved = [f"<|reserved_{index}|>" for index in range(_SIZE - 256 - len(_CONTROL) - len(_THINK))]
    tokenizer.add_tokens(
        [AddedToken(word, special=True, normalized=False) for word in _CONTROL]
        + [AddedToken(word, special=False, normalized=False) for word in _THINK]
        + [AddedToken(word, special=True, normalized=False) for word in reserved]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(str(directory))


@functools.cache
def byte_tokenizer_directory() -> str:
    """Return a directory with the tokenizer, for policies without a local model; removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="marsrl-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_byte_tokenizer(folder)
    return folder
