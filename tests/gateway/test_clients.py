"""OpenAI and Anthropic clients play with tools, thoughts and streams; turns continue with the sampled tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import playing, program, rollout_config, turns_of

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.trainer.models.init_model import init_model

pytestmark = pytest.mark.slow

THOUGHT = "<think>\nI add.\n</think>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  3, "b": 1e3}}\n</tool_call>'
SAYS = " It is 1003.\n"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_model("tiny", "bytes", tmp_path_factory.mktemp("models") / "qwen")


def scripted(model: Path) -> ScriptedEngine:
    """Return an engine that thinks and calls the tool, then answers with SAYS."""
    renderer = ChatRenderer(model)

    def script(request: DecodeRequest) -> list[int]:
        text = renderer.decode(request.token_ids)
        said = SAYS
        if "<tools>" in text:
            said = f"{THOUGHT}{SAYS}" if "<tool_response>" in text else f"{THOUGHT}{CALL}"
        return [*renderer.encode_trusted(said).tolist(), renderer.eos_id]

    return ScriptedEngine(script)


NUMBER = {"type": "number"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}

CHAT = f"""
import json
from openai import OpenAI

TOOLS = [{ADD}]

def run(problem, client):
    llm = OpenAI(base_url=client.base_url, api_key=client.api_key)
    turns = [{{"role": "system", "content": "You solve."}}, {{"role": "user", "content": "3 + 1000?"}}]
    message = llm.chat.completions.create(model="solver", messages=turns, tools=TOOLS, logprobs=True).choices[0].message
    assert message.content == "" and message.reasoning == "\\nI add.\\n", message
    call, = message.tool_calls
    turns += [message, {{"role": "tool", "tool_call_id": call.id, "content": "1003"}}]
    text, usage = "", None
    for chunk in llm.chat.completions.create(
        model="solver", messages=turns, tools=TOOLS, stream=True, stream_options={{"include_usage": True}}
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == {SAYS!r} and usage.completion_tokens == {len(THOUGHT) - 13 + len(SAYS) + 1}, (text, usage)
    report = llm.chat.completions.create(model="verifier", messages=[{{"role": "user", "content": text}}])
    assert report.choices[0].finish_reason == "stop" and [m.id for m in llm.models.list()] == ["solver", "verifier"]
    return {{"solver": sum(json.loads(call.function.arguments).values()), "verifier": 1.0}}
"""

RESPONSES = f"""
import json
from openai import OpenAI

TOOL = {{"type": "function", "strict": True, **{ADD["function"]}}}

def run(problem, client):
    llm = OpenAI(base_url=client.base_url, api_key=client.api_key)
    items = [{{"role": "user", "content": "3 + 1000?"}}]
    given = dict(model="solver", instructions="You solve.", tools=[TOOL], include=[])
    said = llm.responses.create(input=items, **given)
    thought, call = said.output
    assert (thought.type, call.type) == ("reasoning", "function_call"), said
    items += [each.model_dump(exclude_none=True) for each in said.output]
    items.append({{"type": "function_call_output", "call_id": call.call_id, "output": "1003"}})
    *_, last = llm.responses.create(input=items, stream=True, **given)
    assert last.response.output_text == {SAYS!r}, last
    llm.responses.create(model="verifier", input=last.response.output_text)
    return {{"solver": sum(json.loads(call.arguments).values()), last.response.id: 1003.0, "verifier": 1.0}}
"""

MESSAGES = f"""
from anthropic import Anthropic, NotFoundError, BadRequestError

TOOL = {{"name": "add", "input_schema": {SCHEMA}}}

def run(problem, client):
    llm = Anthropic(base_url=client.base_url[:-3], api_key=client.api_key)
    turns = [{{"role": "user", "content": "3 + 1000?"}}]
    given = dict(model="solver", system="You solve.", tools=[TOOL], max_tokens=500)
    for fields, kind, name in (
        ({{"output_config": {{"effort": "low"}}}}, BadRequestError, "invalid_request_error"),
        ({{"model": "nobody"}}, NotFoundError, "not_found_error"),
    ):
        try:
            llm.messages.create(messages=turns, **{{**given, **fields}})
        except kind as error:
            assert error.body["error"]["type"] == name, error.body
        else:
            raise AssertionError(fields)
    said = llm.messages.create(messages=turns, **given)
    thought, call = said.content
    assert (thought.type, call.type, said.stop_reason) == ("thinking", "tool_use", "tool_use"), said
    turns += [
        {{"role": "assistant", "content": [each.model_dump() for each in said.content]}},
        {{"role": "user", "content": [{{"type": "tool_result", "tool_use_id": call.id, "content": "1003"}}]}},
    ]
    with llm.messages.stream(messages=turns, **given) as stream:
        text = "".join(stream.text_stream)
    assert text == {SAYS!r}, text
    llm.messages.create(model="verifier", messages=[{{"role": "user", "content": text}}], max_tokens=500)
    return {{"solver": sum(call.input.values()), "verifier": 1.0}}
"""


CHOICES = f"""
import openai

ADD = {ADD}
OTHER = {{"type": "function", "function": {{"name": "subtract"}}}}
OPTIONS = {{"tools": [ADD, OTHER], "model": "solver"}}

def run(problem, client):
    llm = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
    turns = [{{"role": "user", "content": "3 + 1000?"}}]

    def refused(**fields):
        try:
            llm.chat.completions.create(messages=turns, **{{**OPTIONS, **fields}})
        except openai.BadRequestError as error:
            assert error.type == "invalid_request_error" and error.code == "unsupported_parameter", error
            return error.body["message"]

    assert refused(n=2) == "n=2 is unsupported; use 1"
    assert refused(response_format={{"type": "json_object"}}).startswith("response_format=")
    assert refused(tool_choice={{"type": "allowed_tools"}}).startswith("tool_choice=")

    def ask(choice, **fields):
        said = llm.chat.completions.create(messages=turns, tool_choice=choice, seed=3, **OPTIONS, **fields).choices[0]
        turns.append(said.message)
        for call in said.message.tool_calls or ():
            turns.append({{"role": "tool", "tool_call_id": call.id, "content": "1003"}})
        return [(call.function.name, call.function.arguments) for call in said.message.tool_calls or ()], said

    text = {{"response_format": {{"type": "text"}}}}
    calls, said = ask("required", parallel_tool_calls=False, extra_body={{"return_token_ids": True}}, **text)
    assert calls == [("add", '{{"a": 1}}')] and said.finish_reason == "tool_calls", calls
    assert bytes(said.token_ids) == b'add", "arguments": {{"a": 1}}}}\\n</tool_call>', said
    calls, _ = ask({{"type": "function", "function": {{"name": "subtract"}}}})
    assert calls == [("subtract", '{{"b": 2}}'), ("add", '{{"b": 2}}')], calls
    calls, said = ask("none")
    assert calls == [] and said.message.content == {SAYS!r}, said
    return 1.0
"""


@pytest.mark.smoke
def test_a_program_chooses_calls_and_goes_on_after_refusals(qwen: Path, tmp_path: Path) -> None:
    """Beginnings of calls that tool_choice forces are not trained. Without parallel calls, sampling ends with the first call."""
    renderer = ChatRenderer(qwen)
    first = 'add", "arguments": {"a": 1}}\n</tool_call>'
    again = '\n<tool_call>\n{"name": "add", "arguments": {"b": 2}}\n</tool_call>'
    named = f' "arguments": {{"b": 2}}}}\n</tool_call>{again}'

    def script(request: DecodeRequest) -> list[int]:
        text = renderer.decode(request.token_ids)
        said = named if text.endswith('{"name": "subtract",') else SAYS
        return renderer.encode_trusted(first + again if text.endswith('{"name": "') else said).tolist()

    engine = ScriptedEngine(script, decode=renderer.decode)
    config, text = rollout_config(prompts_per_step=1), program(tmp_path, CHOICES)
    with playing(qwen, config, text, engine=engine, parsers=("hermes", None)) as played:
        batch = played.batch()
    assert batch.metrics["rollout/failed_episodes"] == 0
    samples = {sample.uid: sample for group in batch.groups for sample in group.samples}
    assert sorted(samples) == ["000001.0/solver:0", "000001.1/solver:0"]
    for sample in samples.values():
        assert renderer.decode(sample.prompt_ids).endswith('<|im_start|>assistant\n<tool_call>\n{"name": "')
        own, runs = sample.token_ids[sample.is_sampled], turns_of(sample)
        assert renderer.decode(own) == f"{first}{named}<|im_end|>{SAYS}" and len(runs) == 5
        assert sample.reward.value == 1.0


@pytest.mark.parametrize("text", [CHAT, RESPONSES, MESSAGES], ids=["chat", "responses", "messages"])
def test_a_client_with_a_tool_makes_one_sample_of_exact_tokens(qwen: Path, tmp_path: Path, text: str) -> None:
    config = rollout_config(prompts_per_step=1)
    parsers = ("hermes", "qwen3")
    with playing(qwen, config, program(tmp_path, text), engine=scripted(qwen), parsers=parsers) as played:
        batch = played.batch()
    assert batch.metrics["rollout/failed_episodes"] == 0
    samples = {sample.uid: sample for group in batch.groups for sample in group.samples}
    assert sorted(samples) == [f"000001.{i}/{agent}:0" for i in (0, 1) for agent in ("solver", "verifier")]
    renderer = ChatRenderer(qwen)
    for i in (0, 1):
        solver = samples[f"000001.{i}/solver:0"]
        assert solver.reward.value == 1003.0 and samples[f"000001.{i}/verifier:0"].reward.value == 1.0
        whole = renderer.decode(solver.token_ids)
        assert whole == (
            f"{THOUGHT}{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n1003\n</tool_response><|im_end|>\n"
            f"<|im_start|>assistant\n{THOUGHT}{SAYS}"
        )
        own = renderer.decode(solver.token_ids[solver.is_sampled])
        assert own == f"{THOUGHT}{CALL}<|im_end|>{THOUGHT}{SAYS}"
        prompt = renderer.decode(solver.prompt_ids)
        assert prompt.startswith("<|im_start|>system\n# Tools\n<tools>\n{") and "strict" not in prompt
        assert "<|im_start|>system\nYou solve.<|im_end|>" in prompt


COMPLETIONS = f"""
from openai import OpenAI

def run(problem, client):
    llm = OpenAI(base_url=client.base_url, api_key=client.api_key)
    prompt = "<|im_start|>user\\nhello<|im_end|>\\n<|im_start|>assistant\\n"
    said = llm.completions.create(model="solver", prompt=prompt, logprobs=0).choices[0]
    assert said.text == {SAYS!r} and len(said.logprobs.token_logprobs) == len(said.text) + 1
    prompt += said.text + "<|im_end|>\\n<|im_start|>user\\nmore<|im_end|>\\n<|im_start|>assistant\\n"
    *_, last = llm.completions.create(model="solver", prompt=prompt, stream=True)
    assert last.choices[0].text == {SAYS!r}
    return 1.0
"""

GENERATE = """
import httpx

def run(problem, client):
    def generate(ids):
        body = {"model": "solver", "token_ids": ids, "sampling_params": {"max_tokens": 200, "logprobs": 1}}
        headers = {"authorization": "Bearer " + client.api_key}
        return httpx.post(client.base_url[:-3] + "/inference/v1/generate", json=body, headers=headers).json()["choices"][0]

    ids = [257, 65, 66, 258]
    said = generate(ids)
    assert len(said["logprobs"]["content"]) == len(said["token_ids"]), said
    generate([*ids, *said["token_ids"], 65, 66])
    return 1.0
"""

PARALLEL = """
import concurrent.futures

def run(problem, client):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda _: client.chat("solver", ["hello"]), range(4)))
    turns = ["hello", said[0].message]
    for word in ("one", "two"):
        client.chat("solver", [*turns, word])
    return 1.0
