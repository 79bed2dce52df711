"""Conversion of chat messages to prompt token ids, such that no message can forge a control token.

A chat template mixes control tokens (<|im_start|>) with untrusted contents, which it may trim, or split at </think>. So it is
rendered with the contents themselves, which gives the text of `apply_chat_template`. Tokenising this text as one string would
turn control words inside contents into control tokens. To prevent this, control words in contents are disguised: each character
is replaced by a twin, a lone surrogate, which occurs in no text. Where the template searches contents for a control word, it
searches for the disguised word. In the rendered text, plain control words come from the template. Disguised ones come from
contents; they are split before tokenising, which gives ordinary tokens with the same text.

    contents with control words -> twins -> template -> [control id | text] ... -> ids
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from marsrl.rollout.agents.parsers import THINK_CLOSE
from marsrl.rollout.fitting import even_shares
from marsrl.rollout.types import IntArray, Message, ToolFunction

_log = logging.getLogger(__name__)

Turn = Message | Mapping[str, Any]
"""A marsrl message, or one in OpenAI's format."""

# Twins and placeholders are lone surrogates, which text cannot contain.
_FIRST_TWIN = 0xD800
_PLACEHOLDER = "\udfff{index}\udfff"
_PLACEHOLDER_PATTERN = re.compile("\udfff(\\d+)\udfff")
_ANSWER = "\udffe"  # placeholder for a completion, in a chat rendered only to get the text after it
_MARK = re.compile(r"[^\w\s]|_")  # a word with one of these characters is not a plain word
_SPACE = re.compile(r"\s+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HERMES = re.compile(r"<tool_call>\s*\{")
_LITERAL = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_TAG = re.compile(rf"\{{[{{%](?:[^'\"]|{_LITERAL})*?[%}}]\}}", re.DOTALL)
_TESTS = "split|rsplit|partition|rpartition|startswith|endswith|find|rfind|index|rindex|count|replace|removeprefix|removesuffix"
_TESTED = re.compile(
    rf"(?P<before>[.|]\s*(?:{_TESTS})\s*\(\s*|[!=]=\s*)?(?P<text>{_LITERAL})(?P<after>\s+(?:not\s+)?in\b|\s*[!=]=)?",
    re.DOTALL,
)
"""Finds literals in a template tag; a `before` or `after` group marks literals that the template searches for in a text."""
_LATEST_TEXTS = 64  # number of texts whose ids are cached
_WINDOW = 12  # tokens; more than the bytes of a character, so that an incomplete character is recognised
_ASKED = "MARSRLASKED"  # user turn in chats rendered to find the end of an assistant's turn
_PROBE = "def f(x):\n\treturn  2024 * x  # a  b\n\n\nf(7)"  # ASCII, which every vocabulary has


class ChatRenderer:
    """Tokeniser and chat template of one model directory.

    Deterministic: the only state between calls is a cache of the latest texts' ids.

    eos_id: id of the token that ends an assistant's turn. It is the control token that the chat template writes there; if the
    template writes none, it is eos_token. stop_ids: ids of all tokens that end a completion: eos_id, then eos_token and those of
    generation_config.json. names_end: True if eos_token or generation_config.json names eos_id too, so that other programs also
    stop there.
    """

    def __init__(self, directory: str | Path) -> None:
        if not Path(directory).is_dir():
            raise ValueError(f"tokenizer directory {directory} does not exist; expected a Hugging Face model directory")
        self._directory = directory
        self._tokenizer = self.tokenizer = load_tokenizer(Path(directory))
        if not self._tokenizer.chat_template:
            raise ValueError(f"{directory}: the tokenizer has no chat template; add chat_template.jinja")
        self._fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)  # None: a tokenizer written in Python
        if self._fast is not None:
            # Splits control words in a text, like the wrapper's option split_special_tokens.
            self._fast.encode_special_tokens = True
        self._unknown_id: int | None = self._tokenizer.unk_token_id
        # Control words are the special tokens and all added tokens with punctuation: <think> and <tool_call> affect parsing too.
        # Other added tokens, such as runs of spaces and plain words, have no such effect and stay in contents.
        added = self._tokenizer.added_tokens_decoder
        self._control = {
            token.content: index for index, token in added.items() if token.special or _MARK.search(token.content)
        }
        for token in self._tokenizer.all_special_tokens:
            index: Any = self._tokenizer.convert_tokens_to_ids(token)
            self._control.setdefault(token, int(index))
        words = sorted(self._control, key=len, reverse=True)  # longest first, as the tokenizer matches
        self._control_pattern = re.compile("|".join(map(re.escape, words))) if words else None
        # Some tokens, such as those of Phi-3, absorb adjacent white space.
        self._take_left = {token.content for token in added.values() if token.lstrip}
        self._take_right = {token.content for token in added.values() if token.rstrip}
        self._longest = max(map(len, words), default=0)
        self._heads = frozenset(word[:end] for word in words for end in range(1, len(word)))
        self._tails = frozenset(word[start:] for word in words for start in range(1, len(word)))
        characters = sorted({character for word in words for character in word if not character.isspace()})
        self._twins = {ord(character): _FIRST_TWIN + place for place, character in enumerate(characters)}
        self._plain = {twin: character for character, twin in self._twins.items()}
        self._looking_for_twins = lru_cache(maxsize=4)(self._with_twins)  # one template for chats, another for tools
        self._require_all_shown = lru_cache(_LATEST_TEXTS)(self._check_all_shown)
        self._has_warned = False
        self._control_ids = frozenset(self._control.values())
        written, named = self._end_of_turn(), self._tokenizer.eos_token_id
        if written is None and named is None:
            raise ValueError(
                f"{directory}: the tokenizer has no eos_token, and the chat template writes no control token after an "
                "assistant's turn; set eos_token in tokenizer_config.json"
            )
        # A base model's eos_token often differs from the end that its chat template writes; completions stop at both.
        self.eos_id: int = named if written is None else self._control[written]
        told = {*_generation_stops(Path(directory)), *([] if named is None else [named])}
        self.stop_ids: tuple[int, ...] = (self.eos_id, *sorted(told - {self.eos_id}))
        self.names_end = self.eos_id in told
        self._put_around = self._added_around("7")
        self._has_written_end = written is not None
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab().values())  # ids may have gaps
        # Cached, because a team's prompts repeat instructions, problems and the template's text.
        self._encode_text = lru_cache(_LATEST_TEXTS)(self._encoded)

    def render(
        self, messages: Sequence[Turn], tools: Sequence[Any] = (), /, **template_options: bool | str
    ) -> tuple[IntArray, str]:
        """Render a chat that ends where the model continues: (prompt ids [N] int32, prompt text for display).

        tools: functions that the chat template shows, marsrl's or in OpenAI's format. template_options: options of the chat
        template (Qwen3: enable_thinking).

        The text equals that of the tokenizer's `apply_chat_template`. ValueError: the template rejects the turns, or omits one.
        """
        if messages and all(isinstance(message, Message) for message in messages):
            self._require_all_shown(_roles(messages), True, tuple(template_options.items()))
        text = self._templated(messages, tools, template_options)
        shown = text.translate(self._plain)
        self._check_programs_contents((), messages, shown, tools, template_options)
        return self._ids(text), shown

    def render_cut(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        cut: Literal["middle", "left"],
        tools: Sequence[ToolFunction] = (),
        /,
        **template_options: bool | str,
    ) -> tuple[IntArray, str] | None:
        """Render as `render` does, cut to max_tokens by removing tokens from the middle or the left of the messages' contents.

        Contents are cut in the form in which the template shows them (without thoughts that it omits). The longest are cut first,
        down to a common length. The template's own text stays, and cuts are not marked. Contents are tokenised separately and cut
        between two tokens. Returns None if the template leaves no room for contents.
        """
        whole = self._templated(messages, tools, template_options).translate(self._plain)
        contents_kept = [self._kept(whole, messages, index, tools, template_options) for index in range(len(messages))]
        turns = [replace(message, content=_PLACEHOLDER.format(index=i)) for i, message in enumerate(messages)]
        parts = _PLACEHOLDER_PATTERN.split(self._templated(turns, tools, template_options))
        template = [self._ids(text).tolist() for text in parts[::2]]
        texts = [contents_kept[int(index)] for index in parts[1::2]]
        contents = [self.completion_ids(text).tolist() for text in texts]
        sizes = [len(content) for content in contents]
        room = max_tokens - sum(map(len, template))
        if room < 1:
            return None
        ids, shown = list(template[0]), [parts[0].translate(self._plain)]
        for position, num_kept in enumerate(even_shares(sizes, room)):
            content, text = contents[position], texts[position]
            if num_kept < len(content):
                num_first = (num_kept + 1) // 2 if cut == "middle" else 0
                first, last = content[:num_first], content[len(content) - (num_kept - num_first) :]
                content, text = first + last, self._text(first) + self._text(last)
            ids += content + template[position + 1]
            shown += [text, parts[2 * position + 2].translate(self._plain)]
        return np.asarray(ids, np.int32), "".join(shown)

    def _kept(
        self,
        whole: str,
        messages: Sequence[Message],
        index: int,
        tools: Sequence[ToolFunction],
        template_options: Mapping[str, bool | str],
    ) -> str:
        """Return the part of a content that the template shows; if that part is not contiguous, return the whole content."""
        content, mark = messages[index].content, _PLACEHOLDER.format(index=index)
        marked = [*messages[:index], replace(messages[index], content=mark), *messages[index + 1 :]]
        before, _, after = self._templated(marked, tools, template_options).translate(self._plain).partition(mark)
        kept = whole.removeprefix(before).removesuffix(after)
        return kept if whole == before + kept + after and kept in content else content

    def next_turn(
        self, messages: Sequence[Turn], has_ended: bool = True, /, **template_options: bool | str
    ) -> IntArray:
        """Return [N] int32: the tokens between a completion and the next one, for these messages.

        has_ended: True if the completion has its end token; the token, and white space that a template writes before it, are then
        not repeated. False if the completion was cut off; the token is then added.
        """
        before = Message("user", ""), Message("assistant", _ANSWER)
        if all(isinstance(message, Message) for message in messages):
            self._require_all_shown(_roles([*before, *messages]), False, tuple(template_options.items()))
        after = self._templated([*before, *messages], (), template_options).partition(_ANSWER)[2]
        self._check_programs_contents(before, messages, after.translate(self._plain), (), template_options)
        return self._ids(self._without_end(after) if has_ended else after)

    def turn_text(self, message: Mapping[str, Any], tools: Sequence[Any] = (), **template_options: bool | str) -> str:
        """Return the text that the chat template adds after an assistant's content, without the end of the turn."""
        around = {"role": "user", "content": ""}
        text = self._templated([around, {**message, "content": _ANSWER}, around], tools, template_options)
        after = text.partition(_ANSWER)[2]
        ends = [after.index(word) for word, index in self._control.items() if index in self.stop_ids and word in after]
        return after[: min(ends, default=None)].translate(self._plain)

    def keeps_thoughts(
        self,
        answered: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        /,
        **template_options: bool | str,
    ) -> bool:
        """Return True if, after the messages `new`, the template still shows all thoughts of an answered chat.

        False if the chat template now omits some, as Qwen3's does once a user writes again. The thoughts of an assistant's turn
        are its reasoning_content, or the part of its content before </think>.
        """
        in_fields = "reasoning_content" in self._tokenizer.get_chat_template(tools=list(tools) or None)
        turns, marks = [dict(message) for message in (*answered, *new)], dict[int, str]()
        for index, turn in enumerate(turns):
            thought = turn.pop("reasoning_content", None)
            if turn["role"] != "assistant" or not (thought or THINK_CLOSE in turn["content"]):
                continue
            marks[index] = mark = _PLACEHOLDER.format(index=index)
            said = turn["content"].rpartition(THINK_CLOSE)[2]
            turn |= (
                {"content": said, "reasoning_content": mark} if in_fields else {"content": mark + THINK_CLOSE + said}
            )
        if not marks:
            return True
        is_answer = answered[-1]["role"] == "assistant"  # the template may omit an empty answer
        num_asked = len(answered) - is_answer
        held, shown = (self._applied(each, tools, template_options) for each in (turns[:num_asked], turns))
        return all(
            (mark in shown) == (mark in held or index == num_asked)
            for index, mark in marks.items()
            if index < len(answered)
        )

    def _templated(
        self, messages: Sequence[Turn], tools: Sequence[Any], template_options: Mapping[str, bool | str]
    ) -> str:
        """Render the chat with the template, with twins in control words that come from contents."""
        plain = [_strings_changed(messages, _well_formed), _strings_changed(tools, _well_formed)]
        turns, shown_tools = _strings_changed(plain, self._disguised)
        text = self._applied(plain[0], plain[1], template_options)
        if [turns, shown_tools] == plain:
            return text
        template = self._looking_for_twins(self._tokenizer.get_chat_template(tools=shown_tools or None))
        found = self._applied(turns, shown_tools, template_options, template)
        if found.translate(self._plain) == text:
            return found
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: the chat template handles control words in message contents in an unknown way; such contents stay unchanged "
                "in prompts, although the template alone would change them",
                self._directory,
            )
        return self._applied(turns, shown_tools, template_options)

    def _applied(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        template_options: Mapping[str, bool | str],
        template: str | None = None,
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools) or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                **template_options,
            )
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise ValueError(
                f"{self._directory}: the chat template rejects these turns ({roles}): {error}; use another template"
            ) from error
        return text

    def _disguised(self, text: str) -> str:
        """Replace the characters of control words in the text by twins.

        Also replaces a part of a control word at either end of the text, because the template could complete the word by changing
        the text there.
        """
        words = list(self._control_pattern.finditer(text)) if self._control_pattern else []
        places = [0, *itertools.chain.from_iterable(word.span() for word in words), len(text)]
        parts = [text[start:end] for start, end in itertools.pairwise(places)]
        return "".join(
            part.translate(self._twins) if position % 2 or self._is_open(part.strip()) else part
            for position, part in enumerate(parts)
        )

    def _is_open(self, text: str) -> bool:
        """Return True if a control word could begin at the end of the text, or end at its start."""
        return any(text[-num:] in self._heads or text[:num] in self._tails for num in range(1, self._longest))

    def _with_twins(self, template: str) -> str:
        """Return the template with twins in the control words that it searches for in contents."""
        assert self._control_pattern is not None  # without control words no content would have twins
        pattern = self._control_pattern

        def disguise(literal: re.Match[str]) -> str:
            is_tested = literal["before"] is not None or literal["after"] is not None
            text = pattern.sub(lambda word: word[0].translate(self._twins), literal["text"])
            return f"{literal['before'] or ''}{text}{literal['after'] or ''}" if is_tested else literal[0]

        return _TAG.sub(lambda tag: _TESTED.sub(disguise, tag[0]), template)

    def _without_end(self, text: str) -> str:
        """Remove the end token and white space before it from a template's text after an answer."""
        ends = sorted((word for word, index in self._control.items() if index in self.stop_ids), key=len, reverse=True)
        end = next(filter(text.lstrip().startswith, ends), None)
        return text if end is None else text.lstrip().removeprefix(end)

    def check_shows_tools(self) -> None:
        """Raise ValueError unless the chat template shows functions and uses Hermes's and Qwen's call format.

        The format is <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
        probe = ToolFunction("marsrl_probe", "", {"type": "object", "properties": {}})
        try:
            _, shown = self.render([Message("user", "")], [probe])
            self.next_turn([Message("tool", "")])
        except ValueError as error:
            raise ValueError(
                f"the chat template does not support tool turns ({error}); use another template"
            ) from error
        if probe.name not in shown or not _HERMES.search(shown):
            raise ValueError(
                "the chat template does not show tools with the call format "
                '<tool_call>{"name": ..., "arguments": {...}}</tool_call>; use a template that does'
            )

    def _check_all_shown(
        self, roles: tuple[str, ...], may_move: bool, template_options: tuple[tuple[str, bool | str], ...]
    ) -> None:
        """Raise ValueError if the template omits a turn.

        may_move: True if the template may reorder contents. Mistral's puts the system message into the last turn.
        """
        turns = [{"role": role, "content": _PLACEHOLDER.format(index=index)} for index, role in enumerate(roles)]
        text = self._applied(turns, (), dict(template_options))
        shown = [int(index) for index in _PLACEHOLDER_PATTERN.findall(text)]
        if (sorted(shown) if may_move else shown) != list(range(len(roles))):
            raise ValueError(
                f"{self._directory}: the chat template does not show every message once{'' if may_move else ' and in order'} "
                f"(it shows {shown} of {len(roles)}); use a template that keeps system, user and assistant turns"
            )

    def _check_programs_contents(
        self,
        before: Sequence[Turn],
        messages: Sequence[Turn],
        shown: str,
        tools: Sequence[Any],
        template_options: Mapping[str, bool | str],
    ) -> None:
        """Raise ValueError if the template omits the content of a program's message, for instance because of its role.

        before: turns before the messages, the last of which is _ANSWER. shown: text of the messages. The assistant's turns are
        not checked, because templates may omit thoughts in them.
        """
        unseen = {
            index: turn
            for index, turn in enumerate(messages)
            if isinstance(turn, Mapping)
            and turn["role"] != "assistant"
            and (turn.get("content") or "").strip() not in shown
        }
        if not unseen:  # the usual case, without a second rendering
            return
        marks = {index: _PLACEHOLDER.format(index=index) for index in unseen}
        marked = [
            {**unseen[index], "content": marks[index]} if index in unseen else turn
            for index, turn in enumerate(messages)
        ]
        text = self._templated([*before, *marked], tools, template_options)
        text = text.partition(_ANSWER)[2] if before else text
        if (omitted := next((index for index, mark in marks.items() if mark not in text), None)) is not None:
            raise ValueError(
                f"the chat template omits the content of message {omitted + 1} of {len(messages)}, whose role is "
                f"{unseen[omitted]['role']!r}; use another role, or join it with another message"
            )

    def encode_trusted(self, text: str) -> IntArray:
        """Return [N] int32: ids of marsrl's own text, with control words as control tokens.

        Never use it for text of models or problems.
        """
        return self._ids(_well_formed(text))

    def _ids(self, text: str) -> IntArray:
        """Return the ids of a text. Its control words become control tokens, and their twins ordinary text."""
        pieces: list[int | str | None] = []
        for piece in self._split_controls(text):
            pieces.extend([piece] if isinstance(piece, int) else self._break_controls(piece.translate(self._plain)))
        return self._encode_pieces(pieces)

    def decode(self, ids: IntArray) -> str:
        """Return a completion's text, control words included, without the stop token at its end."""
        if len(ids) and int(ids[-1]) in self.stop_ids:
            ids = ids[:-1]
        return self._text(ids.tolist())

    def pieces(self, ids: IntArray) -> list[str]:
        """Return the text of each token, for display; joined, they are the whole text, stop token included.

        A token's text is what the token adds to the text of all tokens before it. A character split over several tokens
        belongs to the last of them, and so do invalid bytes.
        """
        numbers: list[int] = ids.tolist()
        windows = [numbers[max(0, end - _WINDOW) : end] for end in range(1, len(numbers) + 1)]
        texts, before = self._texts(windows), [_settled(text) for text in self._texts([each[:-1] for each in windows])]
        settled = [*map(_settled, texts[:-1]), *texts[-1:]]
        return [text[len(told) :] for text, told in zip(settled, before, strict=True)]

    def _text(self, numbers: list[int]) -> str:
        return self._texts([numbers])[0]

    def _texts(self, numbers: list[list[int]]) -> list[str]:
        # Avoid the wrapper, which checks every id again in Python, and single calls of decode(), which hold the GIL.
        if self._fast is not None:
            texts: list[str] = self._fast.decode_batch(numbers, skip_special_tokens=False)
            return texts
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return [str(self._tokenizer.decode(each, **options)) for each in numbers]

    def prompt_text(self, ids: IntArray) -> str:
        """Return a prompt as text whose control words are exactly the control ids.

        A control word that a content spells in ordinary tokens is broken by a zero-width space: a server that tokenises the
        text would otherwise see the control token that `render` prevented.
        """
        shown, last = "", list[int]()
        for is_control, group in itertools.groupby((int(i) for i in ids), self._control_ids.__contains__):
            run = list(group)
            text, within = self._text(run), self._text([*last, *run])[len(self._text(last)) :]
            # SentencePiece's decoders drop a leading space. Restore it, unless the encoder had added it.
            if text != within and self.completion_ids(within).tolist() == run:
                text = within
            parts = [text] if is_control else [part for part in self._break_controls(text) if part is not None]
            shown += "\u200b".join(parts)
            last = run[-1:]
        return shown

    @property
    def ends(self) -> str:
        """Describe the tokens that end a completion, beginning with the token that ends a turn."""
        end, *others = (f"{self._text([i])} ({i})" for i in self.stop_ids)
        source = "as the chat template writes" if self._has_written_end else "eos_token: the chat template writes none"
        also = f"; {', '.join(others)} {'also stops' if len(others) == 1 else 'also stop'} it" if others else ""
        return f"{end}, {source}{also}"

    def without_first(self, ids: IntArray) -> IntArray:
        """Remove the tokens (BOS) that the tokenizer puts before every text by default."""
        first, _ = self._put_around
        return ids[len(first) :] if ids[: len(first)].tolist() == first else ids

    def why_not_text(self) -> list[str]:
        """Return reasons why a server that gets prompts as text would tokenise or end them differently from marsrl's engines."""
        first, last = self._put_around
        prompt = self._probed({"role": "user", "content": _ASKED}, prompts=True)
        added = self._text(last if prompt.startswith(self._text(first)) else first + last)
        reasons = (
            [f"a server's tokenizer adds {added} to the prompt, which the chat template does not write"]
            if added
            else []
        )
        if not self.names_end:
            reasons.append(
                f"a server may not stop at {self._text([self.eos_id])}, with which the chat template ends turns: it is neither "
                "eos_token nor in generation_config.json"
            )
        return reasons

    def why_other_tokens(self, other: ChatRenderer) -> str:
        """Describe a token that has another id in the other vocabulary; "" if all are the same."""
        ids, other_ids = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        word = min(
            (word for word in ids.keys() | other_ids.keys() if ids.get(word) != other_ids.get(word)), default=None
        )
        return "" if word is None else f"{word!r} is {ids.get(word, 'none')} here and {other_ids.get(word, 'none')}"

    def num_tokens(self, text: str) -> int:
        """Count the tokens of a text within a message."""
        return len(self.completion_ids(text))

    def cut_longest(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """Cut the texts to max_tokens in total; the longest lose their ends, down to a common length."""
        kept = even_shares([self.num_tokens(text) for text in texts], max_tokens)
        return [self.first_tokens(text, num) for text, num in zip(texts, kept, strict=True)]

    def first_tokens(self, text: str, max_tokens: int) -> str:
        """Return the text of the first max_tokens tokens; unchanged if it has no more."""
        ids = self.completion_ids(text)
        return text if len(ids) <= max_tokens else self._text(ids[:max_tokens].tolist())

    def completion_ids(self, text: str) -> IntArray:
        """Return [N] int32: ids of a completion given as text, ordinary tokens only, without an end token."""
        return self._encode_pieces(list(self._break_controls(text)))

    def _split_controls(self, text: str) -> Iterator[int | str]:
        start = 0
        for match in self._control_pattern.finditer(text) if self._control_pattern else ():
            before = text[start : match.start()]
            yield before.rstrip() if match[0] in self._take_left else before
            yield self._control[match[0]]
            start = match.end()
            if match[0] in self._take_right and (space := _SPACE.match(text, start)):
                start = space.end()
        yield text[start:]

    def _break_controls(self, text: str) -> Iterator[str | None]:
        """Yield the text in parts without control words; None between two parts marks a cut, so they must not be joined."""
        start = 0
        # Lookahead also cuts overlapping occurrences ("<|end<|end|>").
        found = re.finditer(f"(?=({self._control_pattern.pattern}))", text) if self._control_pattern else ()
        for match in found:
            cut = match.start() + max(1, len(match[1]) // 2)
            if cut > start:
                yield text[start:cut]
                yield None
                start = cut
        yield text[start:]

    def _encode_pieces(self, pieces: Sequence[int | str | None]) -> IntArray:
        """Encode adjacent texts together, up to the next control token or cut, so that ids are as in the whole string."""
        runs = [np.zeros(0, np.int32)]
        pending = ""
        for piece in [*pieces, None]:
            if isinstance(piece, str):
                pending += piece
                continue
            if pending:
                runs.append(self._encode_text(pending))
                pending = ""
            if isinstance(piece, int):
                runs.append(np.array([piece], np.int32))
        return np.concatenate(runs)

    def _encoded(self, text: str) -> IntArray:
        if self._fast is None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        else:  # twice as fast as the wrapper; unlike encode(), it releases the GIL
            ids = self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._control_ids.isdisjoint(ids):
            return np.array(ids, np.int32)
        # A word-level vocabulary maps both halves of a control word to its unknown token, which is allowed. Other control ids,
        # which appear if a tokenizer's normaliser rewrites text into a control token, are dropped.
        return np.array([i for i in ids if i == self._unknown_id or i not in self._control_ids], np.int32)

    def _end_of_turn(self) -> str | None:
        """Return the control token that the chat template writes after an assistant's turn; None if it writes none there.

        A template may close a turn only when another one follows. In that case, a token that opens turns is not an end.
        """
        question, answer = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWER}
        end = self._first_control(self._probed(question, answer).partition(_ANSWER)[2])
        if end is not None:
            return end
        before, _, rest = self._probed(question, answer, question).partition(_ASKED)
        between, _, after = rest.partition(_ANSWER)
        opening = self._probed(question, prompts=True).removeprefix(self._probed(question))
        end = self._first_control(after)
        is_opener = end is not None and (end in opening or (end in before and end != self._first_control(between)))
        return None if is_opener else end

    def _probed(self, *turns: Mapping[str, str], prompts: bool = False) -> str:
        """Render the chat with the template; "" if it rejects these turns. prompts: add the start of the assistant's next
        turn."""
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompts))
        except TemplateError:
            return ""

    def _first_control(self, text: str) -> str | None:
        """Return the control token with which a text begins, ignoring white space."""
        match = self._control_pattern.match(text.lstrip()) if self._control_pattern else None
        return None if match is None else match[0]

    def _added_around(self, text: str) -> tuple[list[int], list[int]]:
        """Return (ids before, ids after) that the tokenizer adds around the ids of a text."""
        bare, whole = (
            list(self._tokenizer(text, add_special_tokens=adds, split_special_tokens=True)["input_ids"])
            for adds in (False, True)
        )
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]


