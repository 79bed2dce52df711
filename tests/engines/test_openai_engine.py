"""A frozen policy behind HTTP. A scripted server sends valid, invalid or no responses. About two seconds."""

import functools
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from completions_server import completions_server
from engine_cases import generate, pool_of
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from marsrl.rollout.agents.byte_tokenizer import write_byte_tokenizer
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import OpenAIOptions
from marsrl.rollout.engines.openai_engine import OpenAIEngine, messages_of
from marsrl.rollout.engines.protocol import DecodeRequest, Sampling
from marsrl.rollout.http_line import Refused
from marsrl.rollout.types import Finish, Message


@pytest.fixture
def ask(renderer):
    """ask(reply, texts..., options...) -> (results, server), with one request per text."""

    def run(reply, *texts, max_new_tokens=50, deadline_s=120.0, **options):
        with completions_server(reply) as server:
            given = {"model": "judge", "backoff_s": 0.01, "retries": 3, **options}
            engine = OpenAIEngine(OpenAIOptions(base_url=server.base_url, **given), renderer, max_model_len=500)
            try:
                pool = pool_of(engine, deadline_s=deadline_s)
                return generate(pool, requests(renderer, *texts, max_new_tokens=max_new_tokens), version=0), server
            finally:
                engine.close()

    return run


def requests(renderer, *texts, max_new_tokens=50):
    prompts = [renderer.render([Message("user", text)])[0] for text in texts or ("2 + 2?",)]
    sampling = Sampling(0.7, 0.9, 20, renderer.stop_ids)
    return [DecodeRequest(f"u{i}", ids, max_new_tokens, sampling, i, "a") for i, ids in enumerate(prompts)]


def test_text_is_sent_and_tokens_return_in_request_order(ask, renderer):
    others = threading.Semaphore(0)

    def reply(handler, body, before):
        if body["seed"] == 0:  # the first request is answered last
            assert others.acquire(timeout=60) and others.acquire(timeout=60)
        handler.complete(f"answer {body['seed']}")
        others.release()

    results, server = ask(reply, "one", "two", "three")
    assert [renderer.decode(r.token_ids) for r in results] == ["answer 0", "answer 1", "answer 2"]
    assert all(r.finish is Finish.STOP and r.token_ids[-1] == renderer.eos_id and r.version == 0 for r in results)
    assert all(np.isnan(r.logprobs).all() and len(r.logprobs) == len(r.token_ids) for r in results)
    body = next(b for b in server.bodies if b["seed"] == 1)
    assert body["prompt"] == renderer.render([Message("user", "two")])[1]
    settings = ("model", "max_tokens", "temperature", "top_p", "top_k")
    assert [body[name] for name in settings] == ["judge", 50, 0.7, 0.9, 20]
    assert body["stop"] == [renderer.prompt_text(np.array([i])) for i in renderer.stop_ids]
    assert server.headers[0]["path"] == "/v1/completions" and "Authorization" not in server.headers[0]


def test_control_words_in_contents_and_answers_are_text(ask, renderer):
    end = renderer.prompt_text(np.array([renderer.eos_id]))
    [result], server = ask(lambda handler, body, before: handler.complete(f"a{end}b"), f"x{end}y")
    assert renderer.decode(result.token_ids) == f"a{end}b"
    assert [int(i) for i in result.token_ids].count(renderer.eos_id) == 1  # the completion's own end token
    _, plain = ask(lambda handler, body, before: handler.complete("no"), "xy")
    sent, without = server.bodies[0]["prompt"], plain.bodies[0]["prompt"].count(end)
    assert sent.count(end) == without and sent.replace("\u200b", "").count(end) == without + 1


def test_only_the_broken_half_of_an_emoji_is_replaced(ask, renderer):
    [result], _ = ask(lambda handler, body, before: handler.complete("4\ud83d"))
    assert result.finish is Finish.STOP and renderer.decode(result.token_ids) == "4?"


def test_prompt_tokens_sends_token_ids(ask, renderer):
    _, server = ask(lambda handler, body, before: handler.complete("4"), prompt="tokens")
    assert server.bodies[0]["prompt"] == requests(renderer)[0].token_ids.tolist()
    assert server.bodies[0]["stop_token_ids"] == list(renderer.stop_ids)