"""

ASYNC = """
import asyncio

async def run(problem, client):
    said = await asyncio.gather(*(client.achat("solver", ["hello"]) for _ in range(4)))
    for word in ("one", "two"):
        await client.achat("solver", ["hello", said[0].message, word])
    return 1.0
"""


COMMAND = """
import json, sys
from openai import OpenAI

problem = json.load(sys.stdin)
said = OpenAI().chat.completions.create(model="solver", messages=[{"role": "user", "content": problem["question"]}])
print("thinking aloud")
print(json.dumps({"solver": len(said.choices[0].message.content) / 13}))
"""


@pytest.mark.parametrize(
    ("text", "turns"),
    [(COMPLETIONS, [1]), (GENERATE, [1]), (PARALLEL, [0, 0, 1, 1]), (ASYNC, [0, 0, 1, 1]), (COMMAND, [0])],
    ids=["completions", "generate", "threads", "async", "command"],
)
def test_prompts_continue_samples_and_equal_calls_are_separate(
    qwen: Path, tmp_path: Path, text: str, turns: list[int]
) -> None:
    """turns: number of turns before the last one, for each sample of a session. If several answers are equal, calls that
    continue them continue different samples."""
    function = program(tmp_path, text)
    played_by = {"command": ["python", function.removesuffix(":run")]} if text is COMMAND else {"function": function}
    external = {**played_by, "superseded": "train"}  # a scripted engine may answer one call before the next arrives
    with playing(qwen, rollout_config(prompts_per_step=1), external, engine=scripted(qwen)) as played:
        samples = played.samples()
    for session in ("000001.0/", "000001.1/"):
        own = [sample for uid, sample in samples.items() if uid.startswith(session)]
        assert sorted(sample.turn for sample in own) == turns
        assert all(len(turns_of(each)) == 2 * each.turn + 1 and each.reward.value == 1.0 for each in own)
