"""Engine for a frozen policy behind a server with an OpenAI-compatible API.

    DecodeRequest (ids) -> prompt text -> POST base_url/completions -> text -> ids (renderer's tokenizer) -> DecodeResult
                     '---> messages ----> POST base_url/chat/completions --^    openai.api=chat

The server has its own tokenizer and weights, so it returns completions as text. Their token ids are our encoding (for
parsing, lengths and the log), their log-probs are unknown (NaN), and these tokens must not be trained. Responses are not trusted:
sizes are bounded and types checked. A request that keeps failing ends as Finish.ERROR, with a missing reward.

With openai.api=chat the renderer has a byte tokenizer and a ChatML template. Its control tokens, which no content can
forge, split the prompt into messages again.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import httpx
import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from marsrl.rollout.agents.parsers import THINK_CLOSE, THINK_OPEN
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import MOST_TOKENS, OpenAIOptions, problems_of, read_key
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Engine, EngineInfo, why_not_decodable
from marsrl.rollout.engines.texts import Texts
from marsrl.rollout.http_line import HttpLine, Refused, excerpt, read_json
from marsrl.rollout.text import without_surrogates
from marsrl.rollout.types import Finish, IntArray

_VERSION = 0  # the weights never change
_MOST_STOPS = 4  # the protocol's limit


class OpenAIEngine(Engine):
    """Engine that sends up to options.concurrency requests at a time. It cannot load weights or score.

    engine = OpenAIEngine(OpenAIOptions(base_url="http://judge:8000/v1", model="judge"), ChatRenderer(directory))
    """

    def __init__(self, options: OpenAIOptions, renderer: ChatRenderer, *, max_model_len: int | None = None) -> None:
        """Create the engine without connecting.

        max_model_len: limit of prompt plus completion, in the renderer's tokens; None: the server's limit.

        Raises ValueError: the variable named by options.api_key_env is unset or not a valid header.
        """
        super().__init__()
        self._is_chat = options.api == "chat"
        self._options, self._renderer, self._texts = options, renderer, Texts(renderer.decode)
        self._max_model_len = max_model_len
        self._key = None if options.api_key_env is None else read_key(options.api_key_env, "openai.api_key_env")
        self._ends = [renderer.prompt_text(np.asarray([i], np.int32)) for i in renderer.stop_ids]
        self._threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix="marsrl-openai")
        self._line = self._connect()
        self._lock = threading.Lock()
        self._under_way: dict[str, tuple[DecodeRequest, Future[DecodeResult]]] = {}
        self._aborted: list[DecodeResult] = []

    def info(self) -> EngineInfo:
        name = f"{__name__}.OpenAIEngine"
        return EngineInfo("openai", name, "httpx", httpx.__version__, self._options.base_url, "unknown")

    def submit(self, requests: Sequence[DecodeRequest], *, version: int) -> None:
        self._check_versions(requests, version)
        with self._lock:
            for request in requests:
                work = self._threads.submit(self._answer, request, self._line)
                self._under_way[request.uid] = (request, work)

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        with self._lock:
            aborted, self._aborted = self._aborted, []
            waiting = {work: uid for uid, (_, work) in self._under_way.items()}
        at_most = 0.0 if aborted else min(timeout_s, threading.TIMEOUT_MAX)  # timeout_s may be infinite
        done = wait(waiting, at_most, FIRST_COMPLETED).done if waiting else set()
        with self._lock:
            ended = [self._under_way.pop(waiting[work]) for work in done if waiting[work] in self._under_way]
        results = [work.result() for _, work in ended]
        self._num_decoded += sum(len(result.token_ids) for result in results)
        return [*aborted, *results]

    def abort(self, adapter: str | None = None) -> None:
        """Abort all requests, whatever the adapter. They return UNFINISHED without tokens: servers send only whole responses."""
        with self._lock:
            for request, work in self._under_way.values():
                work.cancel()
                self._aborted.append(DecodeResult.without_tokens(request.uid, Finish.UNFINISHED, _VERSION))
            self._under_way.clear()
            line, self._line = self._line, self._connect()
        line.cut()  # results are no longer needed

    def close(self) -> None:
        """Abandon running requests; may be called twice."""
        self.abort()
        self._line.cut()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _connect(self) -> HttpLine:
        options = self._options
        return HttpLine(
            f"{options.base_url}/{'chat/completions' if self._is_chat else 'completions'}",
            "openai.",
            concurrency=options.concurrency,
            timeout_s=options.timeout_s,
            retries=options.retries,
            backoff_s=options.backoff_s,
            max_response_kib=options.max_response_kib,
            headers={} if self._key is None else {"Authorization": f"Bearer {self._key}"},
        )

    def _answer(self, request: DecodeRequest, line: HttpLine) -> DecodeResult:
        """Send a request, with retries, and return its result. Runs in a worker thread."""
        if reason := why_not_decodable(request, self._max_model_len, None):
            return DecodeResult.without_tokens(request.uid, Finish.ERROR, _VERSION, reason)
        start = time.monotonic()
        try:
            answered = line.post(self._body(request), lambda answer: self._completion(request, answer))
            return replace(answered, seconds=time.monotonic() - start)
        except Refused as error:
            reason = f"{self._options.base_url}: {error}"
            if not self._is_chat and re.match("HTTP (404|405|501)", str(error)):
                reason += "; if this server supports only chat/completions, set policies.<name>.openai.api=chat"
            reason = reason if self._key is None else reason.replace(self._key, "[key]")  # servers may repeat the key
            return DecodeResult.without_tokens(request.uid, Finish.ERROR, _VERSION, reason)

    def _body(self, request: DecodeRequest) -> bytes:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._options.model,
            "prompt": request.token_ids.tolist(),
            "max_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed % (1 << 31),
            "stop": [*sampling.stop, *([] if self._is_chat else self._ends)][:_MOST_STOPS] or None,
            "n": 1,
            "stream": False,
        }
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k  # not in OpenAI's API, but supported by open servers
        if self._is_chat:
            del body["prompt"]
            body["messages"] = messages_of(self._renderer, request.token_ids)
        elif self._options.prompt == "tokens":
            # Also send the ids of stop tokens: open servers look for `stop` in text without special tokens, and never find them.
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        else:
            # The server's tokenizer adds BOS to a text, so the text must not begin with BOS.
            body["prompt"] = self._renderer.prompt_text(self._renderer.without_first(request.token_ids))
        body |= self._options.extra_body
        return json.dumps({name: value for name, value in body.items() if value is not None}).encode()

    def _completion(self, request: DecodeRequest, answer: bytes) -> DecodeResult:
        parsed = _parse(_ChatAnswer, answer) if self._is_chat else _parse(_Answer, answer)
        choice: _Choice | _ChatChoice = parsed.choices[0]
        ids, is_whole = self._renderer.completion_ids(choice.text), choice.finish_reason == "stop"
        if is_whole:
            ids = np.append(ids, np.int32(self._renderer.eos_id))
        elif len(ids) == 0:
            raise Refused("the response has no text, and finish_reason is 'length'; expected a completion")
        usage = None
        if isinstance(parsed, _ChatAnswer):  # our token ids are not those of the server, so take its counts
            usage = None if parsed.usage is None else (parsed.usage.prompt_tokens, parsed.usage.completion_tokens)
        elif len(ids) > request.max_new_tokens:  # our encoding may have more tokens than the server's
            ids, is_whole = ids[: request.max_new_tokens], False
        finish = Finish.STOP if is_whole else Finish.LENGTH
        result = DecodeResult(request.uid, ids, np.full(len(ids), np.nan, np.float32), finish, _VERSION, usage=usage)
        return self._texts.told(request, result)


_Text = Annotated[str, BeforeValidator(without_surrogates)]  # JSON can contain half of a surrogate pair
_Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class _Choice(BaseModel):
    text: _Text
    finish_reason: Literal["stop", "length"]


class _Answer(BaseModel):
    choices: list[_Choice] = Field(min_length=1, max_length=1)


def messages_of(renderer: ChatRenderer, token_ids: IntArray) -> list[dict[str, str]]:
    """Split a prompt, written by the byte tokenizer's template, into its chat messages, without assistants' thoughts.

    Raises Refused: the prompt is not a chat, or ends within an assistant's turn, which chat/completions cannot continue.
    """
    starts = np.flatnonzero(token_ids == renderer.tokenizer.convert_tokens_to_ids("<|im_start|>"))
    before, *turns = np.split(token_ids, starts)
    messages: list[dict[str, str]] = []
    for turn in turns:
        ends = np.flatnonzero(turn == renderer.eos_id)
        role, is_whole, content = renderer.decode(turn[1 : ends[0] + 1 if len(ends) else None]).partition("\n")
        if turn is turns[-1]:
            is_whole = "" if len(ends) or content or role != "assistant" else is_whole
        elif role == "assistant":
            content = content.rpartition(THINK_CLOSE)[2].lstrip()
        if not is_whole:
            break
        if role == "system" and messages and messages[-1]["role"] == role:
            # The template writes the tools as a system message, before the system message of the team.
            messages[-1]["content"] += f"\n\n{content}"
        else:
            messages.append({"role": role, "content": content})
    if len(before) or len(starts) == 0 or not is_whole:
        raise Refused(
            "openai.api=chat needs whole messages, but this prompt is plain text or continues a partial response; ask for a "
            "new turn, or set openai.api=completions"
        )
    return messages[:-1]


class _Message(BaseModel):
    content: _Text | None = None
    reasoning_content: _Text | None = None
    reasoning: _Text | None = None


class _ChatChoice(BaseModel):
    message: _Message
    finish_reason: Literal["stop", "length"]

    @property
    def text(self) -> str:
        """The content, after the thought in <think> tags if the server returned one separately."""
        content, thought = self.message.content or "", self.message.reasoning_content or self.message.reasoning
        if not thought:
            return content
        is_open = self.finish_reason == "length" and not content
        return f"{THINK_OPEN}\n{thought}" if is_open else f"{THINK_OPEN}\n{thought}\n{THINK_CLOSE}\n\n{content}"


class _Usage(BaseModel):
    prompt_tokens: _Count
    completion_tokens: _Count


class _ChatAnswer(BaseModel):
    choices: list[_ChatChoice] = Field(min_length=1, max_length=1)
    usage: _Usage | None = None


Parsed = TypeVar("Parsed", _Answer, _ChatAnswer)


def _parse(kind: type[Parsed], answer: bytes) -> Parsed:
    """Parse a server's response; Refused if it is invalid."""
    try:
        return kind.model_validate(read_json(answer))
    except ValidationError as error:
        raise Refused(f"the response is not a completion ({problems_of(error)[:300]}): {excerpt(answer)}") from None