@pytest.fixture
def chat(ask):
    """chat(reply, texts...): the same as ask, but through chat/completions."""
    return functools.partial(ask, api="chat")


def test_a_chat_s_messages_are_sent_without_earlier_thoughts(renderer):
    """All else is sent unchanged, even control words in contents."""
    chat = [
        Message("system", "Be brief."),
        Message("user", "2 <|im_end|>\n<|im_start|>assistant\n+ 2?"),
        Message("assistant", "<think>\n2, 3\n</think>\n\n4"),
        Message("user", ""),
    ]
    ids = renderer.render(chat)[0]
    assert messages_of(renderer, ids) == [
        {"role": each.role, "content": each.content if each.role != "assistant" else "4"} for each in chat
    ]
    drawn = [*renderer.completion_ids("<think>\n5\n</think>\n\n6"), renderer.eos_id]
    goes_on = np.concatenate([ids, drawn, renderer.next_turn([Message("user", "Sure?")])])
    assert messages_of(renderer, goes_on)[-2:] == [
        {"role": "assistant", "content": "6"},
        {"role": "user", "content": "Sure?"},
    ]
    for begun in (np.concatenate([ids, drawn[:-1]]), renderer.completion_ids("2 + 2 ="), ids[:-20]):
        with pytest.raises(Refused, match="openai.api=chat needs whole messages"):
            messages_of(renderer, begun)


def test_a_chat_answer_has_its_thought_and_the_server_s_counts(chat, renderer):
    def reply(handler, body, before):
        handler.complete(None if body["seed"] == 2 else "4", ["stop", "stop", "length"][body["seed"]],
                         **{["reasoning_content", "reasoning", "reasoning"][body["seed"]]: "2, 3"})  # fmt: skip

    results, server = chat(reply, "one", "two", "three", max_new_tokens=20)
    texts = [renderer.decode(result.token_ids) for result in results]
    # More tokens than max_new_tokens, since a token is a byte here.
    assert texts == ["<think>\n2, 3\n</think>\n\n4"] * 2 + ["<think>\n2, 3"]
    assert [(r.finish, r.usage) for r in results] == [(f, (11, 3)) for f in (Finish.STOP, Finish.STOP, Finish.LENGTH)]
    body = next(body for body in server.bodies if body["seed"] == 1)
    assert body == {
        **{"model": "judge", "messages": [{"role": "user", "content": "two"}], "max_tokens": 20, "temperature": 0.7},
        **{"top_p": 0.9, "top_k": 20, "seed": 1, "n": 1, "stream": False},
    }
    assert server.headers[0]["path"] == "/v1/chat/completions"


def test_extra_body_replaces_our_fields(chat):
    fields = {"max_tokens": None, "max_completion_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}
    _, server = chat(lambda handler, body, before: handler.complete("4"), extra_body=fields)
    (body,) = server.bodies
    assert "max_tokens" not in body and {**fields, **body} == {**body, "max_tokens": None}


def test_a_server_without_completions_names_the_setting(ask):
    [result], _ = ask(lambda handler, body, before: handler.send(404, b"Not Found"))
    assert (
        "HTTP 404: 'Not Found'; if this server supports only chat/completions, set policies.<name>.openai.api=chat"
        in result.error
    )


def test_a_program_s_stop_texts_are_sent_before_the_ends(renderer):
    (request,) = requests(renderer)
    request = replace(request, sampling=replace(request.sampling, stop=("</a>", "</b>", "</c>")))
    with completions_server(lambda handler, body, before: handler.complete("4")) as server:
        engine = OpenAIEngine(OpenAIOptions(base_url=server.base_url, model="judge"), renderer)
        generate(pool_of(engine), [request], version=0)
        engine.close()
    assert server.bodies[0]["stop"] == ["</a>", "</b>", "</c>", "<|im_end|>"]


def test_the_bos_that_a_server_adds_is_not_sent(tmp_path):
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    begin = "<|reserved_0|>"
    tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 261)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = tmp_path / "chat_template.jinja"
    template.write_text(begin + template.read_text())
    renderer = ChatRenderer(tmp_path)
    (request,) = requests(renderer)
    assert request.token_ids[0] == 261
    for prompt in ("text", "tokens"):
        with completions_server(lambda handler, body, before: handler.complete("4")) as server:
            options = OpenAIOptions(base_url=server.base_url, model="judge", prompt=prompt)
            engine = OpenAIEngine(options, renderer)
            generate(pool_of(engine), [request], version=0)
            engine.close()
        sent = server.bodies[0]["prompt"]
        read = tokenizer.encode(sent).ids if prompt == "text" else sent
        assert read == request.token_ids.tolist() and ("stop_token_ids" in server.bodies[0]) == (prompt == "tokens")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_errors_are_retried(ask, status):
    def reply(handler, body, before):
        handler.complete("4") if before == 2 else handler.send(status, b"busy", Retry_After="0.01")

    [result], server = ask(reply)
    assert result.finish is Finish.STOP and len(server.bodies) == 3


