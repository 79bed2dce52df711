"""Agents for programs, with turns parsed by vLLM's parsers of thoughts and tool calls, as in its server."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.gateway.chats import Agent, Ask, Said
from marsrl.rollout.types import IntArray

_PROBE = {"type": "function", "function": {"name": "look_up", "arguments": {"place": "Lima"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
# End marker of a call, such as </tool_call>; no match if the call is bare JSON.
_LAST_WORD = re.compile(r"[^\s\w{}\[\]\"',;][^\s{}\[\]\"',;]*$")
_BEHIND_NAME = re.compile(r"[^\w\s]*")  # punctuation after a function's name


def agents_of(
    agents: Mapping[str, AgentConfig],
    renderers: Mapping[str, ChatRenderer],
    max_response_tokens: int,
    parsers: Mapping[str, tuple[str | None, str | None]] | None = None,
    servers: Mapping[str, str] | None = None,
) -> dict[str, Agent]:
    """Return the configured agents; ValueError: a parser does not match its model.

    renderers: chat renderers by policy. parsers: vLLM's names of the tool and reasoning parsers, by policy. servers: openai.api
    of policies behind servers.
    """
    readers: dict[Any, VllmReader] = {}  # agents with equal settings share a reader
    built = {}
    for name, settings in agents.items():
        tools, thoughts = (parsers or {}).get(settings.policy, (None, None))
        key = (settings.policy, *sorted(settings.template_options.items()))
        if (tools or thoughts) and key not in readers:
            readers[key] = VllmReader(renderers[settings.policy], tools, thoughts, settings.template_options)
        most = settings.max_response_tokens or max_response_tokens
        server = (servers or {}).get(settings.policy, "")
        built[name] = Agent(name, settings, renderers[settings.policy], most, readers.get(key), server)
    return built


class VllmReader:
    """Parser of turns of a policy's model. tool_parser, reasoning_parser: names as for `vllm serve`; None: not parsed.

    Raises:
        ValueError: unknown parser, or one that does not find a call written by the model's chat template: such calls would
            silently stay text.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        tool_parser: str | None,
        reasoning_parser: str | None,
        template_options: Mapping[str, bool | str],
    ) -> None:
        from vllm.parser import ParserManager

        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # avoids a traceback for each malformed call
        self.reads_calls = tool_parser is not None
        # A copy, because encoding by a parser briefly changes the tokenizer, and other threads use the renderer's tokenizer.
        self._tokenizer, self._options = deepcopy(renderer.tokenizer), dict(template_options)
        named = f"tool_parser={tool_parser}, reasoning_parser={reasoning_parser}"
        try:
            kind = ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=self.reads_calls,
                tokenizer=self._tokenizer,
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"{named}: {error}") from error
        assert kind is not None, named
        self._kind, self._called, self.closing = kind, "", ""
        if not self.reads_calls:
            return

        def written(*calls: Any) -> str:
            return renderer.turn_text({"role": "assistant", "tool_calls": calls}, [_TOOL], **template_options)

        def calls_in(text: str) -> list[tuple[str, Any]]:
            calls = self(text, renderer.encode_trusted(text), Ask("", tools=[_TOOL])).calls
            return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]

        expected, text = ("look_up", {"place": "Lima"}), written(_PROBE)
        if calls_in(text) != [expected]:
            raise ValueError(
                f"{named} does not find the call that the model's chat template writes: {text!r}; set another parser"
            )
        self._called, closing = text.strip(), _LAST_WORD.search(text.strip())
        with suppress(ValueError):  # raised if the template supports only one call per turn
            twice = written(_PROBE, _PROBE)
            if closing and twice.count(closing[0]) == 2:
                first, _, _ = twice.partition(closing[0])
                self.closing = closing[0] if calls_in(first + closing[0]) == [expected] else ""

    def opening(self, name: str) -> str:
        before, _, after = self._called.partition("look_up")
        behind = _BEHIND_NAME.match(after)
        return f"{before}{name}{behind[0] if name and behind else ''}"

    def __call__(self, text: str, token_ids: IntArray, ask: Ask) -> Said:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        tools, options = [dict(tool) for tool in ask.tools], {**self._options, **ask.options}
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": ""}],
            tools=tools or None,
            tool_choice="auto" if tools and ask.calls_tools else "none",
            chat_template_kwargs=options,
        )
        parser = self._kind(self._tokenizer, list(request.tools or ()), chat_template_kwargs=options)
        reasoning, content, calls = parser.parse(
            text,
            request,
            enable_auto_tools=bool(tools) and ask.calls_tools,
            model_output_token_ids=token_ids.tolist(),
        )
        tool_calls = [
            {
                "id": f"call_{secrets.token_hex(8)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls or ()
        ]
        return Said(content or "", reasoning, tool_calls)
