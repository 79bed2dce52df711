"""Chat templates that inspect messages' contents as published templates do, and a tokenizer with their control words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AddedToken, PreTrainedTokenizerFast

from marsrl.rollout.agents.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer
from marsrl.rollout.agents.render import ChatRenderer

CALLS = """{% for call in turn.tool_calls %}{{ '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}"""
OUTPUT = """{{ '<|im_start|>user\\n<tool_response>\\n' + turn.content + '\\n</tool_response>' + end }}"""
QWEN3 = (
    """{% set end = '<|im_end|>\\n' %}{% if tools %}{{ '<|im_start|>system\\nCall <tool_call>{"name": ...}:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ end }}{% endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for turn in messages[::-1] %}
    {%- if not ns.found and turn.role == 'user' and not (turn.content.startswith('<tool_response>')
        and turn.content.endswith('</tool_response>')) %}
        {%- set ns.found = true %}{% set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for turn in messages %}
    {%- set content = CONTENT %}
    {%- if turn.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if turn.reasoning_content is string %}{% set thought = turn.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{ content }}{% endif %}"""
    + CALLS
    + """{{ end }}
    {%- elif turn.role == 'tool' %}"""
    + OUTPUT
    + """{% else %}{{ '<|im_start|>' + turn.role + '\\n' + content + end }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
)
R1 = (
    """{% set end = '<|im_end|>\\n' %}{{ bos_token }}{% for turn in messages %}
{%- if turn.role == 'assistant' %}{% set content = turn['content'] %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
    {{- '<｜Assistant｜>' + content }}"""
    + CALLS
    + """{{ end }}
{%- elif turn.role == 'tool' %}"""
    + OUTPUT
    + """{% else %}{{ '<｜User｜>' + turn['content'] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
)
TRIM = """{% for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n\\n' + turn['content'] | trim + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"""
TEMPLATES = {
    "qwen3": QWEN3.replace("CONTENT", "turn.content"),
    # As in Qwen3.5 and GLM-4.5, whose templates read contents through a macro.
    "macro": "{% macro shown(content) %}{{ content }}{% endmacro %}"
    + QWEN3.replace("CONTENT", "shown(turn.content) | trim"),
    "r1": R1,
    "llama": TRIM,
    "plain": CHAT_TEMPLATE,
}


def renderer_of(template: str, folder: Path, tokens: Sequence[AddedToken] = ()) -> ChatRenderer:
    """Build a renderer with this template, one token per byte, and the control words of Qwen3 and R1."""
    write_byte_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    words = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_tokens([*(AddedToken(word, normalized=False) for word in words), *tokens])
    tokenizer.add_special_tokens({"bos_token": "<｜begin▁of▁sentence｜>"})
    tokenizer.add_tokens(
        [AddedToken(word, special=True, normalized=False) for word in ("<｜User｜>", "<｜Assistant｜>")]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return ChatRenderer(folder)