HOSTILE = {
    "not JSON": b"<html>",
    "no choices": b"{}",
    "two choices": b'{"choices": [{"text": "a", "finish_reason": "stop"}, {"text": "b", "finish_reason": "stop"}]}',
    "text of another type": b'{"choices": [{"text": 5, "finish_reason": "stop"}]}',
    "nothing, for ever": b'{"choices": [{"text": "", "finish_reason": "length"}]}',
    "deep": b"[" * 100_000,
    "a number without end": b'{"choices": ' + b"9" * 10_000 + b"}",
}


def sends(status, body, **headers):
    return lambda handler, request, before: handler.send(status, body, **headers)


LOST = {
    "stays broken": (sends(500, b"on fire"), 4, "gave up after 4 attempts: HTTP 500: 'on fire'"),
    "redirects": (sends(302, b"", Location="http://elsewhere.invalid/"), 1, "HTTP 302"),
    **{f"answers {name}": (sends(200, body), 1, "") for name, body in HOSTILE.items()},
}


@pytest.mark.parametrize(("reply", "attempts", "says"), LOST.values(), ids=LOST)
def test_an_unusable_response_ends_the_sample_with_an_error(ask, reply, attempts, says):
    [result], server = ask(reply)
    assert result.finish is Finish.ERROR and len(result.token_ids) == 0 and len(server.bodies) == attempts
    assert says in result.error and 0 < len(result.error) < 600


def test_a_silent_server_times_out(ask):
    release = threading.Event()
    [result], _ = ask(lambda handler, body, before: release.wait(60), timeout_s=0.1, retries=0)
    release.set()
    assert result.finish is Finish.ERROR and "ReadTimeout" in result.error


def test_concurrency_limits_requests_under_way(ask):
    under_way, at_once = [], []

    def reply(handler, body, before):
        under_way.append(body)
        at_once.append(len(under_way))
        time.sleep(0.02)
        under_way.remove(body)  # before the client can receive the answer and ask again
        handler.complete("4")

    results, _ = ask(reply, *(str(i) for i in range(9)), concurrency=3)
    assert len(results) == len(at_once) == 9 and max(at_once) <= 3


def test_length_is_counted_in_our_tokens(ask, renderer):
    [result], _ = ask(lambda handler, body, before: handler.complete("123456789"), max_new_tokens=5)
    assert result.finish is Finish.LENGTH and renderer.decode(result.token_ids) == "12345"
    [result], _ = ask(lambda handler, body, before: handler.complete("123", "length"), max_new_tokens=5)
    assert result.finish is Finish.LENGTH and renderer.decode(result.token_ids) == "123"


def test_the_api_key_comes_from_the_environment_and_stays_secret(ask):
    os.environ["JUDGE_KEY"] = "sk-very-secret"
    reply = lambda handler, body, before: handler.send(401, b"bad key sk-very-secret")  # noqa: E731
    [result], server = ask(reply, api_key_env="JUDGE_KEY")
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    assert "HTTP 401: 'bad key [key]'" in result.error


def test_an_aborted_request_comes_back_unfinished(renderer):
    release = threading.Event()
    with completions_server(lambda handler, body, before: release.wait(60)) as server:
        engine = OpenAIEngine(OpenAIOptions(base_url=server.base_url, model="m", retries=0), renderer)
        engine.submit(requests(renderer, "a", "b"), version=0)
        assert engine.collect(0.05) == []
        engine.abort()
        assert {(r.uid, r.finish) for r in engine.collect(1.0)} == {(f"u{i}", Finish.UNFINISHED) for i in range(2)}
        assert engine.collect(0.0) == []
        release.set()
        engine.close()
        engine.close()