def _roles(messages: Sequence[Turn]) -> tuple[str, ...]:
    return tuple(message.role if isinstance(message, Message) else message["role"] for message in messages)


def _well_formed(text: str) -> str:
    """Return the text; ValueError if it has a lone surrogate and is not a placeholder."""
    if (found := _SURROGATE.search(text)) and text != _ANSWER and not _PLACEHOLDER_PATTERN.fullmatch(text):
        raise ValueError(f"a text has a lone surrogate (U+{ord(found[0]):X}), which cannot be encoded; remove it")
    return text


def _strings_changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value as lists and dicts, as chat templates need it, with `change` applied to every string."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Message):
        value = {"role": value.role, "content": value.content}
    if isinstance(value, ToolFunction):
        about = {"name": value.name, "description": value.description, "parameters": value.parameters}
        value = {"type": "function", "function": about}
    if isinstance(value, Mapping):
        return {_strings_changed(key, change): _strings_changed(each, change) for key, each in value.items()}
    return [_strings_changed(each, change) for each in value] if isinstance(value, list | tuple) else value


def _settled(text: str) -> str:
    """Remove U+FFFD at the end of a text, because further bytes may turn it into a character."""
    return text[: max(len(text.rstrip("\ufffd")), len(text) - 3)]


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory: tokenizer.json unchanged, whatever class tokenizer_config.json names.

    transformers would rebuild a Llama tokenizer from the vocabulary alone, which loses white space if the vocabulary is
    byte-level. Without tokenizer.json, AutoTokenizer is used. Raises ValueError if AutoTokenizer's tokenizer changes a text.
    """
    if (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
        tokenizer.backend_tokenizer.no_truncation()  # a file may request truncation or padding
        tokenizer.backend_tokenizer.no_padding()
        return tokenizer
    from transformers import AutoTokenizer

    # mistral_common's tokenizer, which reads tekken.json, has no chat template that could be rendered here.
    tokenizer = AutoTokenizer.from_pretrained(str(directory), mistral_format=False)
    again = tokenizer.decode(tokenizer.encode(_PROBE, add_special_tokens=False), clean_up_tokenization_spaces=False)
    if again != _PROBE:
        raise ValueError(
            f"{directory}: {type(tokenizer).__name__}, built without tokenizer.json, decodes {_PROBE!r} as {again!r}; expected "
            "the same text: add the model's tokenizer.json"
        )
    return tokenizer


def _generation_stops(directory: Path) -> list[int]:
    """Read the end tokens of generation_config.json or, without that file, of config.json, as transformers does."""
    paths = (directory / "generation_config.json", directory / "config.json")
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return []
    stops = json.loads(path.read_text("utf-8")).get("eos_token_id")
    return [] if stops is None else [int(i) for i in (stops if isinstance(stops, list) else [stops])]
